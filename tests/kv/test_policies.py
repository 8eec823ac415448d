"""Policies as such: what their options must be, how they are written down, which entries win."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from beaconscope.errors import UsageError
from beaconscope.kv.policies import POLICIES, BeaconKV, CacheView, Full, RandomEviction, StreamingLLM, parse_policy
from beaconscope.kv.policies.base import keep_highest
from tests.kv.driving import head_info


def refused(match):
    return pytest.raises(UsageError, match=rf"\A[^\n]*{match}[^\n]*\Z")


class TestKeepHighest:
    def test_protected_first_then_the_highest_and_of_equals_the_oldest(self):
        scores = torch.tensor([[[0.1, 0.9, 0.5, 0.5, 0.5, 0.0]]])
        protected = torch.tensor([False, False, False, False, False, True])
        for budget, kept in [(1, [5]), (2, [1, 5]), (3, [1, 2, 5]), (4, [1, 2, 3, 5]), (6, [0, 1, 2, 3, 4, 5])]:
            assert keep_highest(scores, protected, budget)[0, 0].nonzero().flatten().tolist() == kept

    def test_heads_choose_by_themselves_unless_they_share(self):
        scores = torch.tensor([[[3.0, 0, 0, 1], [0, 2.0, 0, 1]]])
        nothing = torch.zeros(4, dtype=torch.bool)
        assert keep_highest(scores, nothing, 1).int().tolist() == [[[1, 0, 0, 0], [0, 1, 0, 0]]]
        assert keep_highest(scores, nothing, 2, shared=True).int().tolist() == [[[1, 1, 0, 0]] * 2]

    @given(
        st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20),
        st.integers(1, 25),
        st.integers(0, 20),
    )
    def test_no_entry_that_goes_beats_one_that_stays(self, scores, budget, recent):
        n = len(scores)
        recent = min(recent, budget)
        protected = torch.arange(n) >= n - recent
        kept = keep_highest(torch.tensor(scores)[None, None], protected, budget)[0, 0].tolist()
        assert sum(kept) == min(budget, n)
        assert all(kept[max(n - recent, 0) :])
        stays = [score for score, keep, safe in zip(scores, kept, protected.tolist(), strict=True) if keep and not safe]
        goes = [score for score, keep in zip(scores, kept, strict=True) if not keep]
        assert not stays or not goes or min(stays) >= max(goes)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"beacons": -1}, "beacons is -1; give 0 to 256"),
            ({"beacons": 257}, "beacons is 257; give 0 to 256"),
            ({"recent": -1}, "recent is -1; give 0 or more"),
            ({"sinks": -1}, "sinks is -1; give 0 or more"),
            ({"seed": -1}, "seed is -1; give 0 or more"),
            ({"interval": 0}, "interval is 0; give at least 1"),
            ({"budget": 16}, "a budget of 16 is too small for .*, which protects 16 .* at least 17"),
            ({"budget": 20, "sinks": 4}, "give a budget of at least 21"),
            ({"budget": 0}, "give a budget of at least 17"),
            ({"selector": "fsp"}, "selector is 'fsp'; give one of fps, kmeans, random, none"),
            ({"query_space": "rope"}, "query-space is 'rope'; give one of pre-rope, post-rope"),
            ({"beacon_rotation": "x"}, "beacon-rotation is 'x'; give one of current, own"),
            ({"query_pooling": "sum"}, "query-pooling is 'sum'; give one of max, mean"),
            ({"group_pooling": "sum"}, "group-pooling is 'sum'; give one of max, mean"),
            ({"recent": 0, "beacons": 0}, "nothing observes; give --recent or --beacons at least 1"),
            ({"recent": 0, "selector": "none"}, "nothing observes"),
            ({"selector": "kmeans", "beacon_rotation": "own"}, "give --beacon-rotation current"),
            ({"beacons": 16, "pool_low": 15}, "give --pool-low at least 16"),
            ({"pool_low": 0, "beacons": 0}, "give --pool-low at least 1"),
            ({"pool_low": 40, "pool_high": 40}, "give at least 41"),
        ],
    )
    def test_impossible_ones_are_refused_with_the_remedy(self, options, message):
        with refused(message):
            BeaconKV(**options)

    @pytest.mark.parametrize("kind", [StreamingLLM, RandomEviction])
    def test_those_of_the_others_too(self, kind):
        with refused("interval is 0"):
            kind(interval=0)
        with refused("give a budget of at least"):
            kind(budget=0)
        name = "sinks" if kind is StreamingLLM else "recent"
        with refused(f"{name} is -1; give 0 or more"):
            kind(**{name: -1})

    @pytest.mark.parametrize(("count", "low", "high"), [(0, 32, 160), (32, 32, 160), (33, 33, 161), (256, 256, 384)])
    def test_the_pool_follows_the_beacons(self, count, low, high):
        settings = BeaconKV(beacons=count).beacon_settings
        assert (settings.pool_low, settings.pool_high) == (low, high)

    def test_defaults(self):
        policy = BeaconKV()
        assert (policy.budget, policy.interval, policy.beacons, policy.recent, policy.sinks) == (1024, 128, 16, 16, 0)
        assert (policy.capacity, policy.needs_queries) == (1152, True)
        assert Full().capacity is None
        assert not Full().needs_queries
        assert Full(shadow=policy).needs_queries
        assert (StreamingLLM().interval, StreamingLLM().sinks) == (1, 4)

    @pytest.mark.parametrize("kind", POLICIES.values(), ids=POLICIES)
    def test_params_are_plain_values(self, kind):
        params = kind().params()
        assert json.loads(json.dumps(params)) == params
        assert tuple(params) == kind.parameters()

    def test_params_of_a_full_cache_are_those_of_its_shadow(self):
        assert Full().params() == {}
        assert Full(shadow=BeaconKV(budget=64)).params() == {"shadow": BeaconKV(budget=64).params()}


class TestParse:
    @pytest.mark.parametrize("name", POLICIES)
    def test_a_name_alone_is_the_default(self, name):
        assert parse_policy(name) == POLICIES[name]()

    @pytest.mark.parametrize(
        ("text", "policy"),
        [
            ("streaming-llm:sinks=2,budget=64", StreamingLLM(sinks=2, budget=64)),
            ("Streaming_LLM: sinks = 2 ,", StreamingLLM(sinks=2)),
            ("beacon:selector=kmeans,pool-low=20,pool_high=none", BeaconKV(selector="kmeans", pool_low=20)),
            ("beacon:query-space=post-rope,recent=0", BeaconKV(query_space="post-rope", recent=0)),
        ],
    )
    def test_parameters_follow_a_colon(self, text, policy):
        assert parse_policy(text) == policy

    def test_defaults_hold_where_the_text_is_silent(self):
        assert parse_policy("random:seed=1", budget=64, seed=7, beacons=3) == RandomEviction(budget=64, seed=1)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("beacn", "there is no policy 'beacn'; did you mean beacon"),
            ("zzz", "there is no policy 'zzz'; there are: beacon"),
            ("", "there is no policy ''"),
            ("beacon:recnt=3", "policy beacon has no parameter 'recnt'; did you mean recent"),
            ("beacon:recent", "'recent' gives no value; write recent=VALUE"),
            ("beacon:recent=", "gives no value"),
            ("beacon:recent=many", "policy beacon: recent=many does not fit; give a whole number"),
            ("beacon:recent=1.5", "give a whole number"),
            ("beacon:selector=best", "give one of fps, kmeans, random, none"),
            ("beacon:pool_low=x", "give a whole number or none"),
            ("beacon:budget=3", "give a budget of at least 17"),
            ("full:shadow=beacon", "policy full has no parameter 'shadow'"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, text, message):
        with refused(message):
            parse_policy(text)


def test_streaming_llm_keeps_both_ends_of_any_view():
    state = StreamingLLM(budget=6, sinks=2).start(head_info(torch.zeros(1, 1, 1, 1, 4)))
    positions = torch.tensor([[[0, 1, 5, 6, 7, 8, 9]]])
    view = CacheView(key=torch.zeros(1, 1, 7, 4), value=torch.zeros(1, 1, 7, 4), positions=positions, newest=9)
    assert positions[state.keep(view)].tolist() == [0, 1, 6, 7, 8, 9]
