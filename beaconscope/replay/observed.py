"""What many settings observe with at one position, multiplied with the keys once for all of them.

BeaconKV and SnapKV settings that compress at the same position ask the same recent queries, and settings that choose
beacons alike the same beacons: a setting of smaller R or K asks some of those of a larger one. What each needs, the
products with the keys that it still holds, is gathered from the products with all keys that one of them holds. A
product of a query and a key comes out the same in both; the tests hold that a setting keeps together with others what
it keeps alone.

The exponentials of a softmax are shared too, except in rows where a setting that holds less might subtract another
shift (:mod:`beaconscope.attention.shifted_softmax`). Every setting holds the newest entries, those since its last
compression; where one of these determines the shift, it is the same for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from beaconscope.attention.shifted_softmax import exponentials, shift_differs
from beaconscope.attention.weights import scaled_products
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


class SharedRows:
    """Rows of a series of observation queries: what each finds in all that settings hold.

    Parameters
    ----------
    observed
        What works them out.
    queries
        The queries asked at a position, at most so many: [1, H, G, Q, D].
    last
        A setting that asks fewer asks the last of them, otherwise the first.
    """

    def __init__(self, observed: Observed, queries: Callable[[int, int], Tensor], *, last: bool) -> None:
        self._observed = observed
        self._last = last
        self._members: list[tuple[int, Held]] = []
        self.queries = queries
        self.place: range | None = None
        """Of its queries among all whose rows are known; None where a setting had better work them out by itself."""

    def join(self, queries: int, held: Held) -> None:
        """Take in a setting that asks so many queries when it compresses; all join before one compresses."""
        self._members.append((queries, held))

    def due(self, newest: int) -> list[tuple[int, Held]]:
        """The settings that compress at a position: how many queries they ask, and what they hold."""
        # One that has compressed here already, and could do without, holds nothing that is new, or is farther on.
        return [each for each in self._members if each[1].newest == newest and each[1].fresh]

    def known(self, newest: int) -> bool:
        """Whether the rows of the queries asked at a position are known."""
        self._observed.go_to(newest)
        return self.place is not None

    def columns(self, positions: Tensor) -> Tensor:
        """Where in the rows the entries of a setting are, from their positions; both int64 [1, H, N]."""
        return self._observed.union.columns(positions)

    def logits(self, out: Tensor, column: Tensor) -> None:
        """Write scaled products to ``out``, float32 [1, H, G, q, N], for the last or the first q queries."""
        torch.gather(self._asked(self._observed.logits, out), 4, _each_row(column, out), out=out)

    def exponentials(self, out: Tensor, column: Tensor) -> None:
        """Write the :func:`~beaconscope.attention.shifted_softmax.exponentials` of what :meth:`logits` writes."""
        index = _each_row(column, out)
        shared, unsettled = self._observed.exponentials
        torch.gather(self._asked(shared, out), 4, index, out=out)
        if unsettled is not None:
            row = self._asked(unsettled, out).nonzero(as_tuple=True)
            out[row] = exponentials(self._asked(self._observed.logits, out)[row].gather(1, index[row]))

    def _asked(self, rows: Tensor, out: Tensor) -> Tensor:
        """Of rows for everything that is asked, those for the q queries that ``out`` is for, [1, H, G, q, ...]."""
        assert self.place is not None
        count = out.shape[3]
        return rows.narrow(3, self.place.stop - count if self._last else self.place.start, count)


def _each_row(column: Tensor, out: Tensor) -> Tensor:
    """Columns [1, H, N] for every row of ``out``, [1, H, G, q, N]."""
    return column[:, :, None, None].expand(out.shape)


class Observed:
    """What the settings of a layer observe with, multiplied with what they hold at one position after the other.

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
        self._recent = SharedRows(self, self._newest, last=True)
        self._beacons: dict[BeaconSettings, SharedRows] = {}
        self._position = -1
        self._exponentials: tuple[Tensor, Tensor | None] | None = None
        self._in_all = torch.empty(0)  # int64 [1, H, n], the newest positions, which all of these settings hold
        self.union = Union(torch.empty((1, 0, 0), dtype=torch.int64), None)
        """What is held by the settings that compress at the position."""
        self.logits = torch.empty(0)
        """Scaled products of all that is asked with the keys of these entries, [1, H, G, Q, U]."""

    def join(self, policy: BeaconKV | SnapKV, held: Held) -> dict[Observers, SharedRows]:
        """What a setting with the entries ``held`` may look up when it compresses; all join before one does."""
        recent = policy.recent if isinstance(policy, BeaconKV) else policy.window
        self._recent.join(recent, held)
        found: dict[Observers, SharedRows] = {"recent": self._recent}
        if isinstance(policy, BeaconKV) and _asks_shared_beacons(policy):
            choice = shared_choice(policy.beacon_settings)
            if choice not in self._beacons:
                self._beacons[choice] = SharedRows(self, functools.partial(self._chosen, choice), last=False)
            self._beacons[choice].join(policy.beacons, held)
            found["beacons"] = self._beacons[choice]
        return found

    @property
    def exponentials(self) -> tuple[Tensor, Tensor | None]:
        """Those of the logits, and which rows may be others for a setting alone, bool [1, H, G, Q]; None for none."""
        if self._exponentials is None:
            shared = exponentials(self.logits)
            column = self.union.columns(self._in_all)[:, :, None, None].expand(*shared.shape[:4], -1)
            unsettled = shift_differs(shared.gather(4, column))
            self._exponentials = shared, unsettled if bool(unsettled.any()) else None
        return self._exponentials

    def go_to(self, newest: int) -> None:
        """Multiply, where it pays, what is asked and held by the settings that compress at a position."""
        if newest == self._position:
            return
        self._position, self._exponentials = newest, None
        every = [self._recent, *self._beacons.values()]
        asking = {series: due for series in every if len(due := series.due(newest)) > 1}
        held = list({id(each): each for due in asking.values() for _, each in due}.values())
        if held:
            self.union = unite(held, newest + 1)
        asked: list[Tensor] = []
        known = 0
        for series in every:
            series.place = None
            due = asking.get(series, [])
            most = max((queries for queries, _ in due), default=0)
            if sum(queries * each.size for queries, each in due) > _WORTH * most * self.union.size:
                asked.append(series.queries(newest, most))
                series.place = range(known, known := known + asked[-1].shape[3])
        if not asked:
            return
        key = self._data.key[:, :, : newest + 1]
        if self.union.column is not None:
            key = self._data.entries(self._data.key, self.union.positions)
        self.logits = scaled_products(torch.cat(asked, dim=3), key, self._data.spec.scaling)
        fresh = min(each.fresh for each in held)
        in_all = torch.arange(newest + 1 - fresh, newest + 1, device=key.device)
        self._in_all = in_all.expand(1, len(self._data.kv_heads), fresh)

    def _newest(self, position: int, count: int) -> Tensor:
        return self._data.query[:, :, :, max(0, position + 1 - count) : position + 1]

    def _chosen(self, choice: BeaconSettings, position: int, count: int) -> Tensor:
        return self._histories.rotated(choice, position)[:, :, :, :count]


def _asks_shared_beacons(policy: BeaconKV) -> bool:
    settings = policy.beacon_settings
    return settings.count > 0 and settings.selector != "none" and policy.beacon_rotation == "current"
