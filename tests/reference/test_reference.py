"""The witness itself, on inputs small enough to be worked out on paper."""

from __future__ import annotations

import numpy as np
import pytest

from .beacon_kv import (
    Beacon,
    OnlineKMeans,
    Pool,
    Reservoir,
    Settings,
    check_reservoir,
    farthest_points,
    keep,
    observe,
    score,
    simulate,
    steps,
)
from .policies import check_random_eviction, full, random_eviction, streaming_llm
from .rotary import rotate, unrotate

QUARTER = np.pi / 2
STILL = [0.0]
"""Frequencies of a rotation that does not turn."""


def on_circle(*degrees: float) -> np.ndarray:
    radians = np.deg2rad(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], axis=-1)


class TestRotary:
    def test_turns_pairs_by_position_times_frequency(self):
        # A quarter turn takes (a, b) to (-b, a), a half turn to (-a, -b).
        x, inv_freq = [[1, 2, 3, 4]], [QUARTER, np.pi]
        np.testing.assert_allclose(rotate(x, [1], inv_freq), [[-3, -2, 1, -4]], atol=1e-12)
        np.testing.assert_allclose(rotate(x, [1], inv_freq, "interleaved"), [[-2, 1, -3, -4]], atol=1e-12)
        np.testing.assert_allclose(rotate(x, [2], inv_freq), [[-1, 2, -3, 4]], atol=1e-12)

    def test_partial_rotation_leaves_the_rest_alone(self):
        np.testing.assert_allclose(rotate([[1, 0, 5, 6]], [1], [QUARTER], scaling=2), [[0, 2, 5, 6]], atol=1e-12)

    @pytest.mark.parametrize("style", ["half", "interleaved"])
    def test_unrotate_undoes_rotate(self, style):
        x = np.arange(24.0).reshape(2, 3, 4)
        there = rotate(x, [0, 7, 1000], [1.0, 0.01], style, 1.3)
        np.testing.assert_allclose(unrotate(there, [0, 7, 1000], [1.0, 0.01], style, 1.3), x, atol=1e-12)

    def test_products_depend_on_the_distance_alone(self):
        q, k, inv_freq = [[1.0, 2.0, 3.0, 4.0]], [[4.0, -1.0, 0.5, 2.0]], [1.0, 0.1]
        near = rotate(q, [9], inv_freq) @ rotate(k, [4], inv_freq).T
        far = rotate(q, [105], inv_freq) @ rotate(k, [100], inv_freq).T
        np.testing.assert_allclose(near, far)


class TestFarthestPoints:
    def test_starts_with_the_newest_and_goes_to_the_farthest(self):
        # From 180 the farthest is 0; then 90, which is 90 away from both, beats 10, which is 10 away from 0.
        assert farthest_points(on_circle(0, 10, 90, 180), 4) == [3, 0, 2, 1]

    def test_length_does_not_count(self):
        assert farthest_points(on_circle(0, 10, 90, 180) * [[9], [1], [0.1], [2]], 3) == [3, 0, 2]

    def test_ties_go_to_the_lowest_index(self):
        assert farthest_points([[0, 1], [0, -1], [0, 1], [1, 0]], 2) == [3, 0]
        assert farthest_points([[1, 0]] * 4, 4) == [3, 0, 1, 2]

    def test_takes_all_of_too_few(self):
        assert farthest_points(on_circle(0, 180), 5) == [1, 0]


