"""What many settings observe with at one position, multiplied with the keys once for all of them.

BeaconKV and SnapKV settings that compress at the same position ask the same recent queries, and settings that choose
beacons alike the same beacons: a setting of smaller R or K asks some of those of a larger one. What each needs, the
products with the keys that it still holds, is gathered from the products with all keys that one of them holds. A
product of a query and a key comes out the same in both; the tests hold that a setting keeps together with others what
it keeps alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from beaconscope.kv.beacons import BeaconSettings
from beaconscope.kv.policies import SnapKV
from beaconscope.kv.policies.base import Observers
from beaconscope.kv.policies.beacon import BeaconKV
from beaconscope.replay.beacon_history import BeaconHistories, shared_choice
from beaconscope.replay.held import Held, Union, unite
from beaconscope.replay.layer import LayerData

_WORTH = 1.5
"""Products that settings would work out by themselves, over those that they share, from which sharing saves time."""
LEAST_ROWS = 8
"""Fewer queries at once are multiplied by other routines, which round otherwise."""


class _Member(NamedTuple):
    """A setting that asks some of a series of queries."""

    queries: int
    """How many it asks when it compresses."""
    held: Held


class SharedLogits:
    """Products of a series of observation queries with the keys that settings hold, one position at a time.

    Parameters
    ----------
    data
        The layer.
    queries
        The queries asked at a position, at most so many: [1, H, G, Q, D].
    last
        A setting that asks fewer asks the last of them, otherwise the first.
    """

    def __init__(self, data: LayerData, queries: Callable[[int, int], Tensor], *, last: bool) -> None:
        self._data = data
        self._queries = queries
        self._last = last
        self._members: list[_Member] = []
        self._position = -1
        self._union = Union(torch.empty((1, 0, 0), dtype=torch.int64), None)
        self._logits: Tensor | None = None

    def join(self, queries: int, held: Held) -> None:
        """Take in a setting that asks so many queries; all join before one compresses."""
        self._members.append(_Member(queries, held))

    def look_up(self, out: Tensor, positions: Tensor, newest: int) -> bool:
        """Write the scaled products of queries asked at ``newest`` with the keys at ``positions`` to ``out``.

        Parameters
        ----------
        out
            float32 [1, H, G, q, N], for the last or the first q queries.
        positions
            int64 [1, H, N].
        newest
            The position.

        Returns
        -------
        bool
            False, and nothing is written, where a setting had better multiply by itself.
        """
        if newest != self._position:
            self._position = newest
            self._logits = self._multiplied(newest)
        if self._logits is None:
            return False
        count, most = out.shape[3], self._logits.shape[3]
        first = most - count if self._last else 0
        index = self._union.columns(positions)[:, :, None, None].expand(out.shape)
        torch.gather(self._logits[:, :, :, first : first + count], 4, index, out=out)
        return True

    def _multiplied(self, newest: int) -> Tensor | None:
        """Scaled products with all that is held by who compresses now, [1, H, G, Q, U]; None where that costs more."""
        # One that has compressed here already, and could do without, is at a later position by now.
        due = [each for each in self._members if each.held.newest == newest]
        alone = sum(each.queries * each.held.size for each in due)
        most = max(each.queries for each in due)
        if len(due) < 2 or alone <= _WORTH * most * max(each.held.size for each in due):
            return None
        self._union = unite([each.held for each in due], newest + 1)
        if alone <= _WORTH * most * self._union.size:
            return None
        query = self._queries(newest, most) * self._data.scaling
        _, h, g, q, d = query.shape
        key = self._data.key[:, :, : newest + 1]
        if self._union.column is not None:
            key = self._data.entries(self._data.key, self._union.positions)
        return (query.reshape(1, h, g * q, d) @ key.transpose(-1, -2)).view(1, h, g, q, -1)


class Observed:
    """The shared products of the settings of a layer.

    Parameters
    ----------
    data
        The layer.
    histories
        The beacons of the settings.
    """

    def __init__(self, data: LayerData, histories: BeaconHistories) -> None:
        self._data = data
        self._histories = histories
        self._recent = SharedLogits(data, self._newest, last=True)
        self._beacons: dict[BeaconSettings, SharedLogits] = {}

    def join(self, policy: BeaconKV | SnapKV, held: Held) -> dict[Observers, SharedLogits]:
        """What a setting with the entries ``held`` may look up when it compresses; all join before one does."""
        recent = policy.recent if isinstance(policy, BeaconKV) else policy.window
        self._recent.join(recent, held)
        found: dict[Observers, SharedLogits] = {"recent": self._recent}
        if isinstance(policy, BeaconKV) and _asks_shared_beacons(policy):
            choice = shared_choice(policy.beacon_settings)
            if choice not in self._beacons:
                self._beacons[choice] = SharedLogits(self._data, functools.partial(self._chosen, choice), last=False)
            self._beacons[choice].join(policy.beacons, held)
            found["beacons"] = self._beacons[choice]
        return found

    def _newest(self, position: int, count: int) -> Tensor:
        return self._data.query[:, :, :, max(0, position + 1 - count) : position + 1]

    def _chosen(self, choice: BeaconSettings, position: int, count: int) -> Tensor:
        return self._histories.rotated(choice, position)[:, :, :, :count]


def _asks_shared_beacons(policy: BeaconKV) -> bool:
    settings = policy.beacon_settings
    return settings.count > 0 and settings.selector != "none" and policy.beacon_rotation == "current"
