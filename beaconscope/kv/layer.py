"""The stored keys and values of one layer, compressed by a policy.

Buffers are allocated once, with B + I slots (a policy that evicts nothing lets them double; where a compression changes
how many entries the next one waits for, they are allocated anew at compressions). Every sequence is stored
without its padding, from slot 0 on, oldest first; sequences of equal length form a *lane*, which counts, observes and
compresses by itself, so that a sequence in a batch goes through the same steps as alone. All counting is on the host: a
step waits for nothing on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from beaconscope.attention.gather import pick_entries
from beaconscope.attention.step import AttentionStep
from beaconscope.errors import BeaconScopeError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, QueryBlock

_LOG_LENGTH = 128
"""Queries that wait before a policy observes them; a policy works on blocks, not on single steps."""
_FIRST_SLOTS = 256
"""Slots allocated at first where nothing is evicted."""


@dataclass(frozen=True)
class Compression:
    """What one compression kept, of the sequences of one lane. N entries were there."""

    rows: Tensor | None
    position: int
    """The newest position."""
    positions: Tensor  # [R, H, N], int64
    kept: Tensor  # [R, H, N], bool


class Observer(Protocol):
    """Somebody who is told what happens in a cache: a recorder."""

    def wants(self, layer: int) -> bool:
        """Whether the layer is of interest."""

    def attended(self, layer: int, lane: int, step: AttentionStep) -> None:
        """Lane number ``lane`` has attended in ``layer``."""

    def compressed(self, layer: int, lane: int, compression: Compression) -> None:
        """Lane number ``lane`` was compressed in ``layer``."""


@dataclass(frozen=True)
class Rows:
    """Sequences of a batch that have equally many tokens."""

    index: Tensor | None
    """int64 [R]; None for the whole batch."""
    size: int
    padding: int
    """Padding tokens on their left."""

    def take(self, x: Tensor) -> Tensor:
        """These sequences of ``x`` [B, ...]; a view where it is the whole batch."""
        return x if self.index is None else x.index_select(0, self.index)

    def put(self, target: Tensor, start: int, values: Tensor) -> None:
        """Write ``values`` [R, H, T, ...] to slots ``start`` onwards of ``target`` [B, H, S, ...]."""
        stop = start + values.shape[2]
        if self.index is None:
            target[:, :, start:stop] = values
        else:
            target[self.index, :, start:stop] = values


@dataclass
class Lane:
    """Where the sequences of ``rows`` stand in one layer."""

    rows: Rows
    state: PolicyState
    count: int = 0
    """Entries stored."""
    seen: int = 0
    """Tokens seen, which is the position of the next one."""


@dataclass
class _Incoming:
    """Keys and values of a forward pass between ``update`` and the end of its attention."""

    key: Tensor  # [B, H, T, D], as stored
    value: Tensor
    wide: tuple[Tensor, Tensor, Tensor] | None = field(default=None)
    """Key, value and positions of stored and new entries where the buffers do not hold both, else None."""


class CompressedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer that a policy compresses."""

    is_compileable = False
    is_sliding = False

    def __init__(self, layer: int, policy: Policy, observer: Observer | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = layer
        self.policy = policy
        self.observer = observer if observer is not None and observer.wants(layer) else None
        self.positions: Tensor | None = None  # [B, H, S], int64
        self.lanes: list[Lane] = []
        self._incoming: _Incoming | None = None
        self._log: Tensor | None = None  # [B, H, G, _LOG_LENGTH, D]
        self._logged = 0

    @property
    def interrupted(self) -> bool:
        """Whether a forward pass ended between :meth:`update` and :meth:`absorb`."""
        return self._incoming is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the stored keys and values and of the positions beside them."""
        return sum(part.numel() * part.element_size() for part in self._parts())

    def _parts(self) -> list[Tensor]:
        """All that is stored."""
        return [part for part in (self.keys, self.values, self.positions) if part is not None]

    def kept_positions(self, lane: Lane, row: int) -> Tensor:
        """Positions stored of the batch's sequence ``row``, which is in ``lane``, int64 [H, N], ascending."""
        assert self.positions is not None
        return self.positions[row, :, : lane.count]

    @property
    def stored(self) -> int:
        """Slots in use in the fullest lane."""
        return max((lane.count for lane in self.lanes), default=0)

    @property
    def slots(self) -> int:
        """Slots allocated."""
        return 0 if self.positions is None else int(self.positions.shape[2])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers for keys [B, H, T, D] and values [B, H, T, Dv] such as these."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._allocate(key_states, value_states, self.policy.capacity or max(_FIRST_SLOTS, 2 * key_states.shape[2]))
        self.is_initialized = True

    def _allocate(self, key: Tensor, value: Tensor, slots: int) -> None:
        batch, heads = key.shape[:2]
        self.keys = key.new_zeros((batch, heads, slots, key.shape[-1]))
        self.values = value.new_zeros((batch, heads, slots, value.shape[-1]))
        self.positions = torch.zeros((batch, heads, slots), dtype=torch.int64, device=key.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add T new entries and return all that is to be attended: keys [B, H, N, D] and values [B, H, N, Dv]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._incoming = _Incoming(key_states, value_states)
        if not self.lanes:  # a first pass is attended as it is, padding and all
            return key_states, value_states
        assert self.keys is not None and self.values is not None and self.positions is not None
        tokens = key_states.shape[2]
        end = self.stored + tokens
        if end > self.slots and self.policy.capacity is None:
            self._grow(end)
        keys, values, positions = self.keys, self.values, self.positions
        if end > self.slots:
            keys, values, positions = (self._widened(part, end) for part in (keys, values, positions))
            self._incoming.wide = (keys, values, positions)
        for lane in self.lanes:
            new = torch.arange(lane.seen, lane.seen + tokens, device=key_states.device)
            rows = lane.rows
            rows.put(keys, lane.count, rows.take(key_states))
            rows.put(values, lane.count, rows.take(value_states))
            rows.put(positions, lane.count, new.expand(rows.size, positions.shape[1], tokens))
        return keys[:, :, :end], values[:, :, :end]

    def _grow(self, needed: int) -> None:
        """Double the buffers until they hold ``needed`` slots."""
        assert self.keys is not None and self.values is not None and self.positions is not None
        held = (self.keys, self.values, self.positions)
        slots = self.slots
        while slots < needed:
            slots *= 2
        self.keys, self.values, self.positions = (self._widened(part, slots) for part in held)

    def _widened(self, part: Tensor, slots: int) -> Tensor:
        """A copy of a buffer [B, H, S, ...] with ``slots`` slots."""
        wide = part.new_zeros((*part.shape[:2], slots, *part.shape[3:]))
        copied = min(slots, part.shape[2])
        wide[:, :, :copied] = part[:, :, :copied]
        return wide

    def _fit(self) -> None:
        """Give the buffers the slots that the next compression waits for, where the policy does not bound them."""
        assert self.keys is not None and self.values is not None and self.positions is not None
        slots = max(self._needed(lane) for lane in self.lanes)
        if slots != self.slots:
            held = (self.keys, self.values, self.positions)
            self.keys, self.values, self.positions = (self._widened(part, slots) for part in held)

    def _needed(self, lane: Lane) -> int:
        """Slots that a lane needs until its next compression."""
        return max(lane.count, lane.state.capacity or 0)

    def visible(self, tokens: int) -> Tensor | None:
        """What ``tokens`` new tokens may see of what :meth:`update` gave, bool [B, 1, T, N]; None for everything."""
        if tokens == 1 and len(self.lanes) == 1:
            return None
        end = self.stored + tokens
        slot = torch.arange(end, device=self.device)
        token = torch.arange(tokens, device=self.device)
        batch = sum(lane.rows.size for lane in self.lanes)
        mask = torch.empty((batch, 1, tokens, end), dtype=torch.bool, device=self.device)
        for lane in self.lanes:
            mask[slice(None) if lane.rows.index is None else lane.rows.index] = (
                slot[None, :] <= lane.count + token[:, None]
            )
        return mask

    def begin(self, rows: list[Rows], info: HeadInfo) -> None:
        """Start the lanes, before a first pass; ``info`` holds the heads as they are attended, of any rows.

        Its prompt counts the padding in.
        """
        self.lanes = [
            Lane(part, self.policy.start(replace(info, rows=part.size, prompt=info.prompt - part.padding)))
            for part in rows
        ]

    def absorb(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        info: HeadInfo,
        kinds: Tensor | None = None,
    ) -> None:
        """Take in a forward pass after its attention.

        Parameters
        ----------
        query
            Post-RoPE [B, H, G, T, D].
        key, value
            As attended, [B, H, N, D] and [B, H, N, Dv]; latent attention expands them from what is stored.
        info
            The heads, as in :meth:`begin`.
        kinds
            Kinds of the new tokens, uint8 [B, T], where they are known.
        """
        incoming, self._incoming = self._incoming, None
        assert incoming is not None and self.positions is not None
        tokens, first = query.shape[3], self.lanes[0].seen == 0
        waits = self.policy.needs_queries and tokens == 1 and not first
        if not waits:
            self.flush()
        watched = self.observer is not None or self.policy.needs_attention or (self.policy.needs_queries and not waits)
        for number, lane in enumerate(self.lanes):
            rows = lane.rows
            skipped = rows.padding if first else 0
            positions = self._positions_of(lane, incoming, tokens - skipped)
            if watched:
                entries = self._columns(lane, lane.count + tokens, first)
                step = AttentionStep(
                    rows=rows.index,
                    first_position=lane.seen,
                    query=rows.take(query)[:, :, :, skipped:],
                    key=rows.take(key)[:, :, entries],
                    value=rows.take(value)[:, :, entries],
                    key_positions=positions.expand(-1, key.shape[1], -1),
                    spec=info.spec,
                    kinds=None if kinds is None else rows.take(kinds)[:, skipped:],
                    padded=self.policy.ragged and not first,
                )
                self._show(number, lane, step, waits)
            lane.count += tokens - skipped
            lane.seen += tokens - skipped
            if first:
                self._store_first(lane, incoming, positions)
        if waits:
            self._log_queries(query)
        changed = first
        for number, lane in enumerate(self.lanes):
            capacity = lane.state.capacity
            if capacity is not None and lane.count >= capacity:
                self.flush()
                self._compress(number, lane, incoming, key, value, info, first)
                changed = True
            elif incoming.wide is not None:
                self._store_again(lane, incoming.wide)
        if changed and self.policy.evicts and self.policy.capacity is None:
            self._fit()

    def _columns(self, lane: Lane, size: int, first: bool) -> slice:
        """Where, in what was attended, the ``size`` entries of a lane are, the new ones included."""
        return slice(lane.rows.padding, None) if first else slice(0, size)

    def _show(self, number: int, lane: Lane, step: AttentionStep, waits: bool) -> None:
        """Let the observer and the policy see a step of a lane."""
        if self.observer is not None:
            self.observer.attended(self.layer, number, step)
        if self.policy.needs_attention:
            lane.state.attend(step)
        if self.policy.needs_queries and not waits:
            lane.state.observe(QueryBlock(step.query, lane.seen, together=True))

    def _store_again(self, lane: Lane, wide: tuple[Tensor, Tensor, Tensor]) -> None:
        """Put a lane that does fit back into the buffers, where another one of the batch did not."""
        assert self.keys is not None and self.values is not None and self.positions is not None
        for buffer, part in zip((self.keys, self.values, self.positions), wide, strict=True):
            lane.rows.put(buffer, 0, lane.rows.take(part)[:, :, : lane.count])

    def _positions_of(self, lane: Lane, incoming: _Incoming, new: int) -> Tensor:
        """Positions of all entries of a lane, the new ones included, [R, Hs, N]."""
        if lane.seen == 0:
            return torch.arange(new, device=self.device).expand(lane.rows.size, incoming.key.shape[1], new)
        held = self.positions if incoming.wide is None else incoming.wide[2]
        assert held is not None
        return lane.rows.take(held)[:, :, : lane.count + new]

    def _store_first(self, lane: Lane, incoming: _Incoming, positions: Tensor) -> None:
        """Put a first pass into the buffers if it fits; else a compression follows and puts there what stays."""
        assert self.keys is not None and self.values is not None and self.positions is not None
        if lane.count > self.slots:
            return
        rows = lane.rows
        rows.put(self.keys, 0, rows.take(incoming.key)[:, :, rows.padding :])
        rows.put(self.values, 0, rows.take(incoming.value)[:, :, rows.padding :])
        rows.put(self.positions, 0, positions)

    def _log_queries(self, query: Tensor) -> None:
        """Let a query [B, H, G, 1, D] wait in the log."""
        if self._log is None or self._log.shape[0] != query.shape[0]:
            self._log = query.new_zeros((*query.shape[:3], _LOG_LENGTH, query.shape[-1]))
        self._log[:, :, :, self._logged] = query[:, :, :, 0]
        self._logged += 1
        if self._logged == _LOG_LENGTH:
            self.flush()

    def flush(self) -> None:
        """Let the policy observe the queries that wait."""
        if not self._logged:
            return
        assert self._log is not None
        waiting = self._log[:, :, :, : self._logged]
        for lane in self.lanes:
            lane.state.observe(QueryBlock(lane.rows.take(waiting), lane.seen - self._logged, together=False))
        self._logged = 0

    def _compress(
        self, number: int, lane: Lane, incoming: _Incoming, key: Tensor, value: Tensor, info: HeadInfo, first: bool
    ) -> None:
        assert self.keys is not None and self.values is not None and self.positions is not None
        rows, n = lane.rows, lane.count
        entries = self._columns(lane, n, first)
        if first:
            stored_key, stored_value = incoming.key, incoming.value
            positions = torch.arange(n, device=self.device).expand(rows.size, incoming.key.shape[1], n)
        else:
            held = (self.keys, self.values, self.positions) if incoming.wide is None else incoming.wide
            stored_key, stored_value = held[0], held[1]
            positions = rows.take(held[2])[:, :, :n]
        view = CacheView(
            key=rows.take(key)[:, :, entries],
            value=rows.take(value)[:, :, entries],
            positions=positions.expand(-1, key.shape[1], -1),
            newest=lane.seen - 1,
        )
        size = lane.state.kept_size(n)
        kept = lane.state.keep(view)
        if info.shared:
            kept = kept[:, :1]
        if self.observer is not None:
            self.observer.compressed(
                self.layer, number, Compression(rows.index, lane.seen - 1, positions.clone(), kept)
            )
        # Stable, so that what is kept stays oldest first.
        index = kept.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :size]
        for buffer, source in ((self.keys, stored_key), (self.values, stored_value)):
            rows.put(buffer, 0, pick_entries(rows.take(source), index + (entries.start or 0)))
        rows.put(self.positions, 0, positions.gather(2, index))
        lane.count = size
        lane.state.evicted(index.expand(-1, key.shape[1], -1))

    def room(self) -> int:
        """Tokens that may be fed at once without changing what is kept, at least 1."""
        if self.policy.evicts:
            rooms = [lane.state.capacity - lane.count for lane in self.lanes if lane.state.capacity is not None]
            return max(1, min(rooms, default=self.policy.capacity or 1 << 30))
        self.flush()
        return max(1, min((getattr(lane.state, "room", 1 << 30) for lane in self.lanes), default=1 << 30))

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Columns of the mask for a step, and the index of the first; transformers 5.2 hands over positions."""
        tokens = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        if not tokens:
            raise BeaconScopeError(
                f"no token is new to the cache, which has seen {self.get_seq_length()}; call reset() for another text"
            )
        return self.stored + tokens, self.get_seq_length() - self.stored

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return max((lane.seen + lane.rows.padding for lane in self.lanes), default=0)

    def get_max_length(self) -> int:
        """No maximum: sequences go on for ever."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.2

    def reset(self) -> None:
        """Forget everything, for another generation."""
        self.keys = self.values = self.positions = self._log = None
        self.is_initialized = False
        self.lanes, self._incoming, self._logged = [], None, 0

    def select_rows(self, rows: Tensor) -> None:
        """Go on with the sequences ``rows``, int64 [B'], of a batch of one lane."""
        if not self.lanes:
            return
        assert self.keys is not None and self.values is not None and self.positions is not None
        self.flush()
        index = rows.to(self.device)
        self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)
        self.positions = self.positions.index_select(0, index)
        lane = self.lanes[0]
        lane.rows = Rows(None, len(index), lane.rows.padding)
        lane.state.select_rows(index)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences for beam search."""
        self.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some sequences."""
        self.select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.lanes:
            self.select_rows(torch.arange(self.lanes[0].rows.size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what was evicted cannot come back."""
        raise BeaconScopeError(
            "a compressed cache cannot be cropped (assisted decoding); use a plain DynamicCache for it"
        )
