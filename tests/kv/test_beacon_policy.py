"""BeaconKV's policy against the numpy reference, driven by made-up queries and keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from beaconscope.kv.policies import BeaconKV, QueryBlock
from tests.kv.driving import IllConditioned, check_run, drive, head_info, make_rotary

INV_FREQ = [1.0, 0.2, 0.04]
SIZE = 8  # two dimensions pass through


def made_up(seed, *, rows=1, heads=2, group=2, length=80, clusters=5):
    """Queries around a few directions, as those of a model are, and keys: [R, H, G, T, D] and [R, H, T, D]."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=(rows, heads, group, clusters, SIZE))
    which = rng.integers(clusters, size=length)
    query = 1.5 * centre[:, :, :, which] + 0.5 * rng.normal(size=(rows, heads, group, length, SIZE))
    key = 1.5 * rng.normal(size=(rows, heads, length, SIZE))
    return torch.tensor(query, dtype=torch.float32), torch.tensor(key, dtype=torch.float32)


def compare(policy, seed, *, prompt, style="half", scaling=1.0, chunks=None, cuts=(), **shape):
    query, key = made_up(seed, **shape)
    rotary = make_rotary(INV_FREQ, SIZE, style, scaling)
    run = drive(policy, policy.start(head_info(query, rotary)), query, key, prompt, chunks, cuts)
    check_run(run, policy, query.movedim(3, 2).numpy(), key.numpy(), prompt, INV_FREQ, style, scaling, chunks)
    return run


def compare_any(policy, **options):
    """Compare on the first made-up input that rounding does not decide."""
    for seed in range(5):
        try:
            run = compare(policy, seed, **options)
            assert run.kept, "nothing was compressed"
            return
        except IllConditioned:
            continue
    pytest.fail("five inputs in a row are decided by rounding")


SELECTORS = ["fps", "kmeans", "random", "none"]


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("selector", SELECTORS)
def test_kept_sets_beacons_and_assignments_are_the_references(selector, group):
    policy = BeaconKV(budget=20, interval=6, beacons=5, recent=4, selector=selector, pool_low=8, pool_high=13)
    compare_any(policy, prompt=30, group=group, rows=2, cuts=(33, 34, 50))


@pytest.mark.parametrize("space", ["pre-rope", "post-rope"])
@pytest.mark.parametrize(
    ("selector", "rotation"),
    # A centroid has no position of its own.
    [(selector, rotation) for selector in SELECTORS for rotation in ("current", "own") if selector != "kmeans"]
    + [("kmeans", "current")],
)
def test_every_query_space_and_rotation(selector, space, rotation):
    policy = BeaconKV(
        budget=16,
        interval=5,
        beacons=4,
        recent=3,
        selector=selector,
        query_space=space,
        beacon_rotation=rotation,
        pool_low=6,
        pool_high=9,
    )
    compare_any(policy, prompt=12, length=60)


@pytest.mark.parametrize("over_queries", ["max", "mean"])
@pytest.mark.parametrize("over_group", ["max", "mean"])
@pytest.mark.parametrize("selector", ["fps", "kmeans"])
def test_every_pooling(over_queries, over_group, selector):
    policy = BeaconKV(
        budget=16,
        interval=5,
        beacons=4,
        recent=3,
        selector=selector,
        query_pooling=over_queries,
        group_pooling=over_group,
    )
    compare_any(policy, prompt=25, length=60, group=3)


@pytest.mark.parametrize(("count", "length"), [(0, 60), (1, 60), (16, 80), (64, 200), (256, 310)])
def test_any_number_of_beacons(count, length):
    # The largest pool is thinned soon, for the sake of time.
    policy = BeaconKV(budget=32, interval=8, beacons=count, recent=4, pool_high=280 if count == 256 else None)
    compare_any(policy, prompt=max(length - 50, 5), length=length, heads=1, group=1)


@pytest.mark.parametrize(("recent", "beacons"), [(0, 3), (1, 0), (1, 3), (15, 0), (15, 3)])
def test_any_number_of_recent_queries(recent, beacons):
    compare_any(BeaconKV(budget=16, interval=4, beacons=beacons, recent=recent), prompt=5, length=60)


