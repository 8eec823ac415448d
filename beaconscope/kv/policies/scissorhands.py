"""ScissorHands: entries that were pivotal stay pivotal (Liu et al., arXiv 2305.17118, algorithms 1 and 2).

1. A query finds an entry important when it gives it at least 1/n of its attention, n being the entries that it sees.
2. The score of an entry is how often it was found important, in the last 400 queries of each query head of the group,
   divided by how many of these came since the entry did.
3. A cache that holds more than B entries drops at once the m with the lowest scores; the last 10 are protected. As many
   stay after a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from beaconscope.attention.step import AttentionStep
from beaconscope.errors import UsageError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, keep_highest


class ScissorHandsState(PolicyState):
    """Who found which entry important, of the last queries."""

    def __init__(self, policy: ScissorHands, heads: HeadInfo) -> None:
        super().__init__(policy)
        self._policy = policy
        self._heads = heads
        slots = policy.budget + policy.interval
        # Query heads of the group that found an entry important, by query position modulo the window: [R, H, W, S].
        self._important = torch.zeros(
            (heads.rows, len(heads.kv_heads), policy.window, slots), dtype=torch.int16, device=heads.device
        )

    def attend(self, step: AttentionStep) -> None:
        n, window = step.key.shape[2], self._policy.window
        if n > self._important.shape[-1]:
            self._important = pad(self._important, (0, n - self._important.shape[-1]))
        for start, weight in step.blocks(max(0, step.tokens - window)):
            token = torch.arange(start, start + weight.shape[3], device=weight.device)
            seen = n - step.tokens + 1 + token  # entries that each query sees
            found = (weight >= 1 / seen[:, None]).sum(dim=2)  # [R, H, t, N]
            self._important[:, :, (step.first_position + token) % window, :n] = found.to(torch.int16)

    def keep(self, view: CacheView) -> Tensor:
        policy = self._policy
        found = self._important[..., : view.size].sum(dim=2)  # [R, H, N]
        asked = (view.newest - view.positions + 1).clamp(max=policy.window)
        recent = view.positions > view.newest - policy.recent
        return keep_highest(found / asked, recent, policy.kept, self._heads.shared)

    def kept_size(self, size: int) -> int:
        return min(self._policy.kept, size)

    def evicted(self, index: Tensor) -> None:
        slots = self._policy.budget + self._policy.interval
        at = index.unsqueeze(2).expand(-1, -1, self._policy.window, -1)
        self._important = pad(self._important.gather(-1, at), (0, slots - index.shape[-1]))


@dataclass(frozen=True)
class ScissorHands(Policy):
    """Keep the entries that recent queries most often gave an equal share of their attention or more."""

    name: ClassVar[str] = "scissorhands"
    summary: ClassVar[str] = "keeps what recent queries most often gave at least an equal share of their attention"
    source: ClassVar[str] = "Liu et al. 2023, arXiv 2305.17118"
    needs_attention: ClassVar[bool] = True

    window: int = 400
    """Most recent queries that count."""
    recent: int = 10
    """Most recent entries that always stay."""
    drop: int | None = None
    """m, entries dropped at once; None is half of the budget."""

    def __post_init__(self) -> None:
        self._check_least(window=1, recent=0, drop=1)
        super().__post_init__()
        if self.kept < self.recent + 1:
            raise UsageError(
                f"a budget of {self.budget} that drops {self.budget + self.interval - self.kept} at once does not hold "
                f"the {self.recent} protected entries of {self.name} and one more; give a larger budget or a smaller "
                "drop"
            )

    @property
    def protected(self) -> int:
        return self.recent

    @property
    def kept(self) -> int:
        """Entries that stay at a compression, B + I - m."""
        return self.budget + self.interval - (self.budget // 2 if self.drop is None else self.drop)

    def start(self, heads: HeadInfo) -> PolicyState:
        return ScissorHandsState(self, heads)
