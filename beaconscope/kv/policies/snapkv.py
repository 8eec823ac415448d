"""SnapKV: what the last queries look for (Li et al., arXiv 2404.14469, section 4).

1. The last w queries attend to all cached entries, each with its own rotation and causally.
2. The score of an entry before the window is the sum of these weights for each query head, pooled over 5 neighbours,
   then the mean over the group.
3. The last w entries stay, then the highest scores, up to B. While decoding this happens every I tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.functional import pad

from beaconscope.errors import UsageError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState
from beaconscope.kv.policies.pooling import pool_neighbours
from beaconscope.kv.policies.recent import ObservingState


class SnapKVState(ObservingState):
    """The last queries."""

    causal = True

    def __init__(self, policy: SnapKV, heads: HeadInfo) -> None:
        super().__init__(policy, heads, policy.window)
        self._policy = policy

    @property
    def plain(self) -> bool:
        return self._heads.softcap is None and self._heads.sink_logit is None

    def attention(self, queries: Sequence[Tensor], view: CacheView) -> Tensor:
        return self._attention(view)

    def scores(self, weight: Tensor) -> Tensor:
        policy, size = self._policy, weight.shape[-1]
        window = min(policy.window, size)
        total = weight.sum(dim=3)[..., : size - window]  # [R, H, G, N - w]
        score = pool_neighbours(total, policy.kernel, policy.pooling).mean(dim=2)
        return pad(score, (0, window))

    def protected(self, view: CacheView) -> Tensor:
        return view.positions > view.newest - self._policy.window


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
