"""Random eviction: the control that any policy has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from beaconscope.errors import UsageError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, keep_highest


class RandomEvictionState(PolicyState):
    """One stream of random numbers for each KV head, so that a head draws the same whichever heads are at hand."""

    def __init__(self, policy: RandomEviction, heads: HeadInfo) -> None:
        super().__init__(policy)
        self._policy = policy
        self._heads = heads
        self._streams = [np.random.default_rng([policy.seed, heads.layer, head]) for head in heads.kv_heads]

    def keep(self, view: CacheView) -> Tensor:
        drawn = np.stack([stream.random(view.size, dtype=np.float32) for stream in self._streams])  # [H, N]
        scores = torch.from_numpy(drawn).to(view.positions.device).expand(view.positions.shape).contiguous()
        protected = view.positions > view.newest - self._policy.recent
        return keep_highest(scores, protected, self._policy.budget, self._heads.shared)


@dataclass(frozen=True)
class RandomEviction(Policy):
    """Keep the last ``recent`` entries, and of the others a uniform choice for each KV head."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "keeps the most recent entries and a random choice of the others"
    source: ClassVar[str] = "control"

    interval: int = 128
    recent: int = 16
    """Most recent entries that always stay."""
    seed: int = 0
    """Of the draws; each KV head has a stream of its own."""

    def __post_init__(self) -> None:
        if self.recent < 0:
            raise UsageError(f"recent is {self.recent}; give 0 or more")
        if self.seed < 0:
            raise UsageError(f"seed is {self.seed}; give 0 or more")
        super().__post_init__()

    @property
    def protected(self) -> int:
        return self.recent

    def start(self, heads: HeadInfo) -> PolicyState:
        return RandomEvictionState(self, heads)
