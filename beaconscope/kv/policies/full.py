"""The full cache: nothing is evicted. The ground truth for analysis, with BeaconKV's beacons as a shadow beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from beaconscope.kv.beacons import BeaconTracker
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, QueryBlock
from beaconscope.kv.policies.beacon import BeaconKV


class ShadowState(PolicyState):
    """Beacons chosen when BeaconKV would have fired, while every entry stays."""

    def __init__(self, shadow: BeaconKV, heads: HeadInfo) -> None:
        super().__init__(shadow)
        # The shadow's budget bounds nothing: no compression ever fires.
        self._fires_at = shadow.budget + shadow.interval
        self.capacity = None
        self._held = 0
        self.tracker = BeaconTracker(shadow.beacon_settings, heads)

    @property
    def room(self) -> int:
        """Tokens that may be fed before the shadow would compress."""
        return self._fires_at - self._held

    def observe(self, block: QueryBlock) -> None:
        total = block.query.shape[3]
        start = 0
        while start < total:
            # A prompt is compressed once, at its end; single tokens one by one.
            count = total if block.together else min(total - start, self.room)
            self.tracker.observe(block.query[:, :, :, start : start + count], block.first_position + start)
            start += count
            self._held += count
            if self._held >= self._fires_at:
                self.tracker.choose(block.first_position + start - 1)
                self._held = self._budget

    def keep(self, view: CacheView) -> Tensor:
        return torch.ones_like(view.positions, dtype=torch.bool)

    def select_rows(self, rows: Tensor) -> None:
        self.tracker.select_rows(rows)


class FullState(PolicyState):
    """Keeps everything and sees nothing."""

    def keep(self, view: CacheView) -> Tensor:
        return torch.ones_like(view.positions, dtype=torch.bool)


@dataclass(frozen=True)
class Full(Policy):
    """Keep every entry; with ``shadow``, follow the beacons that BeaconKV would have had."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "keeps every entry"
    source: ClassVar[str] = "the model's own cache"

    unused: ClassVar[frozenset[str]] = frozenset({"budget", "interval", "shadow"})

    shadow: BeaconKV | None = None

    @property
    def needs_queries(self) -> bool:
        return self.shadow is not None

    @property
    def needs_rotary(self) -> bool:
        return self.shadow is not None and self.shadow.needs_rotary

    @property
    def evicts(self) -> bool:
        return False

    @property
    def capacity(self) -> int | None:
        return None

    def params(self) -> dict[str, object]:
        """The settings of the shadow, where there is one, as plain values."""
        return {} if self.shadow is None else {"shadow": self.shadow.params()}

    def start(self, heads: HeadInfo) -> PolicyState:
        return FullState(self) if self.shadow is None else ShadowState(self.shadow, heads)