class TestSelectors:
    def test_pool_is_thinned_when_full_and_stays_in_order(self):
        pool = Pool(count=2, low=3, high=5)
        added = [pool.add(t, q) for t, q in enumerate(on_circle(0, 180, 5, 90, 10))]
        assert added == [False, False, False, False, True]
        assert [b.source for b in pool.held] == [1, 3, 4]  # chosen as 4 (newest), 1 (170 away), 3 (80 away)
        assert [b.source for b in pool.beacons()] == [4, 1]

    def test_kmeans_centroids_follow_their_members(self):
        kmeans = OnlineKMeans(2)
        for t, query in enumerate(np.array([[2.0, 0], [0, 2], [4, 3]])):
            kmeans.add(t, query)
        # (4, 3) has direction (.8, .6), nearest to (1, 0): halfway is (.9, .3), and the mean norm of 2 and 5 is 3.5.
        first, second = kmeans.beacons()
        assert first.source == second.source == -1
        np.testing.assert_allclose(first.vector, 3.5 * np.array([3, 1]) / np.sqrt(10))
        np.testing.assert_allclose(second.vector, [0, 2])

    def test_kmeans_moves_less_with_every_member(self):
        kmeans = OnlineKMeans(1)
        for t, query in enumerate(np.array([[1.0, 0], [1, 0], [0, 1]])):
            kmeans.add(t, query)
        # The third member moves (1, 0) a third of the way to (0, 1): (2/3, 1/3), brought to length 1.
        np.testing.assert_allclose(kmeans.beacons()[0].vector, np.array([2, 1]) / np.sqrt(5))

    def test_reservoir_is_uniform(self):
        drawn = np.zeros(10)
        for seed in range(2000):
            reservoir = Reservoir(3, np.random.default_rng(seed))
            for t in range(10):
                reservoir.add(t, np.zeros(2))
            drawn[[b.source for b in reservoir.beacons()]] += 1
        # Binomial(2000, 0.3): mean 600, standard deviation 20.5.
        assert np.abs(drawn - 600).max() < 4 * 20.5


class TestScoring:
    def test_beacons_are_rotated_to_now_or_to_their_own_position(self):
        beacon, recent = Beacon(2, np.array([1.0, 0.0])), np.array([[7.0, 8.0]])
        for settings, expected in [
            (Settings(beacon_rotation="current"), [0, 1]),  # position 5: five quarter turns
            (Settings(beacon_rotation="own"), [-1, 0]),  # position 2: a half turn
            (Settings(query_space="post-rope"), [1, 0]),
        ]:
            seen = observe(recent, [beacon], 5, settings, [QUARTER])
            np.testing.assert_allclose(seen, [[7, 8], expected], atol=1e-12)

    def test_score_is_pooled_softmax(self):
        # Logits are q.k / sqrt(1): log 3 and 0 give 3/4 and 1/4; 0 and 0 give halves.
        keys, heads = np.array([[np.log(3)], [0.0]]), [np.array([[1.0], [0.0]]), np.array([[0.0], [0.0]])]
        for over_queries, over_group, expected in [
            ("max", "max", [3 / 4, 1 / 2]),
            ("mean", "max", [5 / 8, 1 / 2]),
            ("max", "mean", [5 / 8, 1 / 2]),
            ("mean", "mean", [9 / 16, 7 / 16]),
        ]:
            settings = Settings(query_pooling=over_queries, group_pooling=over_group)
            np.testing.assert_allclose(score(heads, keys, settings), expected)

    def test_logits_are_divided_by_the_root_of_the_dimension(self):
        keys = np.array([[np.log(9), 0, 0, 0], [0.0, 0, 0, 0]])
        np.testing.assert_allclose(score([np.array([[1.0, 0, 0, 0]])], keys, Settings()), [3 / 4, 1 / 4])

    def test_keep_protects_then_ranks(self):
        cached, scores = [0, 1, 4, 6, 7, 9], [0.0, 0.3, 0.2, 0.3, 0.1, 0.0]
        assert keep(cached, scores, Settings(budget=3, recent=1)).tolist() == [1, 6, 9]
        assert keep(cached, scores, Settings(budget=3, recent=1, sinks=1)).tolist() == [0, 1, 9]  # 1 ties with 6
        assert keep(cached, scores, Settings(budget=3, recent=3)).tolist() == [6, 7, 9]
        assert keep(cached, scores, Settings(budget=2, recent=0)).tolist() == [1, 6]
        assert keep(cached, scores, Settings(budget=9, recent=1)).tolist() == cached


def revisit() -> tuple[np.ndarray, np.ndarray]:
    """Return queries [9, 1, 2] and keys [9, 2]: position 0 asks for key 0, and all later ones for the largest key."""
    queries = np.array([[5.0, 0.0]] + [[0.0, 5.0]] * 8)[:, None]
    keys = np.array([[1.0, 0.0]] + [[0.0, t] for t in range(1, 9)])
    return queries, keys


