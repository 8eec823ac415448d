"""Which settings a sweep has."""

import pytest

from beaconscope import BeaconKV, UsageError
from beaconscope.kv.policies import Full, SnapKV
from beaconscope.replay.grid import default_lists, expand, never_full, recent_only, split_policies


def test_every_combination_of_what_a_policy_has():
    found = expand(["beacon", "snapkv"], {"budget": [64, 96], "beacons": [4, 8]})
    assert found == [
        *(BeaconKV(budget=budget, beacons=count) for budget in (64, 96) for count in (4, 8)),
        SnapKV(budget=64),
        SnapKV(budget=96),
    ]


def test_what_a_policy_gives_itself_is_not_varied():
    assert expand(["beacon:budget=100"], {"beacons": [4, 8]}) == [
        BeaconKV(budget=100, beacons=4),
        BeaconKV(budget=100, beacons=8),
    ]


def test_without_beacons_it_does_not_matter_how_they_are_chosen():
    lists = {"beacons": [0, 8], "selector": ["fps", "random"], "query_space": ["pre-rope", "post-rope"]}
    found = expand(["beacon"], lists)
    assert len(found) == 5
    assert [each for each in found if not each.beacons] == [BeaconKV(beacons=0)]
    assert recent_only(BeaconKV(selector="random", seed=3)) == recent_only(BeaconKV())


def test_a_list_that_nothing_has_is_refused():
    with pytest.raises(UsageError, match="--window has no effect with beacon"):
        expand(["beacon"], {"window": [8]})


def test_policies_are_split_at_the_commas_between_them():
    assert split_policies("beacon,snapkv:window=64,kernel=7,random") == [
        "beacon",
        "snapkv:window=64,kernel=7",
        "random",
    ]


@pytest.mark.parametrize(
    ("length", "budgets", "interval"),
    [
        (66, [40], [4]),
        (360, [40, 88], [5]),
        (1000, [56, 120, 128], [15]),
        (2047, [120, 128, 384], [31]),
        (16_000, [896, 1920, 3968], None),
    ],
)
def test_default_budgets_are_parts_of_the_trace_rounded_down(length, budgets, interval):
    assert default_lists(length) == {"budget": budgets} | ({} if interval is None else {"interval": interval})


def test_settings_that_never_fill_are_named():
    settings = [Full(), BeaconKV(budget=256, interval=128), BeaconKV(budget=512, interval=128)]
    assert never_full(settings, 479) == (
        "Within 479 tokens beacon:budget=512 never fills and keeps everything; give a smaller --budget or --interval."
    )
    # One that fills with the last token has dropped nothing that anything looked at.
    assert never_full(settings[:2], 384) != "" == never_full(settings[:2], 385)
    many = [SnapKV(budget=1000 + number) for number in range(5)]
    assert "snapkv:budget=1002 and 2 more never fill and keep everything" in never_full(many, 479)
