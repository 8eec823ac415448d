"""The stored keys and values of one layer whose heads keep different numbers of entries.

What a compression kept lies packed, one head after the other, so that memory is what the heads really hold. Entries
since then come to every head alike and go to buffers, as in a layer whose heads keep the same number. To be attended,
the packed entries are spread to as many columns as the fullest head needs, those of a head to the right; that copy
lives while the layer computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.layer import CompressedLayer, Compression, Lane, Observer, _Incoming
from beaconscope.kv.policies.base import CacheView, Policy


@dataclass(frozen=True)
class _Packed:
    """What the heads of a lane kept. M entries in all, K in the fullest head."""

    key: Tensor  # [M, D]
    value: Tensor  # [M, Dv]
    positions: Tensor  # [M], int64
    index: Tensor  # [R, H, K], int64, where a head's entries lie; -1 in the first columns of one that holds fewer

    @property
    def width(self) -> int:
        """K, the entries of the fullest head."""
        return self.index.shape[2]

    def spread(self, part: Tensor) -> Tensor:
        """One of the three parts as [R, H, K, ...]; where a head holds nothing, any entry."""
        return part[self.index.clamp(min=0)]

    @property
    def spread_positions(self) -> Tensor:
        """Positions, int64 [R, H, K]; -1 where a head holds nothing."""
        return self.spread(self.positions).where(self.index >= 0, -1)


class RaggedLayer(CompressedLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, of which each head keeps as many as its policy says."""

    def __init__(self, layer: int, policy: Policy, observer: Observer | None) -> None:
        super().__init__(layer, policy, observer)
        self._packed: dict[int, _Packed] = {}
        """By number of the lane, once it was compressed. ``Lane.count`` is the fullest head's, with the buffers'."""
        self._width = 0
        """Columns before those of the buffers, in what is attended."""

    def _parts(self) -> list[Tensor]:
        packed = [part for each in self._packed.values() for part in vars(each).values()]
        return super()._parts() + packed

    def kept_positions(self, lane: Lane, row: int) -> Tensor:
        """Positions stored of a sequence, int64 [H, N], ascending; -1 in the first columns of a head with fewer."""
        assert self.positions is not None
        recent = self.positions[row, :, : self._recent(lane)]
        packed = self._packed_of(lane)
        if packed is None:
            return recent
        inside = row if lane.rows.index is None else lane.rows.index.tolist().index(row)
        return torch.cat([packed.spread_positions[inside], recent], dim=-1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add T new entries and return all that is to be attended: keys [B, H, N, D] and values [B, H, N, Dv]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._incoming = _Incoming(key_states, value_states)
        if not self.lanes:
            return key_states, value_states
        tokens = key_states.shape[2]
        end = max(self._recent(lane) for lane in self.lanes) + tokens
        if end > self.slots:
            self._grow(end)
        assert self.keys is not None and self.values is not None and self.positions is not None
        for lane in self.lanes:
            rows, start = lane.rows, self._recent(lane)
            new = torch.arange(lane.seen, lane.seen + tokens, device=key_states.device)
            rows.put(self.keys, start, rows.take(key_states))
            rows.put(self.values, start, rows.take(value_states))
            rows.put(self.positions, start, new.expand(rows.size, self.positions.shape[1], tokens))
        self._width = max((packed.width for packed in self._packed.values()), default=0)
        return self._spread(self.keys[:, :, :end], "key"), self._spread(self.values[:, :, :end], "value")

    def _spread(self, recent: Tensor, name: str) -> Tensor:
        """The entries in the buffers [B, H, N, ...] with the packed ones before them."""
        whole = recent.new_zeros((*recent.shape[:2], self._width + recent.shape[2], *recent.shape[3:]))
        whole[:, :, self._width :] = recent
        for number, packed in self._packed.items():
            part = packed.spread(getattr(packed, name))
            self.lanes[number].rows.put(whole, self._width - packed.width, part)
        return whole

    def visible(self, tokens: int) -> Tensor | None:
        """What ``tokens`` new tokens may see of what :meth:`update` gave, bool [B, H, T, N]."""
        assert self.positions is not None
        end = max(self._recent(lane) for lane in self.lanes) + tokens
        slot = torch.arange(end, device=self.device)
        token = torch.arange(tokens, device=self.device)
        batch, heads = self.positions.shape[:2]
        mask = torch.zeros((batch, heads, tokens, self._width + end), dtype=torch.bool, device=self.device)
        for lane in self.lanes:
            at = slice(None) if lane.rows.index is None else lane.rows.index
            mask[at, :, :, self._width :] = slot[None, :] <= self._recent(lane) + token[:, None]
            packed = self._packed_of(lane)
            if packed is not None:
                held = (packed.index >= 0)[:, :, None].expand(-1, -1, tokens, -1)
                mask[at, :, :, self._width - packed.width : self._width] = held
        return mask

    def _packed_of(self, lane: Lane) -> _Packed | None:
        return next((self._packed[n] for n, each in enumerate(self.lanes) if each is lane and n in self._packed), None)

    def _recent(self, lane: Lane) -> int:
        """Entries of a lane in the buffers."""
        packed = self._packed_of(lane)
        return lane.count - (0 if packed is None else packed.width)

    def _needed(self, lane: Lane) -> int:
        return super()._needed(lane) - (lane.count - self._recent(lane))

    def _columns(self, lane: Lane, size: int, first: bool) -> slice:
        if first:
            return super()._columns(lane, size, first)
        packed = self._packed_of(lane)
        start = self._width - (0 if packed is None else packed.width)
        return slice(start, start + size)

    def _positions_of(self, lane: Lane, incoming: _Incoming, new: int) -> Tensor:
        if lane.seen == 0:
            return super()._positions_of(lane, incoming, new)
        return self._whole(lane, self._recent(lane) + new)[2]

    def _whole(self, lane: Lane, recent: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions of a lane, [R, H, N, ...], with ``recent`` entries from the buffers."""
        assert self.keys is not None and self.values is not None and self.positions is not None
        parts = [lane.rows.take(part)[:, :, :recent] for part in (self.keys, self.values, self.positions)]
        packed = self._packed_of(lane)
        if packed is None:
            return parts[0], parts[1], parts[2]
        before = (packed.spread(packed.key), packed.spread(packed.value), packed.spread_positions)
        key, value, positions = (torch.cat(both, dim=2) for both in zip(before, parts, strict=True))
        return key, value, positions

    def _compress(
        self, number: int, lane: Lane, incoming: _Incoming, key: Tensor, value: Tensor, info: HeadInfo, first: bool
    ) -> None:
        rows, n = lane.rows, lane.count
        entries = self._columns(lane, n, first)
        if first:
            stored_key, stored_value = (rows.take(part)[:, :, entries] for part in (incoming.key, incoming.value))
            positions = torch.arange(n, device=self.device).expand(*stored_key.shape[:2], n)
        else:
            stored_key, stored_value, positions = self._whole(lane, self._recent(lane))
        view = CacheView(
            key=rows.take(key)[:, :, entries],
            value=rows.take(value)[:, :, entries],
            positions=positions.expand(-1, key.shape[1], -1),
            newest=lane.seen - 1,
        )
        kept = lane.state.keep(view)
        if info.shared:
            kept = kept[:, :1]
        if self.observer is not None:
            self.observer.compressed(
                self.layer, number, Compression(rows.index, lane.seen - 1, positions.clone(), kept)
            )
        count = kept.sum(dim=-1)  # [R, H]
        width = int(count.max())
        # Stable, so that what is kept stays oldest first; what is not kept goes to the front.
        order = kept.to(torch.uint8).argsort(dim=-1, stable=True)[..., n - width :]
        held = kept.gather(-1, order)
        ends = count.flatten().cumsum(dim=0).view_as(count)
        column = torch.arange(width, device=kept.device)
        self._packed[number] = _Packed(
            key=stored_key[kept],
            value=stored_value[kept],
            positions=positions[kept],
            index=(ends.unsqueeze(-1) - width + column).where(held, -1),
        )
        lane.count = width
        lane.state.evicted(order.where(held, -1).expand(-1, key.shape[1], -1))

    def reset(self) -> None:
        """Forget everything, for another generation."""
        super().reset()
        self._packed, self._width = {}, 0

    def select_rows(self, rows: Tensor) -> None:
        """Go on with the sequences ``rows``, int64 [B'], of a batch of one lane."""
        super().select_rows(rows)
        for number, packed in self._packed.items():
            index = packed.index.index_select(0, rows.to(packed.index.device))
            self._packed[number] = _Packed(packed.key, packed.value, packed.positions, index)