class TestSimulate:
    def test_a_beacon_saves_what_an_old_query_asked_for(self):
        queries, keys = revisit()
        with_beacons = simulate(queries, keys, 1, Settings(budget=3, interval=2, recent=1, beacons=2), STILL)
        assert [c.position for c in with_beacons.compressions] == [4, 6, 8]
        assert [c.kept.tolist() for c in with_beacons.compressions] == [[0, 3, 4], [0, 5, 6], [0, 7, 8]]
        assert [c.evicted.tolist() for c in with_beacons.compressions] == [[1, 2], [3, 4], [5, 6]]
        assert [[b.source for b in c.beacons[0]] for c in with_beacons.compressions] == [[4, 0], [6, 0], [8, 0]]

    @pytest.mark.parametrize("change", [{"beacons": 0}, {"beacons": 2, "selector": "none"}])
    def test_recent_queries_alone_forget_it(self, change):
        queries, keys = revisit()
        alone = simulate(queries, keys, 1, Settings(budget=3, interval=2, recent=1, **change), STILL)
        assert [c.kept.tolist() for c in alone.compressions] == [[2, 3, 4], [4, 5, 6], [6, 7, 8]]
        assert [c.beacons for c in alone.compressions] == [[[]], [[]], [[]]]
        assert (alone.assignment == -1).all()

    @pytest.mark.parametrize("inv_freq", [STILL, [QUARTER]])
    def test_just_the_recent_queries_observe_as_they_were_attended(self, inv_freq):
        # Query 2 asks for key 0, query 3 for key 1, query 4 for nothing: then all entries tie and the lowest wins.
        queries = np.array([[0.0, 0], [0, 0], [9, 0], [0, 9], [0, 0]])[:, None]
        keys = np.array([[1.0, 0], [0, 1], [0, 0], [0, 0], [0, 0]])
        for recent, kept in [(1, [0, 4]), (2, [1, 3, 4]), (3, [0, 2, 3, 4])]:
            settings = Settings(budget=recent + 1, interval=4 - recent, recent=recent, beacons=0)
            run = simulate(queries, keys, 1, settings, inv_freq)
            assert [c.kept.tolist() for c in run.compressions] == [kept]

    def test_each_query_head_has_its_own_beacons(self):
        queries, keys = revisit()
        both = np.concatenate([np.repeat(queries[1:2], 9, axis=0), queries], axis=1)  # head 0 never asks for key 0
        run = simulate(both, keys, 1, Settings(budget=3, interval=2, recent=1, beacons=2), STILL)
        assert run.compressions[0].kept.tolist() == [0, 3, 4]
        assert [b.source for b in run.compressions[0].beacons[1]] == [4, 0]

    def test_rotation_decides_what_an_old_query_asks_for_now(self):
        # Quarter turns. The first query is (9, 0) before and after its rotation by 0, and the rest ask for nothing.
        # Now, at position 3, it points to (0, -9), which key 2 answers; where it came from, key 1 does.
        queries = np.zeros((4, 1, 2))
        queries[0, 0] = [9, 0]
        keys = np.array([[0.0, 0], [1, 0], [0, -1], [0, 0]])
        base = {"budget": 2, "interval": 2, "recent": 1, "beacons": 4}
        for change, kept in [
            ({}, [2, 3]),
            ({"beacon_rotation": "own"}, [1, 3]),
            ({"query_space": "post-rope"}, [1, 3]),
        ]:
            run = simulate(queries, keys, 1, Settings(**base, **change), [QUARTER])
            assert [c.kept.tolist() for c in run.compressions] == [kept]

    def test_query_space_decides_what_is_alike(self):
        # Before the rotation all queries are one; after it they point to 0, 90, 180, 270 degrees.
        queries = rotate([[1.0, 0.0]] * 4, range(4), [QUARTER])[:, None]
        base = {"budget": 2, "interval": 2, "recent": 1, "beacons": 2}
        after = simulate(queries, np.zeros((4, 2)), 1, Settings(**base, query_space="post-rope"), [QUARTER])
        assert [b.source for b in after.compressions[0].beacons[0]] == [3, 1]
        np.testing.assert_allclose(after.compressions[0].beacons[0][1].vector, [0, 1], atol=1e-12)
        before = simulate(queries, np.zeros((4, 2)), 1, Settings(**base), [QUARTER])
        for beacon in before.compressions[0].beacons[0]:
            np.testing.assert_allclose(beacon.vector, [1, 0], atol=1e-12)

    def test_assignment_thinnings_and_members(self):
        # Fires at 2 and 4; the pool is thinned to two when it holds four, that is at 3 and then at every second token.
        queries = on_circle(0, 90, 91, 10, 95, 180)[:, None]
        settings = Settings(budget=1, interval=2, recent=1, beacons=2, pool_low=2, pool_high=4)
        run = simulate(queries, np.zeros((6, 2)), 1, settings, STILL)
        assert [c.position for c in run.compressions] == [2, 4]
        assert [t.position for t in run.thinnings] == [3, 5]
        # 2: from 91, farthest 0. 3: the pool 0 90 91 10 keeps 10 and 91 (81 away).
        # 4: of 91 10 95, from 95, farthest 10. 5: of 91 10 95 180, from 180, farthest 10.
        changes = [*run.compressions, *run.thinnings]
        sources = {c.position: [b.source for b in c.beacons[0]] for c in changes}
        assert sources == {2: [2, 0], 3: [3, 2], 4: [4, 3], 5: [5, 3]}
        # Each token is compared with the beacons from before it: 10 is nearest to 0 of (91, 0), 95 to 91 of (10, 91),
        # 180 to 95 of (95, 10).
        assert run.assignment[:, 0].tolist() == [-1, -1, -1, 1, 1, 0]
        np.testing.assert_allclose(run.similarity[3:, 0], np.cos(np.deg2rad([10, 4, 85])))
        assert np.isnan(run.similarity[:3]).all()
        assert {c.position: c.members[0] for c in changes} == {2: [], 3: [0, 1], 4: [0, 1], 5: [1, 0]}

    def test_the_first_beacons_come_with_the_first_compression(self):
        queries = on_circle(*range(0, 60, 10))[:, None]
        settings = Settings(budget=3, interval=3, recent=1, beacons=1, pool_low=2, pool_high=3)
        run = simulate(queries, np.zeros((6, 2)), 1, settings, STILL)
        assert [c.position for c in run.compressions] == [5]
        assert run.thinnings == []
        assert (run.assignment == -1).all()

    def test_kmeans_beacons_are_centroids(self):
        queries = np.array([[2.0, 0], [0, 2], [4, 3]])[:, None]
        settings = Settings(budget=1, interval=2, recent=1, beacons=2, selector="kmeans")
        run = simulate(queries, np.zeros((3, 2)), 1, settings, STILL)
        np.testing.assert_allclose(run.compressions[0].beacons[0][0].vector, 3.5 * np.array([3, 1]) / np.sqrt(10))

    @pytest.mark.parametrize("seed", range(3))
    def test_random_beacons_are_past_queries(self, seed):
        queries = np.random.default_rng(seed).normal(size=(40, 2, 2))
        settings = Settings(budget=8, interval=4, recent=2, beacons=5, selector="random", seed=seed)
        run = simulate(queries, np.zeros((40, 2)), 3, settings, STILL)
        assert len(run.compressions) == 8  # at 12, 16, … 40 entries ever seen
        check_reservoir(run, queries, settings)

    def test_a_prompt_is_compressed_once_at_its_end(self):
        queries, keys = revisit()
        settings = Settings(budget=3, interval=2, recent=1, beacons=2)
        for prompt, positions in [(4, [4, 6, 8]), (5, [4, 6, 8]), (8, [7]), (9, [8])]:
            run = simulate(queries, keys, prompt, settings, STILL)
            assert [c.position for c in run.compressions] == positions
        assert run.compressions[0].kept.tolist() == [0, 7, 8]
        assert run.compressions[0].evicted.tolist() == [1, 2, 3, 4, 5, 6]

    def test_a_prompt_in_pieces_is_compressed_between_them(self):
        queries, keys = revisit()
        settings = Settings(budget=3, interval=2, recent=1, beacons=2)
        run = simulate(queries, keys, 9, settings, STILL, chunks=[6, 1, 2])
        assert [c.position for c in run.compressions] == [5, 8]
        assert [c.kept.tolist() for c in run.compressions] == [[0, 4, 5], [0, 7, 8]]

    @pytest.mark.parametrize("style", ["half", "interleaved"])
    def test_rotary_style_and_scaling_reach_the_beacons(self, style):
        before = np.array([[1.0, 2, 3, 4], [4, 3, 2, 1], [0, 1, 0, 1]])
        rope = {"inv_freq": [1.0, 0.1], "style": style, "scaling": 1.2}
        queries = rotate(before, range(3), **rope)[:, None]
        settings = Settings(budget=1, interval=2, recent=1, beacons=3)
        run = simulate(queries, np.zeros((3, 4)), 1, settings, **rope)
        for beacon in run.compressions[0].beacons[0]:
            np.testing.assert_allclose(beacon.vector, before[beacon.source], atol=1e-12)

    @pytest.mark.parametrize(
        "options",
        [
            {"budget": 4, "recent": 5},
            {"budget": 4, "recent": 3, "sinks": 2},
            {"interval": 0},
            {"recent": 0, "beacons": 0},
            {"recent": 0, "selector": "none"},
            {"selector": "kmeans", "beacon_rotation": "own"},
            {"beacons": 8, "pool_low": 7},
            {"pool_low": 40, "pool_high": 40},
        ],
    )
    def test_impossible_settings_are_refused(self, options):
        with pytest.raises(ValueError):  # noqa: PT011
            Settings(**options)

    @pytest.mark.parametrize(("count", "bounds"), [(0, (32, 160)), (32, (32, 160)), (256, (256, 384))])
    def test_pool_bounds_follow_the_beacons(self, count, bounds):
        assert Settings(beacons=count).pool_bounds == bounds


