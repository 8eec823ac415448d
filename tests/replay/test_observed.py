"""Products that settings share are those that each would work out by itself."""

from __future__ import annotations

import torch

from beaconscope import BeaconKV
from beaconscope.kv.policies import CacheView, SnapKV
from beaconscope.replay.beacon_history import BeaconHistories
from beaconscope.replay.observed import Observed, SharedProducts
from beaconscope.replay.simulate import schedule
from tests.replay.made import made_layer

NEWEST = 99


def held(data, count=30):
    """Every third position or so, for each head its own."""
    draw = torch.Generator().manual_seed(1)
    order = torch.rand((2, NEWEST + 1), generator=draw).argsort(dim=-1)[:, :count]
    return order.sort(dim=-1).values[None]


def alone(data, query, positions):
    key = data.entries(data.key, positions)
    return CacheView(key, key, positions, NEWEST).products(query)


def test_the_last_or_the_first_of_the_most_queries_with_the_entries_that_are_held():
    data = made_layer(120, group=3)
    positions = held(data)

    def asked(position, count):
        assert (position, count) == (NEWEST, 7)
        return data.query[:, :, :, position + 1 - count : position + 1]

    for last in (True, False):
        shared = SharedProducts(data, asked, {NEWEST: 7}, last=last)
        for count in (3, 7):
            query = asked(NEWEST, 7)[:, :, :, 7 - count if last else 0 :][:, :, :, :count]
            torch.testing.assert_close(shared.held(count, positions, NEWEST), alone(data, query, positions))


def test_few_queries_and_positions_where_it_does_not_pay_are_left_to_the_setting():
    data = made_layer(120, group=3)
    shared = SharedProducts(data, lambda position, count: data.query[:, :, :, :count], {NEWEST: 7}, last=True)
    assert shared.held(2, held(data), NEWEST) is None
    assert shared.held(7, held(data), NEWEST - 1) is None


def looked_up(settings, data):
    """For each setting, what it finds of the recent queries' products and of the beacons' at NEWEST."""
    known = [(policy, schedule(policy, data)) for policy in settings]
    histories = BeaconHistories(data, [(policy, fired) for policy, fired in known if isinstance(policy, BeaconKV)])
    observed = Observed(data, histories, known)
    return [
        {name: products.held(8, held(data), NEWEST) is not None for name, products in observed.of(policy).items()}
        for policy in settings
    ]


def test_what_settings_share_that_compress_together():
    data = made_layer(120, prompt=20)
    many = [BeaconKV(budget=52, interval=8, beacons=8, recent=8, sinks=sinks) for sinks in range(4)]
    assert NEWEST in schedule(many[0], data)
    assert looked_up(many, data) == [{"recent": True, "beacons": True}] * 4
    # Alone it multiplies with what it holds, which is less than everything.
    assert looked_up(many[:1], data) == [{"recent": False, "beacons": False}]
    # Beacons at their own positions are nobody else's, those of another pool are other beacons.
    own = BeaconKV(budget=52, interval=8, beacons=8, recent=8, beacon_rotation="own")
    other = BeaconKV(budget=52, interval=8, beacons=8, recent=8, pool_low=40)
    snapkv = SnapKV(budget=52, interval=8, window=8)
    found = looked_up([own, other, snapkv, *many], data)
    assert found[:3] == [{"recent": True}, {"recent": True, "beacons": False}, {"recent": True}]


def test_settings_of_other_intervals_share_nothing():
    data = made_layer(120, prompt=20)
    many = [BeaconKV(budget=52, interval=interval, beacons=8, recent=8) for interval in (8, 9, 11, 13)]
    assert looked_up(many, data)[0] == {"recent": False, "beacons": False}
