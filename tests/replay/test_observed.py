"""Products that settings share are those that each would work out by itself."""

from __future__ import annotations

import torch

from beaconscope import BeaconKV
from beaconscope.kv.policies import CacheView, SnapKV
from beaconscope.replay.beacon_history import BeaconHistories
from beaconscope.replay.held import Held
from beaconscope.replay.observed import Observed, SharedLogits
from beaconscope.replay.simulate import schedule
from tests.replay.made import made_layer

NEWEST = 99


def some(count=30, seed=1, among=NEWEST + 1, newest=NEWEST):
    """Some entries, for each head its own, among the last so many positions."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.rand((2, among), generator=draw).argsort(dim=-1)[:, :count]
    return Held(order.sort(dim=-1).values[None] + NEWEST + 1 - among, newest)


def alone(data, query, held):
    key = data.entries(data.key, held.positions)
    return CacheView(key, key, held.positions, NEWEST).logits(data.scaling, (query, None))


def looked_up(shared, data, count, held):
    """What a setting finds that asks ``count`` queries; None where it has to multiply by itself."""
    out = torch.empty((1, 2, data.query.shape[2], count, held.size))
    return out if shared.look_up(out, held.positions, NEWEST) else None


def test_the_last_or_the_first_of_the_most_queries_with_the_entries_that_are_held():
    data = made_layer(120, group=3)

    def asked(position, count):
        assert (position, count) == (NEWEST, 7)
        return data.query[:, :, :, position + 1 - count : position + 1]

    # GIVEN settings that hold little of everything together, and nearly all of it
    for size, among in ((12, 20), (90, 100)):
        caches = [(count, some(size, seed, among)) for seed, count in enumerate((7, 3, 7, 5))]
        for last in (True, False):
            shared = SharedLogits(data, asked, last=last)
            for count, held in caches:
                shared.join(count, held)
            # WHEN each looks up what it asks
            for count, held in caches:
                query = asked(NEWEST, 7)[:, :, :, 7 - count if last else 0 :][:, :, :, :count]
                # THEN it finds its products with what it holds
                torch.testing.assert_close(looked_up(shared, data, count, held), alone(data, query, held))


def test_where_it_does_not_pay_a_setting_multiplies_by_itself():
    data = made_layer(120, group=3)
    shared = SharedLogits(data, lambda position, count: data.query[:, :, :, :count], last=True)
    shared.join(7, some())
    assert looked_up(shared, data, 7, some()) is None
    # Nor does another that compresses elsewhere help.
    shared = SharedLogits(data, lambda position, count: data.query[:, :, :, :count], last=True)
    shared.join(7, some())
    shared.join(7, some(newest=NEWEST + 8))
    assert looked_up(shared, data, 7, some()) is None


def joined(settings, data):
    """For each setting, what it finds of the recent queries' products and of the beacons' at NEWEST."""
    known = []
    for policy in settings:
        fired = schedule(policy, data)
        known.append((policy, fired, some(newest=min(each for each in fired if each >= NEWEST))))
    observed = Observed(
        data, BeaconHistories(data, [(policy, fired) for policy, fired, _ in known if isinstance(policy, BeaconKV)])
    )
    found = [observed.join(policy, held) for policy, _, held in known]
    return [
        {name: looked_up(each, data, 8, held) is not None for name, each in shared.items()}
        for shared, (_, _, held) in zip(found, known, strict=True)
    ]


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
