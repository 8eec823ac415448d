"""SnapKV: what the last queries look for (Li et al., arXiv 2404.14469, section 4).

1. The last w queries attend to all cached entries, each with its own rotation and causally.
2. The score of an entry before the window is the sum of these weights for each query head, pooled over 5 neighbours,
   then the mean over the group.
3. The last w entries stay, then the highest scores, up to B. While decoding this happens every I tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.functional import pad

from beaconscope.errors import UsageError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, keep_highest
from beaconscope.kv.policies.pooling import pool_neighbours
from beaconscope.kv.policies.recent import RecentQueriesState


class SnapKVState(RecentQueriesState):
    """The last queries."""

    def __init__(self, policy: SnapKV, heads: HeadInfo) -> None:
        super().__init__(policy, heads, policy.window)
        self._policy = policy

    def keep(self, view: CacheView) -> Tensor:
        policy = self._policy
        window = min(policy.window, view.size)
        total = self._attention(view).sum(dim=3)[..., : view.size - window]  # [R, H, G, N - w]
        score = pool_neighbours(total, policy.kernel, policy.pooling).mean(dim=2)
        recent = view.positions > view.newest - policy.window
        return keep_highest(pad(score, (0, window)), recent, policy.budget, self._heads.shared)


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keep the last ``window`` entries and what their queries attend to."""

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "keeps a window and what its queries attend to, pooled over neighbours"
    source: ClassVar[str] = "Li et al. 2024, arXiv 2404.14469"

    interval: int = 128
    window: int = 32
    """w, most recent queries that score, and most recent entries that always stay."""
    kernel: int = 5
    """Neighbours that are pooled, an odd number."""
    pooling: Literal["mean", "max"] = "mean"
    """How neighbours are pooled."""

    def __post_init__(self) -> None:
        self._check_least(window=1, kernel=1)
        if self.kernel % 2 == 0:
            raise UsageError(f"kernel is {self.kernel}; give an odd number")
        if self.pooling not in ("mean", "max"):
            raise UsageError(f"pooling is {self.pooling!r}; give one of mean, max")
        super().__post_init__()

    @property
    def needs_queries(self) -> bool:
        return True

    @property
    def protected(self) -> int:
        return self.window

    def start(self, heads: HeadInfo) -> PolicyState:
        return SnapKVState(self, heads)
