"""Every setting that a policy allows has a name, is read back from it, and can be replayed."""

from __future__ import annotations

import dataclasses
import json
import types
import typing

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from beaconscope import BeaconKV, Full, RandomEviction, StreamingLLM, UsageError
from beaconscope.kv.policies import ETC, POLICIES, BigBird, LazyEviction, Policy, ScissorHands, SnapKV, parse_policy
from beaconscope.replay import (
    answer,
    by_setting,
    complete_lists,
    expand,
    label,
    make_jobs,
    sweep,
    to_dict,
    with_controls,
)
from beaconscope.replay.grid import never_full
from tests.record.recording import record_tiny
from tests.tiny import tiny_model


def values_of(hint: object, default: object) -> st.SearchStrategy[object]:
    """Values of a parameter's type, near the sizes of a short trace."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    found: list[st.SearchStrategy[object]] = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            found.append(st.sampled_from(typing.get_args(option)))
        elif option is bool:
            found.append(st.booleans())
        elif option is float:
            found.append(st.floats(0, 1) | st.sampled_from([1e-7, 0.1, 1 / 3]))
        elif option is int:
            found.append(st.integers(0, 40))
        else:
            found.append(st.none())
    return st.just(default) | st.one_of(found)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    kind = draw(st.sampled_from(list(POLICIES.values())))
    hints = typing.get_type_hints(kind)
    given = {name: draw(values_of(hints[name], getattr(kind, name))) for name in kind.parameters() if name != "budget"}
    if "budget" in kind.parameters():
        given["budget"] = draw(st.integers(1, 72))
    try:
        return kind(**given)
    except UsageError:
        assume(False)
        raise


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return record_tiny(tiny_model(num_hidden_layers=1), tmp_path_factory.mktemp("t"), policy=Full(), max_new_tokens=30)


# Settings whose budget is no more than their policy protects by default.
SMALL = [
    SnapKV(budget=32, window=8),
    BeaconKV(budget=16, recent=4),
    RandomEviction(budget=3, recent=2),
    StreamingLLM(budget=1, sinks=0),
    ScissorHands(budget=8, recent=2),
    LazyEviction(budget=12, interval=8),
    BigBird(budget=40, global_tokens=4, random_blocks=1, block=8),
    ETC(budget=24, segment=8),
]


@settings(max_examples=300, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None)
@given(policies())
def test_a_name_is_read_back(policy):
    name = label(policy)
    again = parse_policy(name)
    assert label(again) == name
    assert type(again) is type(policy)
    # A name leaves out the seed, so that all seeds of a setting have the same one.
    assert {**again.params(), "seed": None} == {**policy.params(), "seed": None}


@pytest.mark.parametrize("policy", SMALL, ids=label)
def test_a_budget_below_what_a_policy_protects_by_default_has_a_name(policy):
    assert parse_policy(label(policy)) == policy
    assert label(policy).startswith(f"{policy.name}:budget={policy.budget},")


def test_what_is_at_its_default_is_not_in_a_name():
    assert label(SnapKV(budget=32, window=8)) == "snapkv:budget=32,window=8"
    assert label(Full(shadow=BeaconKV())) == "full"
    assert label(RandomEviction(budget=20, seed=7)) == "random:budget=20"


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(policy=policies())
@example(policy=SMALL[0])
@example(policy=SMALL[1])
@example(policy=StreamingLLM(budget=1, sinks=0))
def test_every_setting_can_be_replayed(trace, policy):
    everything = with_controls([policy])
    found = sweep(make_jobs(trace, everything))
    # The oracle is an upper bound, so the masses are in order where both were run.
    masses = found.settings["mass"]
    assert masses.between(0, 1).all()
    table = by_setting(found.settings)
    assert set(table["setting"]) == {label(each) for each in everything}
    said = answer(found.settings, [policy])
    json.dumps(to_dict(table, said), allow_nan=False)


@pytest.mark.parametrize("policy", SMALL, ids=label)
def test_every_budget_has_its_controls(policy):
    names = [each.name for each in with_controls([policy])]
    assert {"full", "oracle", "streaming-llm"} <= set(names)
    assert names.count("random") >= 5


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("length", [2, 30, 66, 360, 2048, 40_000])
def test_default_budgets_fit_every_policy(name, length):
    lists = complete_lists([name], {}, length)
    found = expand([name], lists)
    if "budget" in POLICIES[name].parameters():
        assert len(found) == len(lists["budget"])
    # Together with others too, each at the same budgets.
    budgets = {each.budget for each in expand(["beacon", name], complete_lists(["beacon", name], {}, length))}
    assert budgets - {1024} if name in ("full", "fastgen", "rpc") else budgets


def test_default_budgets_leave_something_to_choose_beside_what_a_list_protects():
    assert complete_lists(["beacon"], {"recent": [8, 64]}, 360)["budget"] == [72, 88]
    assert complete_lists(["snapkv:window=100"], {}, 360)["budget"] == [112]
    # A policy that protects an interval: that of the user, not the default one.
    assert complete_lists(["lazy-eviction"], {"interval": [50]}, 360)["budget"] == [64, 88]
    assert complete_lists(["beacon"], {"budget": [20]}, 360) == {"budget": [20]}


def test_a_policy_s_own_parameters_may_need_the_budget_of_a_list():
    # Its default budget of 1024 would not hold them.
    assert expand(["snapkv:window=2000"], {"budget": [4096]}) == [SnapKV(budget=4096, window=2000)]


@pytest.mark.parametrize("policy", SMALL, ids=label)
def test_the_least_budget_is_the_smallest_that_is_allowed(policy):
    least = policy.least_budget
    dataclasses.replace(policy, budget=least)
    with pytest.raises(UsageError):
        dataclasses.replace(policy, budget=least - 1)


def test_a_trace_too_short_for_what_is_protected_is_not_told_to_give_a_smaller_budget():
    assert never_full([BeaconKV(budget=40, interval=4)], 30).endswith("; give a smaller --budget or --interval.")
    assert never_full([BeaconKV(budget=40, interval=4)], 18).endswith(
        "; the trace is too short for what the policy protects."
    )
