"""What a recording takes from a cache: queries, keys, values, hits and masses of every step, beacons and evictions.

Between two compressions a cache only grows, so that the attention of many single steps can be computed at once from the
entries of the last of them. Steps wait for that until the cache is compressed or :meth:`Recorder.drain` copies what was
taken to the host in one go; copies from a GPU go to pinned memory, and the blocks made from one drain are handed over
at the next, so that nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from beaconscope.attention.step import AttentionStep
from beaconscope.kv.beacons import BeaconTracker
from beaconscope.kv.cache import CompressedCache
from beaconscope.kv.layer import Compression
from beaconscope.trace import BeaconChange, Eviction, HeadBlock, LayerLayout, TraceLayout

_BLOCK_BYTES = 32 << 20
"""Attention weights of a long prompt are computed in pieces of at most this size."""


@dataclass(frozen=True)
class _Captured:
    """What was taken from one step of one lane. R sequences, T tokens, H recorded KV heads, M hits."""

    first_position: int
    query: Tensor  # [R, H, G, T, D]
    key: Tensor  # [R, H, T, D]
    value: Tensor | None  # [R, H, T, Dv]
    mass: Tensor  # [R, H, G, T, 3], sink, local, distant
    hit_position: Tensor  # [R, H, G, T, M], -1 past the last
    hit_mass: Tensor  # [R, H, G, T, M]


@dataclass
class _Waiting:
    """What waits of one lane in one layer."""

    queries: list[Tensor] = field(default_factory=list)
    """Of single steps that nothing has been taken from yet, each [R, H, G, 1, D]."""
    newest: AttentionStep | None = None
    """The last of these steps, which attended to all that the others did and to their entries."""
    captured: list[_Captured] = field(default_factory=list)
    compressions: list[Compression] = field(default_factory=list)


class Recorder:
    """Takes what a trace holds from the steps of a cache; the cache's observer.

    Parameters
    ----------
    layout
        What to record.
    sink_positions, local_window
        Bounds of the three ranges of attention mass.
    write
        Called with the row of a sequence in the batch and each of its blocks, in order of positions.
    """

    def __init__(
        self, layout: TraceLayout, sink_positions: int, local_window: int, write: Callable[[int, HeadBlock], None]
    ) -> None:
        self._layers = {layer.layer: layer for layer in layout.layers}
        self._hits = layout.hits
        self._values = {layer.layer: layer.value_size is not None for layer in layout.layers}
        self._sinks = sink_positions
        self._window = local_window
        self._write = write
        self._waiting: dict[tuple[int, int], _Waiting] = {}
        self._rows: dict[int, list[int]] = {}  # of the batch, in each lane
        self._copied: list[tuple[list[int], _HeadCopy]] = []

    def wants(self, layer: int) -> bool:
        """Whether the layer is recorded."""
        return layer in self._layers

    def attended(self, layer: int, lane: int, step: AttentionStep) -> None:
        """Take what is wanted of a step."""
        if lane not in self._rows:
            rows = range(step.query.shape[0]) if step.rows is None else step.rows.tolist()
            self._rows[lane] = list(rows)
        waiting = self._waiting.setdefault((layer, lane), _Waiting())
        # A sliding layer forgets by itself, so that a later step does not attend to all that an earlier one did.
        if step.tokens == 1 and step.spec.window is None:
            waiting.queries.append(step.query)
            waiting.newest = step
            return
        self._settle(layer, waiting)
        waiting.captured.append(self._capture(layer, step))

    def _settle(self, layer: int, waiting: _Waiting) -> None:
        """Take what is wanted of the single steps that wait."""
        if waiting.newest is None:
            return
        query = torch.cat(waiting.queries, dim=3)
        step = replace(
            waiting.newest, query=query, first_position=waiting.newest.last_position + 1 - len(waiting.queries)
        )
        waiting.captured.append(self._capture(layer, step))
        waiting.queries, waiting.newest = [], None

    def _capture(self, layer: int, step: AttentionStep) -> _Captured:
        heads = list(self._layers[layer].kv_heads)
        if len(heads) < step.key.shape[1]:
            step = _only_heads(step, heads)
        mass, hit_position, hit_mass = self._attention(step)
        new = slice(step.key.shape[2] - step.tokens, None)
        return _Captured(
            first_position=step.first_position,
            query=step.query,
            key=step.key[:, :, new].clone(),  # the cache goes on writing where this is a view
            value=step.value[:, :, new].clone() if self._values[layer] else None,
            mass=mass,
            hit_position=hit_position,
            hit_mass=hit_mass,
        )

    def compressed(self, layer: int, lane: int, compression: Compression) -> None:
        """Take the outcome of a compression, before the cache forgets what it evicts."""
        waiting = self._waiting.setdefault((layer, lane), _Waiting())
        self._settle(layer, waiting)
        waiting.compressions.append(compression)

    def _attention(self, step: AttentionStep) -> tuple[Tensor, Tensor, Tensor]:
        """Masses [R, H, G, T, 3] and hits [R, H, G, T, M] of a step, from the true softmax."""
        r, h, g, t, _ = step.query.shape
        n = step.key.shape[2]
        piece = max(1, _BLOCK_BYTES // (4 * r * h * g * n))
        parts = []
        for start in range(0, t, piece):
            weight = step.attention(start, start + piece)  # [R, H, G, t, N]
            position = step.first_position + start + torch.arange(weight.shape[3], device=weight.device)
            parts.append(self._summary(weight, position, step.key_positions))
        if len(parts) == 1:
            return parts[0]
        mass, hit_position, hit_mass = (torch.cat(part, dim=3) for part in zip(*parts, strict=True))
        return mass, hit_position, hit_mass

    def _summary(self, weight: Tensor, position: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Masses and hits of attention [R, H, G, T, N] at ``position`` [T] on ``key_positions`` [R, H, N]."""
        entry = key_positions[:, :, None, None, :]  # [R, H, 1, 1, N]
        back = position[:, None] - entry  # [R, H, 1, T, N]
        sink = entry < self._sinks
        local = (back <= self._window) & ~sink
        of_sink = (weight * sink).sum(dim=-1)
        of_local = (weight * local).sum(dim=-1)
        total = weight.sum(dim=-1)
        mass = torch.stack([of_sink, of_local, (total - of_sink - of_local).clamp(min=0)], dim=-1)
        top = weight.topk(min(self._hits, weight.shape[-1]), dim=-1)
        hit_position = entry.expand(*weight.shape[:3], weight.shape[3], -1).gather(-1, top.indices)
        hit_position = hit_position.masked_fill(top.values <= 0, -1)
        missing = self._hits - top.values.shape[-1]
        if missing:
            hit_position = torch.nn.functional.pad(hit_position, (0, missing), value=-1)
        hit_mass = torch.nn.functional.pad(top.values, (0, missing)) if missing else top.values
        return mass, hit_position, hit_mass

    def drain(self, cache: CompressedCache, lengths: Sequence[int] | None = None) -> None:
        """Copy what waits to the host, and hand over what an earlier drain has copied.

        Parameters
        ----------
        cache
            The cache that is observed; queries that wait in recorded layers are observed first, since beacons are
            assigned then.
        lengths
            Tokens that each sequence has in all, where some have ended; what lies beyond is not written.
        """
        cache.flush(self._layers)
        self.hand_over(lengths)
        for (layer, lane), waiting in self._waiting.items():
            self._settle(layer, waiting)
            if not waiting.captured:
                continue
            lanes = cache.lanes_of(layer)
            # Not every policy has one.
            tracker: BeaconTracker | None = getattr(lanes[lane].state, "tracker", None) if lanes else None
            copy = _HeadCopy(self._layers[layer], waiting.captured, waiting.compressions, tracker)
            self._copied.append((self._rows[lane], copy))
        self._waiting.clear()
        if not any(copy.on_device for _, copy in self._copied):
            self.hand_over(lengths)

    def hand_over(self, lengths: Sequence[int] | None = None) -> None:
        """Write the blocks that have been copied."""
        copied, self._copied = self._copied, []
        for rows, copy in copied:
            for index, row in enumerate(rows):
                block = copy.block(index, None if lengths is None else lengths[row])
                if block is not None:
                    self._write(row, block)


