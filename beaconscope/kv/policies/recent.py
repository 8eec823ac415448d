"""States that score with the most recent queries."""

from __future__ import annotations

import torch
from torch import Tensor

from beaconscope.attention.weights import attention_weights
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, QueryBlock


class RecentQueriesState(PolicyState):
    """Remembers the last ``count`` queries of every query head."""

    def __init__(self, policy: Policy, heads: HeadInfo, count: int) -> None:
        super().__init__(policy)
        self._heads = heads
        self._count = count
        self._recent = torch.zeros(
            (heads.rows, len(heads.kv_heads), heads.group_size, 0, heads.size), device=heads.device
        )  # [R, H, G, W, D], post-RoPE, W at most ``count``

    def observe(self, block: QueryBlock) -> None:
        if not self._count:
            return
        newest = block.query[:, :, :, -self._count :].float()
        self._recent = torch.cat([self._recent, newest], dim=3)[:, :, :, -self._count :]

    def _attention(self, view: CacheView) -> Tensor:
        """Attention of the remembered queries on the entries at hand, causal, [R, H, G, W, N]."""
        heads, count = self._heads, self._recent.shape[3]
        visible = None
        if count > 1:
            # All that is older than the oldest of these queries comes before the last ``count`` entries.
            position = view.newest - count + 1 + torch.arange(count, device=view.positions.device)
            visible = position[:, None] >= view.positions[:, :, None, None, -count:]
        logits = view.logits(heads.spec.scaling, (self._recent, "recent"))
        return attention_weights(logits, heads.spec, visible)
