"""What many settings observe with at one position, multiplied with the keys once for all of them.

BeaconKV and SnapKV settings that compress at the same position ask the same recent queries, and settings that choose
beacons alike the same beacons: a setting of smaller R or K asks some of those of a larger one. What each needs, the
products with the keys that it still holds, is gathered from the products with all keys so far. A product of a query and
a key comes out the same in both; the tests hold that a setting keeps together with others what it keeps alone.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from beaconscope.kv.beacons import BeaconSettings
from beaconscope.kv.policies import Policy, SnapKV
from beaconscope.kv.policies.base import Observers
from beaconscope.kv.policies.beacon import BeaconKV
from beaconscope.replay.beacon_history import BeaconHistories, shared_choice
from beaconscope.replay.layer import LayerData

_WORTH = 1.5
"""Products that settings would work out by themselves, over those with all keys, from which sharing saves time."""
_LEAST_ROWS = 8
"""Fewer queries at once are multiplied by other routines, which round otherwise."""


class SharedProducts:
    """Products of a series of observation queries with every key up to a position, one position at a time.

    Parameters
    ----------
    data
        The layer.
    queries
        The queries asked at a position, at most so many: [1, H, G, Q, D].
    most
        For each position where sharing pays, the most queries that a setting asks there.
    last
        A setting that asks fewer asks the last of them, otherwise the first.
    """

    def __init__(
        self, data: LayerData, queries: Callable[[int, int], Tensor], most: dict[int, int], *, last: bool
    ) -> None:
        self._data = data
        self._queries = queries
        self._most = most
        self._last = last
        self._position = -1
        self._products = torch.empty(0)

    def held(self, count: int, positions: Tensor, newest: int) -> Tensor | None:
        """Products of ``count`` queries asked at ``newest`` with the keys at ``positions``, int64 [1, H, N].

        Returns
        -------
        Tensor or None
            float32 [1, H, G, count, N]; None where a setting had better multiply by itself.
        """
        group = self._data.query.shape[2]
        if newest not in self._most or group * count < _LEAST_ROWS:
            return None
        if newest != self._position:
            query = self._queries(newest, self._most[newest])
            _, h, g, q, d = query.shape
            keys = self._data.key[:, :, : newest + 1]
            self._products = (query.reshape(1, h, g * q, d) @ keys.transpose(-1, -2)).view(1, h, g, q, -1)
            self._position = newest
        most = self._products.shape[3]
        first = most - count if self._last else 0
        index = positions[:, :, None, None].expand(-1, -1, group, count, -1)
        return self._products[:, :, :, first : first + count].gather(4, index)


class Observed:
    """The shared products of the settings of a layer.

    Parameters
    ----------
    data
        The layer.
    histories
        The beacons of the settings.
    settings
        Those that keep their budget, each with the positions at which it compresses.
    """

    def __init__(
        self, data: LayerData, histories: BeaconHistories, settings: Sequence[tuple[Policy, Sequence[int]]]
    ) -> None:
        recent: list[tuple[int, int, Sequence[int]]] = []
        beacons: dict[BeaconSettings, list[tuple[int, int, Sequence[int]]]] = defaultdict(list)
        for policy, fired in settings:
            assert policy.capacity is not None
            if isinstance(policy, BeaconKV):
                recent.append((policy.recent, policy.capacity, fired))
                if _asks_shared_beacons(policy):
                    beacons[shared_choice(policy.beacon_settings)].append((policy.beacons, policy.capacity, fired))
            elif isinstance(policy, SnapKV):
                recent.append((policy.window, policy.capacity, fired))

        def newest(position: int, count: int) -> Tensor:
            return data.query[:, :, :, max(0, position + 1 - count) : position + 1]

        def chosen(choice: BeaconSettings, position: int, count: int) -> Tensor:
            return histories.rotated(choice, position)[:, :, :, :count]

        self._recent = SharedProducts(data, newest, _where_it_pays(recent), last=True)
        self._beacons = {
            choice: SharedProducts(data, functools.partial(chosen, choice), _where_it_pays(asked), last=False)
            for choice, asked in beacons.items()
        }

    def of(self, policy: Policy) -> dict[Observers, SharedProducts]:
        """What a setting may look up."""
        found: dict[Observers, SharedProducts] = {"recent": self._recent}
        if isinstance(policy, BeaconKV) and _asks_shared_beacons(policy):
            found["beacons"] = self._beacons[shared_choice(policy.beacon_settings)]
        return found


def _asks_shared_beacons(policy: BeaconKV) -> bool:
    settings = policy.beacon_settings
    return settings.count > 0 and settings.selector != "none" and policy.beacon_rotation == "current"


def _where_it_pays(asked: Sequence[tuple[int, int, Sequence[int]]]) -> dict[int, int]:
    """Positions where products with all keys are fewer than what settings would work out alone, with the most queries.

    ``asked`` has, for each setting, its queries, the entries that it holds when it compresses, and where it does.
    """
    alone: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    for count, capacity, fired in asked:
        for position in fired:
            alone[position] += count * min(capacity, position + 1)
            most[position] = max(most[position], count)
    return {
        position: most[position]
        for position, total in alone.items()
        if total > _WORTH * most[position] * (position + 1)
    }
