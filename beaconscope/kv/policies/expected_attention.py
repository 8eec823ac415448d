"""Expected Attention: what queries like the past ones would attend to (Devoto et al., arXiv 2510.00636).

1. Mean and covariance of all pre-RoPE queries so far, for each query head, the first 4 left out.
2. Both are turned by the mean rotation to the next 512 positions.
3. Weight of an entry: softmax over the entries that compete of k.mean / sqrt(d) + k.covariance.k / (2 d).
4. Score: mean of the weights over the group, times the norm of the value.
5. The first 4 positions stay, then the highest scores, up to B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, QueryBlock, keep_highest


class ExpectedAttentionState(PolicyState):
    """Mean and covariance of the queries so far."""

    def __init__(self, policy: ExpectedAttention, heads: HeadInfo) -> None:
        super().__init__(policy)
        self._policy = policy
        self._heads = heads
        self._rotary = heads.rotary.to(heads.device)
        self._count = 0
        shape = (heads.rows, len(heads.kv_heads), heads.group_size, heads.size)
        self._mean = torch.zeros(shape, device=heads.device)  # [R, H, G, D], pre-RoPE
        self._scatter = torch.zeros((*shape, heads.size), device=heads.device)  # count * covariance, [R, H, G, D, D]

    def observe(self, block: QueryBlock) -> None:
        skipped = max(0, self._policy.skip - block.first_position)
        query = block.query[:, :, :, skipped:].float()
        new = query.shape[3]
        if not new:
            return
        first = block.first_position + skipped
        query = self._rotary.unrotate(query, torch.arange(first, first + new, device=query.device))
        # Two samples are joined by their means and scatters (Chan, Golub and LeVeque), which loses no digits.
        mean = query.mean(dim=3)
        centred = query - mean.unsqueeze(3)
        shift = mean - self._mean
        total = self._count + new
        self._scatter += centred.transpose(-1, -2) @ centred
        self._scatter += shift.unsqueeze(-1) * shift.unsqueeze(-2) * (self._count * new / total)
        self._mean += shift * (new / total)
        self._count = total

    def keep(self, view: CacheView) -> Tensor:
        policy, heads = self._policy, self._heads
        turn = self._mean_rotation(view.newest + 1)
        key = view.key.float()  # [R, H, N, D]
        mean = self._mean @ turn  # [R, H, G, D]
        logits = mean @ key.transpose(-1, -2) * heads.scaling  # [R, H, G, N]
        if policy.covariance:
            covariance = turn.T @ (self._scatter / max(self._count, 1)) @ turn
            r, h, g, d, _ = covariance.shape
            # One product for all query heads, so that no keys are copied.
            turned = key @ covariance.transpose(2, 3).reshape(r, h, d, g * d)  # [R, H, N, GD]
            spread = (turned.view(r, h, -1, g, d) * key.unsqueeze(3)).sum(dim=-1).transpose(-1, -2)
            logits = logits + spread * (heads.scaling**2 / 2)
        sinks = view.positions < policy.sinks
        weight = logits.masked_fill(sinks.unsqueeze(2), float("-inf")).softmax(dim=-1).mean(dim=2)
        if policy.values:
            weight = (weight + policy.epsilon) * view.value.float().norm(dim=-1)
        return keep_highest(weight, sinks, policy.budget, heads.shared)

    def _mean_rotation(self, first: int) -> Tensor:
        """M [D, D] such that ``x @ M`` is the mean of ``x`` rotated to the positions from ``first`` on."""
        positions = torch.arange(first, first + self._policy.future, device=self._heads.device)
        return self._rotary.mean_rotation(positions)


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Keep what queries drawn like the past ones would attend to from the next positions."""

    name: ClassVar[str] = "expected-attention"
    summary: ClassVar[str] = "keeps what queries distributed like the past ones are expected to attend to"
    source: ClassVar[str] = "Devoto et al. 2025, arXiv 2510.00636"

    interval: int = 128
    future: int = 512
    """Next positions that the queries may come from."""
    skip: int = 4
    """First queries that do not count."""
    sinks: int = 4
    """First positions that always stay."""
    covariance: bool = True
    """Take the covariance of the queries into account, not only their mean."""
    values: bool = True
    """Weigh by the norm of the value."""
    epsilon: float = 0.0
    """Added to the weight before the norm of the value."""

    def __post_init__(self) -> None:
        self._check_least(future=1, skip=0, sinks=0, epsilon=0)
        super().__post_init__()

    @property
    def needs_queries(self) -> bool:
        return True

    @property
    def needs_rotary(self) -> bool:
        return True

    @property
    def protected(self) -> int:
        return self.sinks

    def start(self, heads: HeadInfo) -> PolicyState:
        return ExpectedAttentionState(self, heads)
