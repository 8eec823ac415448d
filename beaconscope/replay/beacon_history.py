"""The beacons of many BeaconKV settings, chosen once for all that choose them alike.

Which queries are in a pool depends on its two sizes and on nothing that a cache keeps, and farthest-point sampling is
greedy: K beacons are the first K of any larger choice from the same pool. So settings that share selector, query space,
pool and seed share one history, which chooses at every position where one of them compresses. A reservoir and running
centroids depend on K too, so that there only settings of the same K share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from beaconscope.kv.beacons import BeaconSet, BeaconSettings, BeaconTracker, Rotation
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.beacon import BeaconKV
from beaconscope.replay.layer import LayerData


class _History:
    """What was chosen at each position."""

    def __init__(self, tracker: BeaconTracker, chosen: dict[int, BeaconSet]) -> None:
        self._tracker = tracker
        self._rotated: dict[int, Tensor] = {}
        self.chosen = chosen

    def rotated(self, position: int) -> Tensor:
        """The same as post-RoPE queries asked at that position, [1, H, G, K, D]."""
        if position not in self._rotated:
            self._rotated[position] = self._tracker.rotated(self.chosen[position], position, "current")
        return self._rotated[position]


class _KnownBeacons(BeaconTracker):
    """A tracker that looks up what its history chose."""

    def __init__(self, settings: BeaconSettings, heads: HeadInfo, history: _History) -> None:
        super().__init__(dataclasses.replace(settings, selector="none"), heads)
        self._count = settings.count
        self._history = history

    def observe(self, query: Tensor, first_position: int) -> None:
        """The history has seen every query."""

    def choose(self, position: int) -> BeaconSet | None:
        chosen = self._history.chosen[position]
        return BeaconSet(chosen.vector[:, :, :, : self._count], chosen.source[:, :, :, : self._count])

    def rotated(self, beacons: BeaconSet, position: int, rotation: Rotation) -> Tensor:
        if rotation == "own":
            return super().rotated(beacons, position, rotation)
        return self._history.rotated(position)[:, :, :, : self._count]


class BeaconHistories:
    """The beacons of settings of one layer, by how they are chosen.

    Parameters
    ----------
    data
        The layer.
    settings
        Each with the positions at which it compresses.
    """

    def __init__(self, data: LayerData, settings: Sequence[tuple[BeaconKV, Sequence[int]]]) -> None:
        self._data = data
        self._heads = data.heads()
        self._waiting: dict[BeaconSettings, tuple[int, set[int]]] = {}
        for policy, fired in settings:
            ways = policy.beacon_settings
            if ways.count == 0 or ways.selector == "none":
                continue
            most, positions = self._waiting.get(shared_choice(ways), (0, set()))
            self._waiting[shared_choice(ways)] = (max(most, ways.count), positions | set(fired))
        self._known: dict[BeaconSettings, _History] = {}

    def tracker(self, policy: BeaconKV) -> BeaconTracker:
        """A tracker for one of the settings."""
        ways = policy.beacon_settings
        if ways.count == 0 or ways.selector == "none":
            return BeaconTracker(ways, self._heads)
        return _KnownBeacons(ways, self._heads, self._history(shared_choice(ways)))

    def rotated(self, choice: BeaconSettings, position: int) -> Tensor:
        """Beacons as queries asked at a position where settings that share ``choice`` compress, [1, H, G, K, D].

        K is the most that one of them keeps.
        """
        return self._history(choice).rotated(position)

    def _history(self, choice: BeaconSettings) -> _History:
        if choice not in self._known:
            self._known[choice] = self._follow(choice, *self._waiting[choice])
        return self._known[choice]

    def _follow(self, way: BeaconSettings, count: int, fired: set[int]) -> _History:
        """The ``count`` beacons chosen at each of the positions ``fired``."""
        tracker = BeaconTracker(dataclasses.replace(way, count=count), self._heads)
        chosen: dict[int, BeaconSet] = {}
        start = 0
        for position in sorted(fired):
            tracker.observe(self._data.query[:, :, :, start : position + 1], start)
            found = tracker.choose(position)
            assert found is not None
            chosen[position] = BeaconSet(found.vector.clone(), found.source.clone())
            start = position + 1
        return _History(tracker, chosen)


def shared_choice(settings: BeaconSettings) -> BeaconSettings:
    """What settings have in common that choose beacons alike, so that they share a history."""
    if settings.selector == "fps":
        return dataclasses.replace(settings, count=0, seed=0)
    if settings.selector == "kmeans":
        return dataclasses.replace(settings, pool_low=0, pool_high=0, seed=0)
    return dataclasses.replace(settings, pool_low=0, pool_high=0)
