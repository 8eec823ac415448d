"""Drive policies through a recorded layer: the objects that the live cache drives, on recorded queries and keys.

A replay is teacher-forced: the queries are those of the recording, whatever its own cache had evicted by then.

What many settings have in common is worked out once: the beacons of settings that choose them alike
(:mod:`.beacon_history`), the products of what observes with the keys (:mod:`.observed`), what queries are expected to
look for (:mod:`.expected`), and the attention that the oracle foresees. Where positions alone decide (StreamingLLM)
nothing has to be driven.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.policies import CacheView, ExpectedAttention, Oracle, Policy, QueryBlock, SnapKV, StreamingLLM
from beaconscope.kv.policies.base import Observers, PolicyState
from beaconscope.kv.policies.beacon import BeaconKV, BeaconKVState
from beaconscope.kv.policies.expected_attention import ExpectedAttentionState
from beaconscope.kv.policies.oracle import OracleState
from beaconscope.kv.policies.static_mask import StaticMask
from beaconscope.replay.beacon_history import BeaconHistories
from beaconscope.replay.expected import Expectations
from beaconscope.replay.held import Held
from beaconscope.replay.kept import NEVER, Intervals, Kept, Lifetimes, Masks
from beaconscope.replay.layer import LayerData
from beaconscope.replay.observed import LEAST_ROWS, Observed, SharedRows


class _Entries(CacheView):
    """The view of a compression, whose keys and values are gathered when somebody looks at them."""

    _data: LayerData
    _shared: Mapping[Observers, SharedRows]

    def __init__(
        self, data: LayerData, held: Tensor, newest: int, shared: Mapping[Observers, SharedRows] | None = None
    ) -> None:
        # Not what a frozen dataclass is made for: its fields key and value are properties here.
        self.__dict__.update(_data=data, positions=held, newest=newest, _shared=shared or {})

    @property
    def key(self) -> Tensor:
        return self._data.entries(self._data.key, self.positions)

    @property
    def value(self) -> Tensor:
        return self._data.entries(self._data.key if self._data.value is None else self._data.value, self.positions)

    @property
    def unit_key(self) -> Tensor:
        return self._data.entries(self._data.unit_key, self.positions)

    @property
    def key_norm(self) -> Tensor:
        return self._data.key_norm.gather(2, self.positions.clamp(min=0))

    @property
    def value_norm(self) -> Tensor:
        return self._data.value_norm.gather(2, self.positions.clamp(min=0))

    def logits(self, scaling: float, *asked: tuple[Tensor, Observers | None]) -> Tensor:
        return self._looked_up(SharedRows.logits, super().logits, scaling, asked)

    def exponentials(self, scaling: float, *asked: tuple[Tensor, Observers | None]) -> Tensor:
        return self._looked_up(SharedRows.exponentials, super().exponentials, scaling, asked)

    def _looked_up(
        self,
        look_up: Callable[[SharedRows, Tensor, Tensor], None],
        work_out: Callable[..., Tensor],
        scaling: float,
        asked: Sequence[tuple[Tensor, Observers | None]],
    ) -> Tensor:
        """Rows of what is asked, looked up where they are shared and worked out where not, [1, H, G, Q, N]."""
        counts = [query.shape[3] for query, _ in asked]
        group = asked[0][0].shape[2]
        if min(counts) * group < LEAST_ROWS:
            return work_out(scaling, *asked)
        known = [None if observers is None else self._shared.get(observers) for _, observers in asked]
        known = [each if each is not None and each.known(self.newest) else None for each in known]
        column = next((each.columns(self.positions) for each in known if each is not None), None)
        if column is None:
            return work_out(scaling, *asked)  # the keys are gathered once
        h, n = self.positions.shape[1:]
        rows = asked[0][0].new_empty((1, h, group, sum(counts), n))
        for part, each, one in zip(torch.split(rows, counts, dim=3), known, asked, strict=True):
            if each is None:
                part.copy_(work_out(scaling, one))
            else:
                look_up(each, part, column)
        return rows


def simulate(policies: Sequence[Policy], data: LayerData) -> list[Kept]:
    """What each policy would have kept of a layer; of a head from :meth:`~.layer.LayerData.known_until` on unknown.

    Raises
    ------
    BeaconScopeError
        Where a policy has to know what the trace does not say.
    """
    return timed_simulation(policies, data)[0]


def timed_simulation(policies: Sequence[Policy], data: LayerData) -> tuple[list[Kept], list[float]]:
    """What :func:`simulate` finds, and the seconds that each policy took; what several share is one's that needs it.

    The policies advance together from compression to compression, so that those which compress at the same position
    share what they can while it is at hand.
    """
    beacons = [each for each in policies if isinstance(each, BeaconKV)]
    histories = BeaconHistories(data, [(each, schedule(each, data)) for each in beacons])
    observed = Observed(data, histories)
    expectations = Expectations(data)
    foreseen: dict[Oracle, Intervals] = {}
    kept: dict[int, Kept] = {}
    seconds = [0.0] * len(policies)
    runs: dict[int, Generator[int, None, Lifetimes]] = {}
    due: list[tuple[int, int]] = []  # the position of its next compression, and the number of each that runs; a heap

    def go_on(number: int) -> None:
        try:
            heapq.heappush(due, (next(runs[number]), number))
        except StopIteration as end:
            kept[number] = end.value

    for number, policy in enumerate(policies):
        started = time.perf_counter()
        if isinstance(policy, Oracle):
            if not foreseen:
                oracles = [each for each in policies if isinstance(each, Oracle)]
                foreseen = dict(zip(oracles, _foresee(oracles, data), strict=True))
            kept[number] = foreseen[policy]
        elif isinstance(policy, StaticMask):
            kept[number] = Masks(policy, data.heads(), data.length)
        elif isinstance(policy, StreamingLLM):
            kept[number] = _streaming(policy, data)
        else:
            held = Held.nothing(data)
            state = policy.start(data.heads())
            shared: Mapping[Observers, SharedRows] = {}
            if isinstance(policy, BeaconKV | SnapKV):
                shared = observed.join(policy, held)
            if isinstance(state, BeaconKVState) and isinstance(policy, BeaconKV):
                state.tracker = histories.tracker(policy)
            if isinstance(state, ExpectedAttentionState) and isinstance(policy, ExpectedAttention):
                state.expected = expectations.join(policy, held)
            runs[number] = _advance(policy, data, held, state, shared)
            go_on(number)
        seconds[number] += time.perf_counter() - started
    while due:
        _, number = heapq.heappop(due)
        started = time.perf_counter()
        go_on(number)
        seconds[number] += time.perf_counter() - started
    return [kept[number] for number in range(len(policies))], seconds


def drive(policy: Policy, data: LayerData) -> Lifetimes:
    """Drive a policy that works in a live cache, by itself.

    Raises
    ------
    BeaconScopeError
        Where it has to know what the trace does not say.
    """
    run = _advance(policy, data, Held.nothing(data), policy.start(data.heads()))
    while True:
        try:
            next(run)
        except StopIteration as end:
            found: Lifetimes = end.value
            return found


def _advance(
    policy: Policy,
    data: LayerData,
    held: Held,
    state: PolicyState,
    shared: Mapping[Observers, SharedRows] | None = None,
) -> Generator[int, None, Lifetimes]:
    """Drive a policy from compression to compression; yields the position of each before it happens."""
    if policy.needs_kinds and data.kinds is None:
        raise BeaconScopeError(
            f"the trace does not say which tokens are special, which {policy.name} has to know; record it anew, or "
            f"leave {policy.name} out"
        )
    heads, length, device = len(data.kv_heads), data.length, data.query.device
    # One column more, for the entries that a head has fewer than others.
    last = torch.full((heads, length + 1), NEVER, dtype=torch.int32, device=device)
    fired: list[int] = []
    passes = list(data.passes)
    start = 0
    while start < length:
        together = bool(passes)
        if together:
            count = passes.pop(0)
        elif policy.needs_attention:
            # One by one, as in a live cache, so that sums of attention are rounded as there.
            count = 1
        else:
            count = length - start
            if state.capacity is not None:
                count = min(count, max(1, state.capacity - held.size))
        stop = start + count
        held.add(start, stop)
        if policy.needs_attention:
            state.attend(data.step(start, stop, held.positions, padded=policy.ragged and start > 0))
        if policy.needs_queries:
            state.observe(QueryBlock(data.query[:, :, :, start:stop], start, together=together))
        if state.capacity is not None and held.size >= state.capacity:
            yield stop - 1
            size = 0 if policy.ragged else state.kept_size(held.size)
            kept = state.keep(_Entries(data, held.positions, stop - 1, shared))
            # Of all that is at hand; what is kept gets a later number next time.
            held.mark(last, stop - 1)
            state.evicted(held.keep_ragged(kept) if policy.ragged else held.keep(kept, size))
            fired.append(stop - 1)
        start = stop
    held.mark(last, NEVER)
    return Lifetimes(last[:, :length].contiguous(), tuple(fired))


def schedule(policy: Policy, data: LayerData) -> tuple[int, ...]:
    """Newest position at each compression of a policy that keeps its budget."""
    assert policy.capacity is not None
    fired: list[int] = []
    size = stop = 0
    for count in data.passes:
        stop += count
        size += count
        if size >= policy.capacity:
            fired.append(stop - 1)
            size = min(policy.budget, size)
    first = stop + max(1, policy.capacity - size)
    return (*fired, *range(first - 1, data.length, policy.interval))


def _streaming(policy: StreamingLLM, data: LayerData) -> Lifetimes:
    """What :func:`drive` finds, at once: an entry goes at the first compression that it is not recent any more for."""
    fired = np.array(schedule(policy, data), np.int64)
    position = np.arange(data.length)
    number = np.searchsorted(fired, position + policy.budget - policy.sinks)
    goes = np.append(fired, NEVER)[number]
    goes[: policy.sinks] = NEVER
    last = torch.from_numpy(goes.astype(np.int32)).to(data.query.device)
    return Lifetimes(last.expand(len(data.kv_heads), -1), tuple(fired.tolist()))


def _foresee(oracles: Sequence[Oracle], data: LayerData) -> list[Intervals]:
    """What the oracles keep, in one pass over the attention for all of them."""
    schedules = [schedule(oracle, data) for oracle in oracles]
    states = [oracle.start(data.heads()) for oracle in oracles]
    chosen: list[list[Tensor]] = [[] for _ in oracles]
    ends = sorted({fired for each in schedules for fired in each} | {data.length - 1})
    for before, end in itertools.pairwise(ends):
        received = _received(data, before + 1, end + 1)
        for state, fired, found in zip(states, schedules, chosen, strict=True):
            number = len(found)
            if number == len(fired) or before < fired[number]:
                continue
            state.receive(received)
            if end == data.length - 1 or (number + 1 < len(fired) and end == fired[number + 1]):
                found.append(_choice(state, data, fired[number]))
    for state, fired, found in zip(states, schedules, chosen, strict=True):
        # A compression at the end of the trace has nothing to foresee.
        found.extend(_choice(state, data, each) for each in fired[len(found) :])
    return [Intervals(data.length, fired, tuple(found)) for fired, found in zip(schedules, chosen, strict=True)]


def _received(data: LayerData, start: int, stop: int) -> Tensor:
    """Attention that the queries at ``start`` to ``stop`` give to every position before ``stop``, [1, H, stop]."""
    received = torch.zeros((1, len(data.kv_heads), stop), device=data.query.device)
    for first, weight in data.everything(start, stop).blocks():
        if data.sink_logit is not None:
            weight = weight / weight.sum(dim=-1, keepdim=True)  # a learned sink's share is no entry's
        if data.finite:
            # The oracle is the upper bound of what is measured, so it foresees the queries that are.
            position = start + first + torch.arange(weight.shape[3], device=weight.device)
            until = [data.known_until(head) for head in range(len(data.kv_heads))]
            known = position < torch.tensor(until, device=weight.device)[:, None]  # [H, t]
            weight = weight * known[None, :, None, :, None]
        received += weight.sum(dim=(2, 3))
    return received


def _choice(state: OracleState, data: LayerData, newest: int) -> Tensor:
    """Positions that an oracle keeps of everything up to ``newest``, int32 [H, B]."""
    heads = len(data.kv_heads)
    positions = torch.arange(newest + 1, device=data.query.device).expand(1, heads, -1)
    kept = state.keep(_Entries(data, positions, newest))
    return kept[0].nonzero()[:, 1].view(heads, -1).to(torch.int32)
