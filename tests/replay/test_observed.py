"""What settings share is what each would work out by itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from beaconscope import BeaconKV
from beaconscope.attention.spec import AttentionSpec
from beaconscope.kv.policies import CacheView, SnapKV
from beaconscope.replay.beacon_history import BeaconHistories
from beaconscope.replay.held import Held
from beaconscope.replay.observed import Observed
from beaconscope.replay.simulate import schedule
from tests.replay.made import made_layer

NEWEST, FRESH = 99, 8


def some(count=30, seed=1, among=NEWEST + 1, newest=NEWEST):
    """The newest entries, and for each head its own others of the last so many positions."""
    draw = torch.Generator().manual_seed(seed)
    older = torch.rand((2, among - FRESH), generator=draw).argsort(dim=-1)[:, : count - FRESH].sort(dim=-1).values
    positions = torch.cat([older + NEWEST + 1 - among, torch.arange(NEWEST + 1 - FRESH, NEWEST + 1).expand(2, -1)], 1)
    return Held(positions[None], newest, FRESH)


def alone(data, query, held):
    key = data.entries(data.key, held.positions)
    view = CacheView(key, key, held.positions, NEWEST)
    return {
        "logits": view.logits(data.spec.scaling, (query, None)),
        "exponentials": view.exponentials(data.spec.scaling, (query, None)),
    }


def looked_up(rows, data, count, held):
    """What a setting finds that asks ``count`` queries."""
    assert rows.known(NEWEST)
    found = {}
    for name in ("logits", "exponentials"):
        found[name] = torch.empty((1, 2, data.query.shape[2], count, held.size))
        getattr(rows, name)(found[name], rows.columns(held.positions))
    return found


@pytest.mark.parametrize("times", [1, 12])
@pytest.mark.parametrize(("size", "among"), [(12, 20), (90, 100)], ids=["little", "nearly all"])
def test_the_last_or_the_first_of_the_most_queries_with_the_entries_that_are_held(size, among, times):
    # GIVEN settings that hold little of everything together, or nearly all of it
    data = made_layer(120, prompt=20, group=3)
    data = dataclasses.replace(data, spec=AttentionSpec(data.spec.scaling * times))
    many = [
        BeaconKV(budget=52, interval=8, beacons=beacons, recent=recent)
        for beacons, recent in ((8, 7), (3, 5), (8, 3), (5, 7))
    ]
    histories = BeaconHistories(data, [(policy, schedule(policy, data)) for policy in many])
    observed = Observed(data, histories)
    caches = [some(size, seed, among) for seed in range(len(many))]
    shared = [observed.join(policy, held) for policy, held in zip(many, caches, strict=True)]
    # WHEN each looks up what it asks
    for policy, held, rows in zip(many, caches, shared, strict=True):
        tracker = histories.tracker(policy)
        queries = {
            "recent": data.query[:, :, :, NEWEST + 1 - policy.recent : NEWEST + 1],
            "beacons": tracker.rotated(tracker.choose(NEWEST), NEWEST, "current"),
        }
        for observers, query in queries.items():
            found = looked_up(rows[observers], data, query.shape[3], held)
            # THEN it finds what it would find by itself
            for name, expected in alone(data, query, held).items():
                torch.testing.assert_close(found[name], expected)
    unsettled = observed.exponentials[1]
    assert (unsettled is None) if times == 1 else bool(unsettled.any() and not unsettled.all())


def joined(settings, data):
    """For each setting, whether the rows of its recent queries and of its beacons are known at NEWEST."""
    known = []
    for policy in settings:
        fired = schedule(policy, data)
        known.append((policy, fired, some(newest=min(each for each in fired if each >= NEWEST))))
    observed = Observed(
        data, BeaconHistories(data, [(policy, fired) for policy, fired, _ in known if isinstance(policy, BeaconKV)])
    )
    found = [observed.join(policy, held) for policy, _, held in known]
    return [{name: each.known(NEWEST) for name, each in shared.items()} for shared in found]


def test_what_settings_share_that_compress_together():
    data = made_layer(120, prompt=20)
    many = [BeaconKV(budget=52, interval=8, beacons=8, recent=8, sinks=sinks) for sinks in range(4)]
    assert NEWEST in schedule(many[0], data)
    assert joined(many, data) == [{"recent": True, "beacons": True}] * 4
    assert joined(many[:1], data) == [{"recent": False, "beacons": False}]
    # Beacons at their own positions are nobody else's, those of another pool are other beacons.
    own = BeaconKV(budget=52, interval=8, beacons=8, recent=8, beacon_rotation="own")
    other = BeaconKV(budget=52, interval=8, beacons=8, recent=8, pool_low=40)
    snapkv = SnapKV(budget=52, interval=8, window=8)
    found = joined([own, other, snapkv, *many], data)
    assert found[:3] == [{"recent": True}, {"recent": True, "beacons": False}, {"recent": True}]


def test_settings_of_other_intervals_share_nothing():
    data = made_layer(120, prompt=20)
    many = [BeaconKV(budget=52, interval=interval, beacons=8, recent=8) for interval in (8, 9, 11, 13)]
    assert joined(many, data)[0] == {"recent": False, "beacons": False}
