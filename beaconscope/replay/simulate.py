"""Drive policies through a recorded layer: the objects that the live cache drives, on recorded queries and keys.

A replay is teacher-forced: the queries are those of the recording, whatever its own cache had evicted by then.

What many settings have in common is worked out once: the beacons of settings that choose them alike
(:mod:`.beacon_history`), and the attention that the oracle foresees. Where positions alone decide (StreamingLLM)
nothing has to be driven. Settings that observe with queries go through the layer together (:mod:`.observed`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.policies import CacheView, Oracle, Policy, QueryBlock, SnapKV, StreamingLLM
from beaconscope.kv.policies.beacon import BeaconKV, BeaconKVState
from beaconscope.kv.policies.oracle import OracleState
from beaconscope.kv.policies.recent import ObservingState
from beaconscope.kv.policies.static_mask import StaticMask
from beaconscope.replay.beacon_history import BeaconHistories
from beaconscope.replay.kept import NEVER, Intervals, Kept, Lifetimes, Masks
from beaconscope.replay.layer import LayerData
from beaconscope.replay.observed import Asking, choose_together


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


class _Run:
    """A policy that is driven through a layer, from one compression to the next.

    Raises
    ------
    BeaconScopeError
        Where it has to know what the trace does not say.
    """

    def __init__(self, policy: Policy, data: LayerData, histories: BeaconHistories | None = None) -> None:
        if policy.needs_kinds and data.kinds is None:
            raise BeaconScopeError(
                f"the trace does not say which tokens are special, which {policy.name} has to know; record it anew, or "
                f"leave {policy.name} out"
            )
        self.policy = policy
        self.state = policy.start(data.heads())
        if histories is not None and isinstance(policy, BeaconKV) and isinstance(self.state, BeaconKVState):
            self.state.tracker = histories.tracker(policy)
        self._data = data
        heads, device = len(data.kv_heads), data.query.device
        # int64 [1, H, N], ascending; -1 in the first columns of a head that holds fewer
        self._held = torch.zeros((1, heads, 0), dtype=torch.int64, device=device)
        # One column more, where -1 points to.
        self._last = torch.full((heads, data.length + 1), NEVER, dtype=torch.int32, device=device)
        self._fired: list[int] = []
        self._passes = list(data.passes)
        self._stop = 0
        self.view: CacheView | None = None
        """What the next compression sees; None at the end of the trace."""
        self._advance()

    def keep(self, kept: Tensor) -> None:
        """Go on to the next compression from this one, which keeps ``kept``, bool [1, H, N]."""
        # Where an entry was looked at last it went, unless it is held to the end.
        self._mark(self._stop - 1)
        self._fired.append(self._stop - 1)
        if self.policy.ragged:
            width = int(kept.sum(dim=-1).max())
            order = kept.to(torch.uint8).argsort(dim=-1, stable=True)[..., kept.shape[2] - width :]
            held = kept.gather(-1, order)
            self._held = self._held.gather(2, order).where(held, -1)
            self.state.evicted(order.where(held, -1))
        else:
            heads, size = self._held.shape[1:]
            slot = kept.flatten().nonzero()[:, 0]
            self._held = self._held.flatten().index_select(0, slot).view(1, heads, -1)
            first = torch.arange(0, heads * size, size, device=slot.device)[:, None]
            self.state.evicted(slot.view(1, heads, -1) - first)
        self._advance()

    def lifetimes(self) -> Lifetimes:
        """What the policy kept, once the trace is at its end."""
        self._mark(NEVER)
        return Lifetimes(self._last[:, :-1].contiguous(), tuple(self._fired))

    def _mark(self, position: int) -> None:
        held = self._held[0]
        self._last.scatter_(1, held.remainder(self._last.shape[1]) if self.policy.ragged else held, position)

    def _advance(self) -> None:
        """Take in tokens until the cache is full or the trace at its end."""
        data, policy, state = self._data, self.policy, self.state
        self.view = None
        while self._stop < data.length and self.view is None:
            start, size = self._stop, self._held.shape[2]
            together = bool(self._passes)
            if together:
                count = self._passes.pop(0)
            elif policy.needs_attention:
                # One by one, as in a live cache, so that sums of attention are rounded as there.
                count = 1
            else:
                count = data.length - start
                if state.capacity is not None:
                    count = min(count, max(1, state.capacity - size))
            self._stop = stop = start + count
            new = torch.arange(start, stop, device=self._held.device)
            self._held = torch.cat([self._held, new.expand(1, self._held.shape[1], count)], dim=2)
            if policy.needs_attention:
                state.attend(data.step(start, stop, self._held, padded=policy.ragged and start > 0))
            if policy.needs_queries:
                state.observe(QueryBlock(data.query[:, :, :, start:stop], start, together=together))
            if state.capacity is not None and size + count >= state.capacity:
                self.view = _Entries(data, self._held, newest=stop - 1)


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
        plain = data.softcap is None and data.sink_logit is None
        self._observing = [
            each for each in policies if isinstance(each, BeaconKV) or (isinstance(each, SnapKV) and plain)
        ]
        self._together: dict[Policy, Lifetimes] = {}
        self.seconds: dict[Policy, float] = {}
        """How long each took that was run; those that go through the layer together count an equal share."""

    def run(self, policy: Policy) -> Kept:
        """What one of the policies would have kept of the layer.

        Raises
        ------
        BeaconScopeError
            Where it has to know what the trace does not say.
        """
        started = time.perf_counter()
        if policy in self._observing and not self._together:
            self._together = _drive_together(self._observing, self._data, self._histories)
            share = (time.perf_counter() - started) / len(self._together)
            self.seconds.update(dict.fromkeys(self._together, share))
        if policy in self._together:
            return self._together[policy]
        kept = self._alone(policy)
        self.seconds[policy] = time.perf_counter() - started
        return kept

    def _alone(self, policy: Policy) -> Kept:
        if isinstance(policy, Oracle):
            return self._foreseen[policy]
        if isinstance(policy, StaticMask):
            return Masks(policy, self._data.heads(), self._data.length)
        if isinstance(policy, StreamingLLM):
            return _streaming(policy, self._data)
        return drive(policy, self._data)


def simulate(policies: Sequence[Policy], data: LayerData) -> list[Kept]:
    """What each policy would have kept of a layer; see :class:`Simulation`."""
    simulation = Simulation(policies, data)
    return [simulation.run(policy) for policy in policies]


def drive(policy: Policy, data: LayerData) -> Lifetimes:
    """Drive a policy that works in a live cache, step by step.

    Raises
    ------
    BeaconScopeError
        Where it has to know what the trace does not say.
    """
    run = _Run(policy, data)
    while run.view is not None:
        run.keep(run.state.keep(run.view))
    return run.lifetimes()


def _drive_together(
    policies: Sequence[BeaconKV | SnapKV], data: LayerData, histories: BeaconHistories
) -> dict[Policy, Lifetimes]:
    """Drive policies that observe, all of them to one position before any goes on."""
    runs = [_Run(policy, data, histories) for policy in dict.fromkeys(policies)]
    while any(run.view is not None for run in runs):
        newest = min(run.view.newest for run in runs if run.view is not None)
        here = [(run, run.view) for run in runs if run.view is not None and run.view.newest == newest]
        asking = [Asking(run.policy, run.state, view) for run, view in here if isinstance(run.state, ObservingState)]
        for (run, view), kept in zip(here, choose_together(data, asking), strict=True):
            run.keep(run.state.keep(view) if kept is None else kept)
    return {run.policy: run.lifetimes() for run in runs}


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
