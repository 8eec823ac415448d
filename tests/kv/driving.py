"""Drive a policy by hand, as a cache would, and hold what it did against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from beaconscope.attention.rotary import Rotary
from beaconscope.attention.spec import AttentionSpec
from beaconscope.kv.beacons import BeaconChanged, BeaconTracker
from beaconscope.kv.policies import BeaconKV, CacheView, HeadInfo, Policy, PolicyState, QueryBlock
from tests.reference.beacon_kv import (
    Beacon,
    BeaconChange,
    Compression,
    Settings,
    Simulation,
    check_reservoir,
    keep,
    observe,
    score,
    simulate,
    steps,
)
from tests.reference.rotary import unrotate


class IllConditioned(Exception):
    """The reference itself decides otherwise when the vectors change in their last digits."""


@dataclass
class Run:
    """What happened: compressions as [R, H, B] sets, and what the beacons did."""

    positions: list[int] = field(default_factory=list)
    """Newest position at each compression."""
    kept: list[np.ndarray] = field(default_factory=list)  # each [R, H, B]
    changes: list[BeaconChanged] = field(default_factory=list)
    assignment: np.ndarray | None = None  # [R, H, G, T]
    similarity: np.ndarray | None = None


def make_rotary(inv_freq: Sequence[float], size: int, style: str = "half", scaling: float = 1.0) -> Rotary:
    """Write down the rotary embedding of heads of ``size`` dimensions, of which the first 2 F turn."""
    count = len(inv_freq)
    partner, sign, frequency = torch.arange(size), torch.ones(size), torch.full((size,), -1)
    for i in range(count):
        a, b = (i, i + count) if style == "half" else (2 * i, 2 * i + 1)
        partner[a], partner[b] = b, a
        sign[a], sign[b] = -1, 1
        frequency[a] = frequency[b] = i
    return Rotary(partner, sign, frequency, torch.tensor(inv_freq, dtype=torch.float32), scaling, torch.float32)


def head_info(query: Tensor, rotary: Rotary | None = None, *, layer: int = 0, follow: bool = True) -> HeadInfo:
    """Describe the heads of queries [R, H, G, T, D]."""
    rows, heads, group, _, size = query.shape
    return HeadInfo(
        layer=layer,
        kv_heads=tuple(range(heads)),
        rows=rows,
        group_size=group,
        size=size,
        spec=AttentionSpec(size**-0.5),
        device=torch.device("cpu"),
        rotary=Rotary.none(size) if rotary is None else rotary,
        follow=follow,
    )


def drive(
    policy: Policy,
    state: PolicyState,
    query: Tensor,
    key: Tensor,
    prompt: int,
    chunks: Sequence[int] | None = None,
    cuts: Sequence[int] = (),
) -> Run:
    """Feed queries [R, H, G, T, D] and keys [R, H, T, D]: the prompt in ``chunks``, then tokens one by one.

    The queries of single tokens wait, and are observed at a compression and before the positions ``cuts``.
    """
    rows, heads, _, total, _ = query.shape
    run = Run()
    held = np.zeros((rows, heads, 0), dtype=np.int64)
    waiting = 0

    def flush(end: int) -> None:
        nonlocal waiting
        if waiting:
            state.observe(QueryBlock(query[:, :, :, end - waiting : end], end - waiting, together=False))
        waiting = 0

    for step in steps(total, prompt, chunks):
        if step.start in cuts:
            flush(step.start)
        if len(step) > 1 or step.start < prompt:
            flush(step.start)
            state.observe(QueryBlock(query[:, :, :, step.start : step.stop], step.start, together=True))
        else:
            waiting += 1
        held = np.concatenate([held, np.broadcast_to(np.arange(step.start, step.stop), (rows, heads, len(step)))], -1)
        if policy.capacity is None or held.shape[-1] < policy.capacity:
            continue
        flush(step.stop)
        positions = torch.from_numpy(held)
        at = positions.unsqueeze(-1).expand(*positions.shape, key.shape[-1])
        entries = key.gather(2, at)
        kept = state.keep(CacheView(key=entries, value=entries, positions=positions, newest=step.stop - 1)).numpy()
        assert (kept.sum(-1) == policy.budget).all()
        held = held[kept].reshape(rows, heads, policy.budget)
        run.positions.append(step.stop - 1)
        run.kept.append(held)
    flush(total)
    tracker: BeaconTracker | None = getattr(state, "tracker", None)
    if tracker is not None:
        run.changes = tracker.changes
        run.assignment = torch.cat([a.beacon for a in tracker.assignments], dim=-1).numpy()
        run.similarity = torch.cat([a.similarity for a in tracker.assignments], dim=-1).numpy()
    return run


def settings_of(policy: BeaconKV) -> Settings:
    """Say the same options in the reference's words."""
    return Settings(**{name: getattr(policy, name) for name in Settings.__dataclass_fields__})