class _HeadCopy:
    """What one drain takes of one lane in one layer, on its way to the host."""

    def __init__(
        self,
        layer: LayerLayout,
        captured: Sequence[_Captured],
        compressions: Sequence[Compression],
        tracker: BeaconTracker | None,
    ) -> None:
        self._layer = layer
        self.first_position = captured[0].first_position
        self.on_device = captured[0].query.device.type == "cuda"
        heads = list(layer.kv_heads)

        def joined(name: str, dim: int) -> Tensor:
            parts = [getattr(part, name) for part in captured]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)

        # Narrower types are widened: float16 and bfloat16 lose nothing in float32.
        self._query = _to_host(joined("query", 3).float())
        self._key = _to_host(joined("key", 2).float())
        self._value = None if captured[0].value is None else _to_host(joined("value", 2).float())
        self._mass = _to_host(joined("mass", 3))
        self._hit_position = _to_host(joined("hit_position", 3).to(torch.int32))
        self._hit_mass = _to_host(joined("hit_mass", 3))
        self._compressions = [
            (done.position, _to_host(_heads_of(done.positions, heads)), _to_host(_heads_of(done.kept, heads)))
            for done in compressions
        ]
        self._assigned: tuple[Tensor, Tensor] | None = None  # beacon and similarity, each [R, H, G, T]
        # Position, source [R, H, G, K], members of the K' former ones [R, H, G, K'], vector [R, H, G, K, D].
        self._changes: list[tuple[int, Tensor, Tensor, Tensor]] = []
        if tracker is not None:
            self._take_beacons(tracker, heads)
        self._done = torch.cuda.Event() if self.on_device else None  # type: ignore[no-untyped-call]
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(captured[0].query.device))

    def _take_beacons(self, tracker: BeaconTracker, heads: list[int]) -> None:
        """Take what a tracker has noted since the last drain."""
        if tracker.assignments:
            beacon = torch.cat([part.beacon for part in tracker.assignments], dim=-1)[:, heads]
            similarity = torch.cat([part.similarity for part in tracker.assignments], dim=-1)[:, heads]
            self._assigned = (_to_host(beacon.to(torch.int16)), _to_host(similarity))
            tracker.assignments.clear()
        for change in tracker.changes:
            self._changes.append(
                (
                    change.position,
                    _to_host(change.beacons.source[:, heads]),
                    _to_host(change.members[:, heads]),
                    _to_host(change.beacons.vector[:, heads]),
                )
            )
        tracker.changes.clear()

    def block(self, row: int, length: int | None) -> HeadBlock | None:
        """The block of the ``row``-th sequence of the lane, cut at ``length`` tokens; None where nothing is left."""
        if self._done is not None:
            self._done.synchronize()
        total = self._query.shape[3]
        count = total if length is None else min(total, length - self.first_position)
        if count <= 0:
            return None
        last = self.first_position + count - 1
        layer = self._layer
        h, g = self._query.shape[1:3]

        def by_position(part: Tensor) -> np.ndarray:
            """[R, H, G, T, ...] -> [T, H, G, ...] of this row."""
            return part[row, :, :, :count].permute(2, 0, 1, *range(3, part.dim() - 1)).contiguous().numpy()

        mass = by_position(self._mass)
        beacon = np.full((count, h, g), -1, np.int16)
        similarity = np.full((count, h, g), np.nan, np.float32)
        if self._assigned is not None:
            beacon, similarity = (by_position(part) for part in self._assigned)
        return HeadBlock(
            layer=layer.layer,
            first_position=self.first_position,
            query=by_position(self._query),
            key=self._key[row, :, :count].permute(1, 0, 2).contiguous().numpy(),
            value=None if self._value is None else self._value[row, :, :count].permute(1, 0, 2).contiguous().numpy(),
            beacon=beacon,
            beacon_similarity=similarity,
            mass_sink=mass[..., 0],
            mass_local=mass[..., 1],
            mass_distant=mass[..., 2],
            hit_position=by_position(self._hit_position),
            hit_mass=by_position(self._hit_mass),
            beacon_changes=[change for change in self._beacon_changes(row) if change.position <= last],
            evictions=[eviction for eviction in self._evictions(row) if eviction.position <= last],
        )

    def _evictions(self, row: int) -> list[Eviction]:
        heads = self._layer.kv_heads
        found = []
        for position, positions, kept in self._compressions:
            for index, head in enumerate(heads):
                stored = min(index, positions.shape[1] - 1)  # heads of latent attention share one stored entry
                dropped = positions[row, stored][~kept[row, stored]].numpy().astype(np.int32)
                found.append(Eviction(position, head, dropped[dropped >= 0]))
        return found

    def _beacon_changes(self, row: int) -> list[BeaconChange]:
        found = []
        for position, source, members, vector in self._effective_changes():
            g, k = source.shape[2:]
            for index, head in enumerate(self._layer.kv_heads):
                former = np.zeros((g, k), np.int32)
                former[:, : members.shape[-1]] = members[row, index].numpy()
                at = source[row, index].reshape(-1).numpy().astype(np.int32)
                # A centroid has no source; its vector says where it is. One kind of selector makes all beacons.
                centroids = bool((at < 0).any())
                found.append(
                    BeaconChange(
                        position=position,
                        kv_head=head,
                        query_head=np.repeat(np.arange(g, dtype=np.int16), k),
                        source=at,
                        members=former.reshape(-1),
                        vector=vector[row, index].reshape(g * k, -1).numpy() if centroids else None,
                    )
                )
        return found

    def _effective_changes(self) -> list[tuple[int, Tensor, Tensor, Tensor]]:
        """The changes, those of one position as one: the last set, with the members of the set before the first."""
        effective: list[tuple[int, Tensor, Tensor, Tensor]] = []
        for position, source, members, vector in self._changes:
            if effective and effective[-1][0] == position:
                members = effective.pop()[2]
            effective.append((position, source, members, vector))
        return effective


def _heads_of(part: Tensor, heads: list[int]) -> Tensor:
    """The recorded heads of [R, Hs, N]; all of them where the heads share one stored entry."""
    return part if part.shape[1] == 1 else part[:, heads]


def _only_heads(step: AttentionStep, heads: list[int]) -> AttentionStep:
    """The step as only some KV heads see it."""
    return replace(
        step,
        query=step.query[:, heads],
        key=step.key[:, heads],
        value=step.value[:, heads],
        key_positions=step.key_positions[:, heads],
        spec=step.spec.of_heads(heads),
    )


def _to_host(part: Tensor) -> Tensor:
    """A copy on the host; from a GPU it is on its way until the stream gets there."""
    if part.device.type != "cuda":
        return part.cpu()
    pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return pinned.copy_(part, non_blocking=True)
