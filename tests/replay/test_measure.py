"""Measures against a slow reading of their definitions, and what must hold of any trace."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from beaconscope import BeaconKV, RandomEviction, StreamingLLM

from beaconscope.kv.policies import BigBird, ETC, Full, KeyDiff, Longformer, Oracle, SnapKV, TOVA  # isort: skip
from beaconscope.attention.rotary import Rotary
from beaconscope.replay.kept import NEVER, Lifetimes
from beaconscope.replay.measure import MeasureOptions, measure_head
from beaconscope.replay.simulate import drive, schedule, simulate
from tests.replay.made import made_layer

ALL = [
    Full(),
    StreamingLLM(budget=24, sinks=2),
    RandomEviction(budget=24, interval=8, recent=4),
    BeaconKV(budget=24, interval=8, beacons=4, recent=4),
    SnapKV(budget=30, interval=5, window=4),
    TOVA(budget=24),
    Oracle(budget=24, interval=8),
    Longformer(budget=24, global_tokens=4),
    BigBird(budget=24, global_tokens=2, random_blocks=2, block=4),
    ETC(budget=24, segment=8),
]


def no_revisits(data):
    return np.zeros(data.length, bool)


def slow_attention(data, head, position):
    """Attention [G, position + 1] of one position."""
    query = data.query[0, head, :, position].double().numpy()
    logit = query @ data.key[0, head, : position + 1].double().numpy().T * data.spec.scaling
    if data.spec.softcap is not None:
        logit = data.spec.softcap * np.tanh(logit / data.spec.softcap)
    weight = np.exp(logit - logit.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def slow_measures(data, head, found, position, options):
    """Mass, hit rate, output error and regrets of one query that finds ``found``, bool [position + 1]."""
    weight = slow_attention(data, head, position)
    mass = (weight * found).sum(axis=-1).mean()
    hits = regrets = 0
    for row in weight:
        top = np.argsort(-row)[: options.hits]
        hits += found[top].mean()
        regrets += (~found[top] & (row[top] >= options.regret_mass)).sum()
    value = data.value[0, head, : position + 1].double().numpy()
    full = weight @ value
    kept = (weight * found) @ value / (weight * found).sum(axis=-1, keepdims=True)
    error = (np.linalg.norm(kept - full, axis=-1) / np.linalg.norm(full, axis=-1)).mean()
    return mass, hits / len(weight), error, regrets


@pytest.mark.parametrize("fields", [{}, {"softcap": 2.0}, {"scaling": 1.5}], ids=["plain", "softcap", "large logits"])
def test_measures_are_what_they_are_defined_to_be(fields):
    data = made_layer(**fields)
    options = MeasureOptions(hits=5, output_every=1)
    kept = simulate(ALL, data)
    for head in range(2):
        measured = measure_head(data, head, kept, options, no_revisits(data))
        assert measured.positions.tolist() == list(range(20, 150))
        for number, each in enumerate(kept):
            for q, position in enumerate(measured.positions.tolist()):
                found = each.found(head, position, position + 1)[0].numpy()
                expected = slow_measures(data, head, found, position, options)
                ours = [part[number, q] for part in (measured.mass, measured.hit_rate, measured.output_error)]
                np.testing.assert_allclose(ours, expected[:3], atol=2e-4, rtol=2e-3)
                assert measured.regrets[number, q] == expected[3]


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_of_200_are_measured_like_those_of_0(sign):
    """A number that is added to all logits of a query changes nothing, as long as no exponential runs over."""
    data = made_layer(seed=1)
    query, key = (torch.cat([part, torch.ones_like(part[..., :1])], dim=-1) for part in (data.query, data.key))
    key[..., -1] = sign * 200 / data.spec.scaling
    rotary = Rotary.none(query.shape[-1])
    shifted = dataclasses.replace(data, query=query, key=key, rotary=rotary)
    assert (shifted.everything(0, 150).query @ key[:, :, None].mT * data.spec.scaling).abs().median() > 150
    kept = simulate(ALL, data)
    options = MeasureOptions(output_every=1)
    expected = measure_head(data, 0, kept, options, no_revisits(data))
    measured = measure_head(shifted, 0, kept, options, no_revisits(data))
    for name in ("mass", "output_error", "hit_rate"):
        np.testing.assert_allclose(getattr(measured, name), getattr(expected, name), atol=2e-3)


def test_a_regret_is_as_old_as_the_eviction():
    """One entry that every query attends to goes at position 6."""
    data = made_layer(12, prompt=2, heads=1, group=1)
    data.key[:] = 0
    data.query[:] = 1
    data.key[0, 0, 1] = 9
    last = torch.full((1, 12), NEVER, dtype=torch.int32)
    last[0, 1] = 6
    measured = measure_head(data, 0, [Lifetimes(last, (6,))], MeasureOptions(hits=1), no_revisits(data))
    assert measured.regrets[0].tolist() == [0] * 5 + [1] * 5
    assert measured.regret_delay[0, 5:].tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(measured.regret_delay[0, :5]).all()
    assert (measured.mass[0, :5] == 1).all()
    assert (measured.mass[0, 5:] < 0.01).all()


def test_the_share_of_a_learned_sink_counts_for_nobody():
    data = made_layer(60, sink_logit=torch.full((2, 2), 3.0))
    kept = simulate([Full(), StreamingLLM(budget=59)], data)
    measured = measure_head(data, 0, kept, MeasureOptions(), no_revisits(data))
    assert (measured.mass == 1).all()


def test_output_errors_are_measured_where_asked():
    data = made_layer()
    revisits = no_revisits(data)
    revisits[[33, 40]] = True
    kept = simulate([StreamingLLM(budget=24)], data)
    for every, expected in ((0, []), (50, [20, 33, 40, 70, 120])):
        measured = measure_head(data, 1, kept, MeasureOptions(output_every=every), revisits)
        assert measured.positions[~np.isnan(measured.output_error[0])].tolist() == expected


def test_without_values_there_is_no_output_error():
    data = made_layer(value=None)
    measured = measure_head(data, 0, simulate([Full()], data), MeasureOptions(output_every=1), no_revisits(data))
    assert np.isnan(measured.output_error).all()
    assert (measured.mass == 1).all()


def test_full_and_a_budget_over_the_length_lose_nothing():
    data = made_layer()
    policies = [Full(), BeaconKV(budget=150), StreamingLLM(budget=150), Oracle(budget=150), RandomEviction(budget=150)]
    for head in range(2):
        measured = measure_head(data, head, simulate(policies, data), MeasureOptions(output_every=1), no_revisits(data))
        assert (measured.mass == 1).all()
        assert (measured.hit_rate == 1).all()
        assert (measured.output_error == 0).all()
        assert (measured.regrets == 0).all()


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    prompt=st.integers(0, 70),
    budget=st.integers(12, 60),
    interval=st.integers(1, 24),
    group=st.integers(1, 3),
)
def test_nothing_beats_the_oracle_at_its_own_schedule(seed, prompt, budget, interval, group):
    data = made_layer(100, prompt, group=group, seed=seed)
    same = {"budget": budget, "interval": interval}
    policies = [
        Oracle(**same),
        RandomEviction(**same, recent=2),
        BeaconKV(**same, beacons=3, recent=3),
        KeyDiff(**same),
        SnapKV(**same, window=3),
        StreamingLLM(**same),
    ]
    kept = simulate(policies, data)
    assert len({each.fired for each in kept}) == 1
    for head in range(2):
        mass = measure_head(data, head, kept, MeasureOptions(), no_revisits(data)).mass.sum(axis=1)
        assert (mass[0] >= mass[1:] - 1e-3).all()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), interval=st.integers(2, 12))
def test_the_oracle_never_loses_by_a_larger_budget(seed, interval):
    """At budgets that are one interval apart, so that all compress at the same positions once they are full."""
    data = made_layer(90, prompt=3, seed=seed)
    kept = simulate([Oracle(budget=3 + interval * n, interval=interval) for n in range(1, 6)], data)
    mass = measure_head(data, 0, kept, MeasureOptions(), no_revisits(data)).mass.sum(axis=1)
    assert (np.diff(mass) >= -1e-3).all()


@settings(max_examples=25, deadline=None)
@given(
    passes=st.lists(st.integers(1, 40), max_size=4),
    budget=st.integers(5, 40),
    interval=st.integers(1, 20),
    sinks=st.integers(0, 4),
)
def test_shortcuts_find_what_driving_finds(passes, budget, interval, sinks):
    data = made_layer(max(120, sum(passes)), passes=tuple(passes))
    streaming = StreamingLLM(budget=budget, interval=interval, sinks=sinks)
    driven = drive(streaming, data)
    assert schedule(streaming, data) == driven.fired
    at_once = simulate([streaming], data)[0]
    assert at_once.fired == driven.fired
    assert torch.equal(at_once.last, driven.last)


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
def test_sizes_count_what_queries_find(policy):
    data = made_layer()
    kept = simulate([policy], data)[0]
    for head in range(2):
        found = [int(kept.found(head, position, position + 1).sum()) for position in range(data.length)]
        assert kept.sizes(head).tolist() == found
        block = kept.found(head, 40, 90)
        for q in range(50):
            seen = kept.found(head, 40 + q, 41 + q)[0]
            assert torch.equal(block[q, : 41 + q], seen)


def test_settings_that_share_their_beacons_keep_what_they_keep_alone():
    data = made_layer(220)
    policies = [
        BeaconKV(budget=budget, interval=8, beacons=count, recent=4, selector=selector, pool_low=8, pool_high=20)
        for selector in ("fps", "random", "kmeans", "none")
        for count in (0, 3, 8)
        for budget in (20, 33)
    ]
    for policy, kept in zip(policies, simulate(policies, data), strict=True):
        alone = drive(policy, data)
        assert kept.fired == alone.fired
        assert torch.equal(kept.last, alone.last)