class TestPolicies:
    def test_steps(self):
        assert [list(s) for s in steps(6, 4)] == [[0, 1, 2, 3], [4], [5]]
        assert [list(s) for s in steps(6, 4, [3, 1])] == [[0, 1, 2], [3], [4], [5]]
        with pytest.raises(ValueError, match="pieces"):
            list(steps(6, 4, [3, 2]))

    def test_full_keeps_all(self):
        assert full(100, 10) == []

    def test_streaming_llm_keeps_both_ends(self):
        run = streaming_llm(length=8, prompt_length=6, budget=4, sinks=1)
        assert [(c.position, c.kept.tolist(), c.evicted.tolist()) for c in run] == [
            (5, [0, 3, 4, 5], [1, 2]),
            (6, [0, 4, 5, 6], [3]),
            (7, [0, 5, 6, 7], [4]),
        ]
        assert [c.kept.tolist() for c in streaming_llm(5, 1, budget=4, sinks=0)] == [[1, 2, 3, 4]]
        assert streaming_llm(4, 1, budget=4, sinks=2) == []

    @pytest.mark.parametrize("recent", [0, 2, 4])
    @pytest.mark.parametrize("chunks", [None, [8, 2]])
    def test_random_eviction_keeps_its_promises(self, recent, chunks):
        run = random_eviction(30, 10, budget=4, interval=3, recent=recent, seed=recent, chunks=chunks)
        check_random_eviction(run, 30, 10, budget=4, interval=3, recent=recent, chunks=chunks)

    def test_random_eviction_is_uniform(self):
        kept = np.zeros(10)
        for seed in range(2000):
            kept[random_eviction(10, 10, budget=4, interval=1, recent=1, seed=seed)[0].kept] += 1
        assert kept[9] == 2000
        # Three of the first nine, 2000 times: Binomial(2000, 1/3), mean 667, standard deviation 21.1.
        assert np.abs(kept[:9] - 2000 / 3).max() < 4 * 21.1
