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

_BLOCK = 128
"""Positions whose queries are summed at once."""


class ExpectedQueries:
    """The queries so far of every query head of a layer, as a normal distribution, and what the next ones look for.

    Sums are taken over blocks that begin at the same positions whichever way the queries come, so that rounding does
    not depend on it.
    """

    def __init__(self, policy: ExpectedAttention, heads: HeadInfo) -> None:
        self._policy = policy
        self._heads = heads
        self._rotary = heads.rotary.to(heads.device)
        shape = (heads.rows, len(heads.kv_heads), heads.group_size, heads.size)
        zero = torch.zeros(shape, device=heads.device)
        self._sums = _Sums(0, zero, torch.zeros((*shape, heads.size), device=heads.device))
        self._begun = zero.unsqueeze(3)[:, :, :, :0]  # queries of the block that is not yet whole, pre-RoPE

    def observe(self, query: Tensor, first_position: int) -> None:
        """See the queries of consecutive positions, post-RoPE [R, H, G, T, D]."""
        skipped = max(0, self._policy.skip - first_position)
        query, position = query[:, :, :, skipped:].float(), first_position + skipped
        query = self._rotary.unrotate(query, position + torch.arange(query.shape[3], device=query.device))
        while query.shape[3]:
            room = _BLOCK - position % _BLOCK
            self._begun = torch.cat([self._begun, query[:, :, :, :room]], dim=3)
            query, position = query[:, :, :, room:], position + min(room, query.shape[3])
            if position % _BLOCK == 0:
                self._sums = self._sums.with_more(self._begun)
                self._begun = self._begun[:, :, :, :0]

    def logits(self, view: CacheView) -> Tensor:
        """Logarithm, but for a constant, of what queries like these are expected to give each entry, [R, H, G, N].

        For queries of mean m and covariance C this is m.k / sqrt(d) + k.C.k / (2 d), both turned to the positions
        after ``view.newest``.
        """
        policy, scaling = self._policy, self._heads.spec.scaling
        sums = self._sums.with_more(self._begun)
        to = torch.arange(view.newest + 1, view.newest + 1 + policy.future, device=view.positions.device)
        key = view.key.float()  # [R, H, N, D]
        turn = self._rotary.mean_rotation(to)
        logits = turn(sums.mean) @ key.transpose(-1, -2) * scaling  # [R, H, G, N]
        if not policy.covariance:
            return logits
        covariance = turn(turn(sums.scatter / max(sums.count, 1)).transpose(-1, -2))
        r, h, g, d, _ = covariance.shape
        # One product for all query heads, so that no keys are copied.
        turned = key @ covariance.transpose(2, 3).reshape(r, h, d, g * d)  # [R, H, N, GD]
        spread = turned.view(r, h, -1, g, d).mul_(key.unsqueeze(3)).sum(dim=-1).transpose(-1, -2)
        return logits + spread * (scaling**2 / 2)

    def select_rows(self, rows: Tensor) -> None:
        """Keep the sequences ``rows``, int64 [R']."""
        index = rows.to(self._begun.device)
        sums = self._sums
        self._sums = _Sums(sums.count, sums.mean.index_select(0, index), sums.scatter.index_select(0, index))
        self._begun = self._begun.index_select(0, index)


@dataclass(frozen=True)
class _Sums:
    """Of the queries of a sample."""

    count: int
    mean: Tensor  # [R, H, G, D], pre-RoPE
    scatter: Tensor  # count * covariance, [R, H, G, D, D]

    def with_more(self, query: Tensor) -> _Sums:
        """Together with queries [R, H, G, T, D]."""
        new = query.shape[3]
        if not new:
            return self
        # Two samples are joined by their means and scatters (Chan, Golub and LeVeque), which loses no digits.
        mean = query.mean(dim=3)
        centred = query - mean.unsqueeze(3)
        shift = mean - self.mean
        total = self.count + new
        scatter = self.scatter + centred.transpose(-1, -2) @ centred
        scatter += shift.unsqueeze(-1) * shift.unsqueeze(-2) * (self.count * new / total)
        return _Sums(total, self.mean + shift * (new / total), scatter)


class ExpectedAttentionState(PolicyState):
    """The distribution of the queries so far."""

    def __init__(self, policy: ExpectedAttention, heads: HeadInfo) -> None:
        super().__init__(policy)
        self._policy = policy
        self._heads = heads
        self.expected = ExpectedQueries(policy, heads)

    def observe(self, block: QueryBlock) -> None:
        self.expected.observe(block.query, block.first_position)

    def keep(self, view: CacheView) -> Tensor:
        policy = self._policy
        sinks = view.positions < policy.sinks
        logits = self.expected.logits(view).masked_fill(sinks.unsqueeze(2), float("-inf"))
        weight = logits.softmax(dim=-1).mean(dim=2)
        if policy.values:
            weight = (weight + policy.epsilon) * view.value_norm
        return keep_highest(weight, sinks, policy.budget, self._heads.shared)

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self.expected.select_rows(rows)


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
