"""What settings keep does not depend on which others are simulated beside them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from beaconscope import BeaconKV, RandomEviction, StreamingLLM
from beaconscope.attention.spec import AttentionSpec
from beaconscope.kv.policies import ExpectedAttention, KeyDiff, Knorm, SnapKV
from beaconscope.replay.simulate import drive, schedule, simulate
from tests.replay.made import made_layer

BEACONS = [
    BeaconKV(budget=budget, interval=8, beacons=count, recent=recent, selector=selector, pool_low=8, pool_high=20)
    for selector in ("fps", "random", "kmeans", "none")
    for count, recent in ((0, 6), (3, 4), (8, 2))
    for budget in (20, 33)
]
OTHERS = [
    BeaconKV(budget=28, interval=8, beacons=4, recent=4, beacon_rotation="own", sinks=2),
    BeaconKV(budget=28, interval=8, beacons=4, recent=4, query_pooling="mean", group_pooling="mean"),
    BeaconKV(budget=28, interval=8, beacons=4, recent=4, query_space="post-rope"),
    SnapKV(budget=20, interval=8, window=5),
    SnapKV(budget=28, interval=8, window=9, kernel=3, pooling="max"),
    SnapKV(budget=25, interval=11, window=4),
    KeyDiff(budget=20, interval=8),
    Knorm(budget=20, interval=8),
    ExpectedAttention(budget=20, interval=8),
    RandomEviction(budget=20, interval=8),
    StreamingLLM(budget=20),
]


def check(policies, data):
    """Each is kept the same together, in a simulation of its own, and driven."""
    for policy, kept in zip(policies, simulate(policies, data), strict=True):
        for alone in (simulate([policy], data)[0], drive(policy, data)):
            assert kept.fired == alone.fired
            assert torch.equal(kept.last, alone.last)


@pytest.mark.parametrize("prompt", [0, 60])
@pytest.mark.parametrize("policies", [BEACONS, [*BEACONS[:6], *OTHERS]], ids=["beacons", "mixed"])
def test_settings_keep_together_what_they_keep_alone(policies, prompt):
    check(policies, made_layer(150, prompt))


@pytest.mark.parametrize(
    "fields", [{"softcap": 5.0}, {"sink_logit": torch.ones(2, 2)}, {"shared": True}], ids=["softcap", "sinks", "shared"]
)
def test_so_they_do_under_other_attention(fields):
    check([*BEACONS[:6], *OTHERS], made_layer(110, **fields))


@pytest.mark.parametrize("times", [30, 200])
def test_so_they_do_where_few_entries_get_all_attention(times):
    """Exponentials of most logits are 0, so that most scores are equal."""
    data = made_layer(110)
    check([*BEACONS[:6], *OTHERS], dataclasses.replace(data, spec=AttentionSpec(data.spec.scaling * times)))


def test_a_setting_with_few_queries_that_needs_no_shared_products_goes_ahead():
    data = made_layer(150, group=1)
    few = [BeaconKV(budget=budget, interval=8, beacons=0, recent=2) for budget in (20, 28)]
    check([*few, SnapKV(budget=20, interval=8, window=9), SnapKV(budget=28, interval=8, window=9)], data)


def test_a_setting_with_few_queries_may_be_done_before_others_look_at_the_last_position():
    few = BeaconKV(budget=20, interval=8, beacons=0, recent=2)
    many = [BeaconKV(budget=20, interval=8, beacons=8, recent=recent) for recent in (8, 9, 10)]
    last = schedule(few, made_layer(150, group=1))[-1]
    check([few, *many], made_layer(last + 1, group=1))