def check_run(
    run: Run,
    policy: BeaconKV,
    query: np.ndarray,  # [R, H, T, G, D]
    key: np.ndarray,  # [R, H, T, D]
    prompt: int,
    inv_freq: Sequence[float],
    style: str = "half",
    scaling: float = 1.0,
    chunks: Sequence[int] | None = None,
) -> None:
    """Assert that ``run`` did what the reference does with the same vectors, in every head.

    Raises
    ------
    IllConditioned
        When they differ in a case that rounding decides.
    """
    settings = settings_of(policy)
    rope = {"inv_freq": inv_freq, "style": style, "scaling": scaling}
    for r in range(query.shape[0]):
        for h in range(query.shape[1]):
            q, k = query[r, h].astype(np.float64), key[r, h].astype(np.float64)
            expected = simulate(q, k, prompt, settings, chunks=chunks, **rope)
            try:
                if settings.selector == "random" and policy.beacons:
                    _check_random_head(run, r, h, q, k, expected, settings, rope)
                else:
                    _check_head(run, r, h, expected)
            except AssertionError as difference:
                for seed in range(3):
                    noise = 1 + 1e-6 * np.random.default_rng(seed).normal(size=q.shape)
                    other = simulate(q * noise, k, prompt, settings, chunks=chunks, **rope)
                    if not _same_choices(expected, other):
                        raise IllConditioned from difference
                raise


def _check_head(run: Run, r: int, h: int, expected: Simulation) -> None:
    assert run.positions == [c.position for c in expected.compressions]
    for kept, compression in zip(run.kept, expected.compressions, strict=True):
        assert set(kept[r, h].tolist()) == set(compression.kept.tolist())
        assert kept[r, h].tolist() == sorted(kept[r, h].tolist())
    changes = changes_of(expected)
    if not run.changes:  # without beacons nothing changes
        assert all(not any(change.beacons) for change in changes)
    else:
        assert [c.position for c in run.changes] == [c.position for c in changes]
        for ours, theirs in zip(run.changes, changes, strict=True):
            _check_change(ours, theirs, r, h)
    np.testing.assert_array_equal(run.assignment[r, h].T, expected.assignment)
    np.testing.assert_allclose(run.similarity[r, h].T, expected.similarity, atol=5e-5)


def changes_of(simulation: Simulation) -> list[BeaconChange]:
    """Order all renewals of the beacons; of two at one position the thinning came first."""
    both = [(c.position, 0, c) for c in simulation.thinnings] + [(c.position, 1, c) for c in simulation.compressions]
    return [change for _, _, change in sorted(both, key=lambda item: item[:2])]


def _check_change(ours: BeaconChanged, theirs: BeaconChange, r: int, h: int) -> None:
    for g, beacons in enumerate(theirs.beacons):
        assert ours.beacons.source[r, h, g].tolist() == [b.source for b in beacons]
        np.testing.assert_allclose(ours.beacons.vector[r, h, g], [b.vector for b in beacons], rtol=0, atol=1e-4)
        assert ours.members[r, h, g].tolist() == theirs.members[g]


def _same_choices(one: Simulation, other: Simulation) -> bool:
    """Whether two runs kept the same, took the same beacons and assigned alike."""
    first, second = changes_of(one), changes_of(other)
    return (
        len(first) == len(second)
        and all(a.kept.tolist() == b.kept.tolist() for a, b in zip(one.compressions, other.compressions, strict=True))
        and all(_sources(a) == _sources(b) for a, b in zip(first, second, strict=True))
        and bool((one.assignment == other.assignment).all())
    )


def _sources(change: BeaconChange) -> list[list[int]]:
    return [[b.source for b in beacons] for beacons in change.beacons]


def _check_random_head(
    run: Run, r: int, h: int, q: np.ndarray, k: np.ndarray, expected: Simulation, settings: Settings, rope: dict
) -> None:
    """Take the beacons that were drawn, and let the reference score and keep with them."""
    assert run.positions == [c.position for c in expected.compressions]
    seen = q
    if settings.query_space == "pre-rope":
        seen = unrotate(q.swapaxes(0, 1), np.arange(len(q)), **rope).swapaxes(0, 1)
    cached: list[int] = []
    compressions = []
    seen_until = 0
    for position, kept, change in zip(run.positions, run.kept, run.changes, strict=True):
        assert change.position == position
        beacons = drawn_beacons(change, r, h)
        cached += range(seen_until, position + 1)
        seen_until = position + 1
        recent = q[max(position + 1 - settings.recent, 0) : position + 1]
        observation = [observe(recent[:, g], beacons[g], position, settings, **rope) for g in range(recent.shape[1])]
        wanted = keep(cached, score(observation, k[cached], settings), settings)
        assert kept[r, h].tolist() == wanted.tolist()
        compressions.append(Compression(position, beacons=beacons, kept=wanted, evicted=np.setdiff1d(cached, wanted)))
        cached = wanted.tolist()
    check_reservoir(Simulation(compressions, [], expected.assignment, expected.similarity), seen, settings, atol=1e-4)
    for old, new in pairwise(run.changes):
        members = new.members[r, h].sum(-1)
        assert members.tolist() == [new.position - old.position] * members.shape[0]


def drawn_beacons(change: BeaconChanged, r: int, h: int) -> list[list[Beacon]]:
    """Read the beacons of one head, per query head, in the reference's terms."""
    source, vector = change.beacons.source[r, h], change.beacons.vector[r, h].double().numpy()
    return [[Beacon(int(s), v) for s, v in zip(source[g], vector[g], strict=True)] for g in range(source.shape[0])]
