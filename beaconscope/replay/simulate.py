"""Drive policies through a recorded layer: the objects that the live cache drives, on recorded queries and keys.

A replay is teacher-forced: the queries are those of the recording, whatever its own cache had evicted by then.

What many settings have in common is worked out once: the beacons of settings that choose them alike
(:mod:`.beacon_history`), and the attention that the oracle foresees. Where positions alone decide (StreamingLLM)
nothing has to be driven.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.policies import CacheView, Oracle, Policy, QueryBlock, StreamingLLM
from beaconscope.kv.policies.beacon import BeaconKV, BeaconKVState
from beaconscope.kv.policies.oracle import OracleState
from beaconscope.kv.policies.static_mask import StaticMask
from beaconscope.replay.beacon_history import BeaconHistories
from beaconscope.replay.kept import NEVER, Intervals, Kept, Lifetimes, Masks
from beaconscope.replay.layer import LayerData


class _Entries(CacheView):
    """The view of a compression, whose keys and values are gathered when somebody looks at them."""

    def __init__(self, data: LayerData, held: Tensor, newest: int) -> None:
        self.__dict__.update(_data=data, positions=held, newest=newest)

    @property
    def key(self) -> Tensor:
        data: LayerData = self.__dict__["_data"]
        return data.entries(data.key, self.positions)

    @property
    def value(self) -> Tensor:
        data: LayerData = self.__dict__["_data"]
        return data.entries(data.key if data.value is None else data.value, self.positions)


@dataclass
class _Held:
    """What a simulated cache holds."""

    positions: Tensor  # int64 [1, H, N], ascending; -1 in the first columns of a head that holds fewer

    @property
    def size(self) -> int:
        return self.positions.shape[2]

    def add(self, start: int, stop: int) -> None:
        new = torch.arange(start, stop, device=self.positions.device)
        self.positions = torch.cat([self.positions, new.expand(1, self.positions.shape[1], stop - start)], dim=2)

    def keep(self, kept: Tensor, size: int) -> Tensor:
        """Keep ``size`` entries of every head; which, as a policy's state is told of it."""
        index = kept.nonzero()[:, 2].view(1, -1, size)
        self.positions = self.positions.gather(2, index)
        return index

    def keep_ragged(self, kept: Tensor) -> Tensor:
        """Keep of each head what ``kept`` says, in the last columns; which, -1 in the columns before."""
        width = int(kept.sum(dim=-1).max())
        order = kept.to(torch.uint8).argsort(dim=-1, stable=True)[..., self.size - width :]
        held = kept.gather(-1, order)
        self.positions = self.positions.gather(2, order).where(held, -1)
        return order.where(held, -1)


class Simulation:
    """Policies on one layer, with what they have in common worked out once.

    Parameters
    ----------
    policies
        All that :meth:`run` is going to be asked for.
    data
        The layer.
    """

    def __init__(self, policies: Sequence[Policy], data: LayerData) -> None:
        self._data = data
        self._histories = BeaconHistories(
            data, [(each, schedule(each, data)) for each in policies if isinstance(each, BeaconKV)]
        )
        oracles = [each for each in policies if isinstance(each, Oracle)]
        self._foreseen = dict(zip(oracles, _foresee(oracles, data), strict=True))

    def run(self, policy: Policy) -> Kept:
        """What one of the policies would have kept of the layer.

        Raises
        ------
        BeaconScopeError
            Where it has to know what the trace does not say.
        """
        if isinstance(policy, Oracle):
            return self._foreseen[policy]
        if isinstance(policy, StaticMask):
            return Masks(policy, self._data.heads(), self._data.length)
        if isinstance(policy, StreamingLLM):
            return _streaming(policy, self._data)
        return drive(policy, self._data, self._histories)


def simulate(policies: Sequence[Policy], data: LayerData) -> list[Kept]:
    """What each policy would have kept of a layer; see :class:`Simulation`."""
    simulation = Simulation(policies, data)
    return [simulation.run(policy) for policy in policies]


def drive(policy: Policy, data: LayerData, histories: BeaconHistories | None = None) -> Lifetimes:
    """Drive a policy that works in a live cache, step by step.

    Raises
    ------
    BeaconScopeError
        Where it has to know what the trace does not say.
    """
    if policy.needs_kinds and data.kinds is None:
        raise BeaconScopeError(
            f"the trace does not say which tokens are special, which {policy.name} has to know; record it anew, or "
            f"leave {policy.name} out"
        )
    heads, length, device = len(data.kv_heads), data.length, data.query.device
    last = torch.full((heads, length), NEVER, dtype=torch.int32, device=device)
    state = policy.start(data.heads())
    if histories is not None and isinstance(policy, BeaconKV) and isinstance(state, BeaconKVState):
        state.tracker = histories.tracker(policy)
    held = _Held(torch.zeros((1, heads, 0), dtype=torch.int64, device=device))
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
            size = 0 if policy.ragged else state.kept_size(held.size)
            view = _Entries(data, held.positions, newest=stop - 1)
            kept = state.keep(view)
            gone = ~kept & (view.positions >= 0) if policy.ragged else ~kept
            head = gone.nonzero()[:, 1]
            last[head, view.positions[gone]] = stop - 1
            state.evicted(held.keep_ragged(kept) if policy.ragged else held.keep(kept, size))
            fired.append(stop - 1)
        start = stop
    return Lifetimes(last, tuple(fired))


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
    for _, weight in data.everything(start, stop).blocks():
        if data.sink_logit is not None:
            weight = weight / weight.sum(dim=-1, keepdim=True)  # a learned sink's share is no entry's
        received += weight.sum(dim=(2, 3))
    return received


def _choice(state: OracleState, data: LayerData, newest: int) -> Tensor:
    """Positions that an oracle keeps of everything up to ``newest``, int32 [H, B]."""
    heads = len(data.kv_heads)
    positions = torch.arange(newest + 1, device=data.query.device).expand(1, heads, -1)
    kept = state.keep(_Entries(data, positions, newest))
    return kept[0].nonzero()[:, 1].view(heads, -1).to(torch.int32)
