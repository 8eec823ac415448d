"""R-KV: important and not redundant (Cai et al., arXiv 2505.24133, section 3).

1. Importance: products of the last 8 queries with the keys before the window; maximum over the group; softmax over
   these keys; mean over the queries; maximum over 7 neighbours.
2. Redundancy: cosine of every key with every other, post-RoPE; in each row the latest key above 0.5 is set to 0, so
   that the newest of similar keys is spared; mean of each column over all rows; softmax over all keys.
3. Score = l * importance - (1 - l) * redundancy.
4. The last 8 entries stay, then the highest scores, up to B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from beaconscope.attention.weights import scaled_products
from beaconscope.errors import UsageError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, keep_highest
from beaconscope.kv.policies.pooling import pool_neighbours
from beaconscope.kv.policies.recent import RecentQueriesState

_BLOCK_BYTES = 32 << 20
"""Cosines are computed in blocks of rows of at most this size."""


class RKVState(RecentQueriesState):
    """The last queries."""

    def __init__(self, policy: RKV, heads: HeadInfo) -> None:
        super().__init__(policy, heads, policy.window)
        self._policy = policy

    def keep(self, view: CacheView) -> Tensor:
        policy = self._policy
        window = min(policy.window, view.size)
        before = slice(0, view.size - window)
        logits = scaled_products(self._recent, view.key[:, :, before], self._heads.spec.scaling)
        weight = logits.amax(dim=2).softmax(dim=-1)  # [R, H, W, N - w]
        importance = pool_neighbours(weight.mean(dim=2), policy.kernel, "max")
        redundancy = redundant(view.unit_key, policy.threshold)[..., before]
        score = policy.weight * importance - (1 - policy.weight) * redundancy
        recent = view.positions > view.newest - policy.window
        return keep_highest(pad(score, (0, window)), recent, policy.budget, self._heads.shared)


def redundant(unit: Tensor, threshold: float) -> Tensor:
    """How redundant each key is, [R, H, N], from keys of norm 1 [R, H, N, D], oldest first; sums to one."""
    r, h, n, _ = unit.shape
    column = torch.arange(n, device=unit.device)
    total = unit.new_zeros((r, h, n))
    size = max(1, _BLOCK_BYTES // (4 * r * h * n))
    for start in range(0, n, size):
        row = column[start : start + size, None]
        cosine = unit[:, :, start : start + size] @ unit.transpose(-1, -2)  # [R, H, b, N]
        cosine.masked_fill_(row == column, 0)
        latest = ((cosine > threshold) * (column + 1)).amax(dim=-1, keepdim=True) - 1  # -1 for none
        cosine.masked_fill_(column == latest, 0)
        total += cosine.sum(dim=2)
    return (total / n).softmax(dim=-1)


@dataclass(frozen=True)
class RKV(Policy):
    """Keep the last ``window`` entries and those that are important and unlike the others."""

    name: ClassVar[str] = "r-kv"
    summary: ClassVar[str] = "keeps a window and what its queries attend to, less what is like other entries"
    source: ClassVar[str] = "Cai et al. 2025, arXiv 2505.24133"

    interval: int = 128
    window: int = 8
    """Most recent queries that score, and most recent entries that always stay."""
    kernel: int = 7
    """Neighbours that importance is pooled over, an odd number."""
    weight: float = 0.1
    """l, weight of importance against redundancy."""
    threshold: float = 0.5
    """Cosine from which keys are alike."""

    def __post_init__(self) -> None:
        self._check_least(window=1, kernel=1)
        if self.kernel % 2 == 0:
            raise UsageError(f"kernel is {self.kernel}; give an odd number")
        if not 0 <= self.weight <= 1:
            raise UsageError(f"weight is {self.weight}; give 0 to 1")
        super().__post_init__()

    @property
    def needs_queries(self) -> bool:
        return True

    @property
    def protected(self) -> int:
        return self.window

    def start(self, heads: HeadInfo) -> PolicyState:
        return RKVState(self, heads)