@pytest.mark.parametrize(("sinks", "recent"), [(1, 3), (4, 3), (4, 11)])
def test_sinks_stay(sinks, recent):
    policy = BeaconKV(budget=16, interval=4, beacons=3, recent=recent, sinks=sinks)
    compare_any(policy, prompt=5, length=60)


@pytest.mark.parametrize(("style", "scaling"), [("interleaved", 1.0), ("half", 1.3), ("interleaved", 1.3)])
def test_every_style_of_rotary(style, scaling):
    compare_any(BeaconKV(budget=16, interval=4, beacons=5, recent=3), prompt=5, length=60, style=style, scaling=scaling)


@pytest.mark.parametrize("chunks", [[50], [20, 20, 10], [1, 49], [30, 1, 1, 18]])
def test_a_prompt_in_pieces_is_compressed_between_them(chunks):
    policy = BeaconKV(budget=16, interval=4, beacons=4, recent=3, pool_low=5, pool_high=11)
    compare_any(policy, prompt=50, chunks=chunks, length=70)


@st.composite
def _cases(draw):
    recent = draw(st.integers(0, 6))
    sinks = draw(st.integers(0, 3))
    beacons = draw(st.integers(0 if recent else 1, 12))
    selector = draw(st.sampled_from(SELECTORS if recent else SELECTORS[:3]))
    low = draw(st.integers(max(beacons, 1), 16))
    policy = BeaconKV(
        budget=draw(st.integers(recent + sinks + 1, 24)),
        interval=draw(st.integers(1, 9)),
        beacons=beacons,
        recent=recent,
        sinks=sinks,
        selector=selector,
        query_space=draw(st.sampled_from(["pre-rope", "post-rope"])),
        beacon_rotation="current" if selector == "kmeans" else draw(st.sampled_from(["current", "own"])),
        query_pooling=draw(st.sampled_from(["max", "mean"])),
        group_pooling=draw(st.sampled_from(["max", "mean"])),
        pool_low=low,
        pool_high=low + draw(st.integers(1, 12)),
        seed=draw(st.integers(0, 3)),
    )
    prompt = draw(st.integers(1, 40))
    pieces = draw(st.none() | st.lists(st.integers(1, 12), max_size=4))
    chunks = None
    if pieces is not None:
        ends = [end for end in np.cumsum(pieces).tolist() if end < prompt]
        chunks = np.diff([0, *ends, prompt]).tolist()
    return {
        "policy": policy,
        "seed": draw(st.integers(0, 10_000)),
        "prompt": prompt,
        "chunks": chunks,
        "cuts": draw(st.sets(st.integers(0, 60), max_size=5)),
        "group": draw(st.sampled_from([1, 2, 4])),
        "style": draw(st.sampled_from(["half", "interleaved"])),
    }


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(_cases())
def test_all_options_together(case):
    try:
        compare(case.pop("policy"), case.pop("seed"), length=60, heads=1, **case)
    except IllConditioned:
        assume(False)


@settings(max_examples=10, deadline=None)
@given(cuts=st.sets(st.integers(20, 59), max_size=12), selector=st.sampled_from(SELECTORS))
def test_where_blocks_are_cut_makes_no_difference(cuts, selector):
    query, key = made_up(1, length=60)
    policy = BeaconKV(budget=16, interval=7, beacons=5, recent=3, selector=selector, pool_low=6, pool_high=11)
    rotary = make_rotary(INV_FREQ, SIZE)
    whole, cut = (
        drive(policy, policy.start(head_info(query, rotary)), query, key, 20, cuts=places) for places in ((), cuts)
    )
    assert [k.tolist() for k in whole.kept] == [k.tolist() for k in cut.kept]
    assert whole.assignment.tolist() == cut.assignment.tolist()
    assert [c.beacons.source.tolist() for c in whole.changes] == [c.beacons.source.tolist() for c in cut.changes]


