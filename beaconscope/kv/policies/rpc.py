"""RPC, reasoning path compression: compress what was generated, every so often (Song et al., arXiv 2505.13866).

1. The prompt is never evicted. Every P generated tokens a compression fires.
2. The last R queries attend to the generated entries before the last R: a softmax over these alone.
3. The score is the sum over the R queries, mean over all query heads of the layer, then over 7 neighbours.
4. The k-th compression keeps the k * P / c highest scores and the last R entries, the same in every head of the layer.
   So the cache grows, P / c entries with every compression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from beaconscope.errors import UsageError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, keep_highest
from beaconscope.kv.policies.pooling import pool_neighbours
from beaconscope.kv.policies.recent import RecentQueriesState
from beaconscope.kv.step import scaled_products


class RPCState(RecentQueriesState):
    """The last queries, and how often it fired."""

    def __init__(self, policy: RPC, heads: HeadInfo) -> None:
        super().__init__(policy, heads, policy.recent)
        self.capacity = heads.prompt + policy.period
        self._policy = policy
        self._fired = 0

    def kept_size(self, size: int) -> int:
        return size - self._candidates(size) + self._chosen(size)

    def _candidates(self, size: int) -> int:
        """Entries that compete, of ``size``."""
        return size - self._heads.prompt - self._policy.recent

    def _chosen(self, size: int) -> int:
        """Entries that win at the next compression."""
        policy = self._policy
        return min((self._fired + 1) * policy.period // policy.ratio, self._candidates(size))

    def keep(self, view: CacheView) -> Tensor:
        # The prompt is whole and all heads hold the same, so that slots tell who competes.
        start, stop = self._heads.prompt, view.size - self._policy.recent
        logits = scaled_products(self._recent, view.key[:, :, start:stop], self._heads.scaling)
        weight = logits.softmax(dim=-1)  # [R, H, G, W, C]
        score = pool_neighbours(weight.sum(dim=3).mean(dim=(1, 2)), self._policy.kernel, "mean")  # [R, C]
        none = torch.zeros_like(score, dtype=torch.bool)
        kept = torch.ones_like(view.positions, dtype=torch.bool)
        kept[:, :, start:stop] = keep_highest(score, none, self._chosen(view.size))[:, None]
        self.capacity = self.kept_size(view.size) + self._policy.period
        self._fired += 1
        return kept


@dataclass(frozen=True)
class RPC(Policy):
    """Keep the prompt, and of what was generated a share and the last ``recent`` entries."""

    name: ClassVar[str] = "rpc"
    summary: ClassVar[str] = "keeps the prompt and a share of what was generated, chosen by the last queries"
    source: ClassVar[str] = "Song et al. 2025, arXiv 2505.13866"
    one_set: ClassVar[bool] = True
    unused: ClassVar[frozenset[str]] = frozenset({"budget", "interval"})

    period: int = 1024
    """P, generated tokens between two compressions."""
    recent: int = 32
    """R, most recent queries that score, and most recent entries that always stay."""
    ratio: int = 4
    """c, of c generated entries one stays."""
    kernel: int = 7
    """Neighbours that are pooled, an odd number."""

    def __post_init__(self) -> None:
        self._check_least(recent=1, ratio=1, kernel=1)
        if self.kernel % 2 == 0:
            raise UsageError(f"kernel is {self.kernel}; give an odd number")
        if self.period <= self.recent:
            raise UsageError(
                f"period is {self.period}, not over the {self.recent} protected entries of {self.name}; give at least "
                f"{self.recent + 1}"
            )
        super().__post_init__()

    @property
    def needs_queries(self) -> bool:
        return True

    @property
    def capacity(self) -> int | None:
        return None

    def start(self, heads: HeadInfo) -> PolicyState:
        return RPCState(self, heads)
