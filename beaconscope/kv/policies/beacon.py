"""BeaconKV: keep what the most recent queries and a few beacon queries attend to (arXiv 2609.04971, section 4).

At a compression, for each KV head:

1. The observation set is the R most recent queries and K beacons of each of the G query heads; beacons are rotated to
   the current position, as if the revisit happened now.
2. Every observation query gives a softmax over all cached entries.
3. The score of an entry is the largest weight that any observation query of any query head of the group gives it.
4. The last R entries stay, then the highest scores, up to B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from beaconscope.attention.shifted_softmax import normalized
from beaconscope.errors import UsageError
from beaconscope.kv.beacons import BeaconSettings, BeaconTracker, QuerySpace, Rotation, Selector
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Observers, Policy, PolicyState, QueryBlock, keep_highest
from beaconscope.kv.policies.recent import RecentQueriesState

Pooling = Literal["max", "mean"]

MAX_BEACONS = 256


class BeaconKVState(RecentQueriesState):
    """The beacons and the most recent queries of one layer."""

    def __init__(self, policy: BeaconKV, heads: HeadInfo) -> None:
        super().__init__(policy, heads, policy.recent)
        self._policy = policy
        self.tracker = BeaconTracker(policy.beacon_settings, heads)

    def observe(self, block: QueryBlock) -> None:
        self.tracker.observe(block.query, block.first_position)
        super().observe(block)

    def keep(self, view: CacheView) -> Tensor:
        policy = self._policy
        asked: list[tuple[Tensor, Observers | None]] = [(self._recent, "recent")]
        beacons = self.tracker.choose(view.newest)
        if beacons is not None:
            rotated = self.tracker.rotated(beacons, view.newest, policy.beacon_rotation)
            asked.append((rotated, "beacons" if policy.beacon_rotation == "current" else None))
        scores = self._scores(normalized(view.exponentials(self._heads.spec.scaling, *asked)))
        protected = (view.positions > view.newest - policy.recent) | (view.positions < policy.sinks)
        return keep_highest(scores, protected, policy.budget, self._heads.shared)

    def _scores(self, weight: Tensor) -> Tensor:
        """Score of every entry, [R, H, N], from the weights of observation queries, [R, H, G, Q, N]."""
        queries, group = self._policy.query_pooling, self._policy.group_pooling
        if queries == group == "max":
            return weight.amax(dim=(2, 3))
        per_head = weight.amax(dim=3) if queries == "max" else weight.mean(dim=3)
        return per_head.amax(dim=2) if group == "max" else per_head.mean(dim=2)

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self.tracker.select_rows(rows)


@dataclass(frozen=True)
class BeaconKV(Policy):
    """Keep the last ``recent`` entries and what recent queries and beacons attend to most."""

    name: ClassVar[str] = "beacon"
    summary: ClassVar[str] = "keeps what the recent queries and a few beacon queries attend to most"
    source: ClassVar[str] = "BeaconKV, ICML 2026, arXiv 2609.04971"

    interval: int = 128
    beacons: int = 16
    """K, beacon queries per query head."""
    recent: int = 16
    """R, most recent queries that observe, and most recent entries that always stay."""
    sinks: int = 0
    """First positions that always stay; real sinks score high by themselves."""
    selector: Selector = "fps"
    """How beacons are chosen from past queries: farthest points, centroids, a random handful, or none at all."""
    query_space: QuerySpace = "pre-rope"
    """Where queries are compared with each other: before or after the rotary embedding."""
    beacon_rotation: Rotation = "current"
    """Position that beacons are rotated to when they observe: the current one, or that of the query they are from."""
    query_pooling: Pooling = "max"
    """Pooling of the weights over observation queries."""
    group_pooling: Pooling = "max"
    """Pooling over the query heads of a KV head."""
    pool_low: int | None = None
    """Queries left after a thinning of the pool; None is max(K, 32)."""
    pool_high: int | None = None
    """Queries at which the pool is thinned; None is ``pool_low`` + 128."""
    seed: int = 0
    """Of the selector ``random``."""

    def __post_init__(self) -> None:
        if not 0 <= self.beacons <= MAX_BEACONS:
            raise UsageError(f"beacons is {self.beacons}; give 0 to {MAX_BEACONS}")
        for name, low in (("recent", 0), ("sinks", 0), ("seed", 0)):
            if getattr(self, name) < low:
                raise UsageError(f"{name} is {getattr(self, name)}; give {low} or more")
        for name, choices in (
            ("selector", get_args(Selector)),
            ("query_space", get_args(QuerySpace)),
            ("beacon_rotation", get_args(Rotation)),
            ("query_pooling", get_args(Pooling)),
            ("group_pooling", get_args(Pooling)),
        ):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"{name.replace('_', '-')} is {getattr(self, name)!r}; give one of {', '.join(choices)}"
                )
        if self.recent == 0 and (self.beacons == 0 or self.selector == "none"):
            raise UsageError(
                "with neither recent queries nor beacons nothing observes; give --recent or --beacons at least 1"
            )
        if self.selector == "kmeans" and self.beacon_rotation == "own":
            raise UsageError("a k-means centroid has no position of its own; give --beacon-rotation current")
        settings = self.beacon_settings
        if settings.pool_low < max(self.beacons, 1):
            raise UsageError(
                f"a pool thinned to {settings.pool_low} does not hold {self.beacons} beacons; give --pool-low at least "
                f"{max(self.beacons, 1)}"
            )
        if settings.pool_high <= settings.pool_low:
            raise UsageError(
                f"pool-high is {settings.pool_high}, not over pool-low, {settings.pool_low}; give at least "
                f"{settings.pool_low + 1}"
            )
        super().__post_init__()

    @property
    def needs_queries(self) -> bool:
        return True

    @property
    def needs_rotary(self) -> bool:
        return self.query_space == "pre-rope"

    @property
    def protected(self) -> int:
        return self.recent + self.sinks

    @property
    def beacon_settings(self) -> BeaconSettings:
        """How the beacons are chosen, with the defaults of the pool filled in."""
        low = max(self.beacons, 32) if self.pool_low is None else self.pool_low
        return BeaconSettings(
            count=self.beacons,
            selector=self.selector,
            query_space=self.query_space,
            pool_low=low,
            pool_high=low + 128 if self.pool_high is None else self.pool_high,
            seed=self.seed,
        )

    def start(self, heads: HeadInfo) -> PolicyState:
        return BeaconKVState(self, heads)