def test_a_head_draws_the_same_whichever_heads_are_at_hand():
    """Replay reads one head at a time, and has to repeat what the live cache did with all of them."""
    query, key = made_up(2, heads=3, length=60)
    rotary = make_rotary(INV_FREQ, SIZE)
    for selector in SELECTORS:
        policy = BeaconKV(budget=16, interval=7, beacons=5, recent=3, selector=selector, seed=3)
        together = drive(policy, policy.start(head_info(query, rotary, layer=4)), query, key, 20)
        for head in range(3):
            info = head_info(query[:, head : head + 1], rotary, layer=4)
            info = type(info)(**{**vars(info), "kv_heads": (head,)})
            alone = drive(policy, policy.start(info), query[:, head : head + 1], key[:, head : head + 1], 20)
            assert [k[:, head].tolist() for k in together.kept] == [k[:, 0].tolist() for k in alone.kept]


def test_the_random_selector_draws_otherwise_with_another_seed_layer_head_and_query_head():
    query, _ = made_up(0, heads=2, length=60)

    def sources(seed, layer):
        policy = BeaconKV(beacons=8, selector="random", seed=seed)
        state = policy.start(head_info(query, layer=layer))
        state.tracker.observe(query, 0)
        return state.tracker.choose(59).source[0]  # [H, G, K]

    first = sources(0, 0)
    assert torch.equal(first, sources(0, 0))
    draws = (first[0, 0], first[0, 1], first[1, 0], sources(1, 0)[0, 0], sources(0, 1)[0, 0])
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)


def test_the_random_selector_is_uniform():
    """5 of 50 queries, 400 heads: each query is taken 40 times on average, with a standard deviation of 6."""
    query = torch.zeros(1, 400, 1, 50, 2)
    state = BeaconKV(beacons=5, selector="random").start(head_info(query))
    state.tracker.observe(query[:, :, :, :3], 0)
    state.tracker.observe(query[:, :, :, 3:], 3)
    taken = torch.bincount(state.tracker.choose(49).source.flatten(), minlength=50)
    assert int(taken.sum()) == 2000
    assert (taken - 40).abs().max() < 5 * 6


def test_queries_before_the_first_beacons_have_none():
    query, _ = made_up(0, length=10)
    tracker = BeaconKV(beacons=3).start(head_info(query)).tracker
    tracker.observe(query, 0)
    assert (tracker.assignments[0].beacon == -1).all()
    assert tracker.assignments[0].similarity.isnan().all()
    assert not tracker.changes


def test_heads_that_are_not_followed_log_nothing():
    query, _ = made_up(0, length=40)
    tracker = BeaconKV(beacons=3).start(head_info(query, follow=False)).tracker
    tracker.observe(query, 0)
    tracker.choose(39)
    assert tracker.assignments == []
    assert tracker.changes == []


@pytest.mark.parametrize("selector", SELECTORS)
def test_selected_rows_go_on_as_if_they_had_always_been_there(selector):
    query, _ = made_up(3, rows=3, length=60)
    rows = torch.tensor([2, 0, 2])
    rotary = make_rotary(INV_FREQ, SIZE)
    policy = BeaconKV(budget=16, interval=4, beacons=4, recent=3, selector=selector, pool_low=5, pool_high=9)
    state, other = (policy.start(head_info(query, rotary)) for _ in range(2))
    state.observe(QueryBlock(query[:, :, :, :31], 0, together=True))
    other.observe(QueryBlock(query[rows][:, :, :, :31], 0, together=True))
    for tracker in (state.tracker, other.tracker):
        tracker.choose(30)
    state.select_rows(rows)
    for one in (state, other):
        one.observe(QueryBlock(query[rows][:, :, :, 31:], 31, together=True))
    ours, theirs = state.tracker.choose(59), other.tracker.choose(59)
    assert (ours is None) == (theirs is None)
    if ours is not None:
        assert torch.equal(ours.source, theirs.source)
        torch.testing.assert_close(ours.vector, theirs.vector)
    assert torch.equal(state.tracker.assignments[-1].beacon, other.tracker.assignments[-1].beacon)
