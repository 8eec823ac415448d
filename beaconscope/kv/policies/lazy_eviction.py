"""LazyEviction: wait as long as an entry has been silent before (Zhang et al., arXiv 2506.15969).

1. An entry is active in a step when a query head of the group gives it at least alpha of its attention.
2. TS is the last step in which it was active (its own position at first), MRI the longest gap between two such steps
   (at least 1).
3. Every w tokens the entries with the largest (t - TS) / MRI go until B are left; the last w stay.
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


class LazyEvictionState(PolicyState):
    """When every entry was last active, and its longest gap."""

    def __init__(self, policy: LazyEviction, heads: HeadInfo) -> None:
        super().__init__(policy)
        self._policy = policy
        self._shared = heads.shared
        shape = (heads.rows, len(heads.kv_heads), 0)
        self._last = torch.zeros(shape, dtype=torch.int64, device=heads.device)  # TS, [R, H, N]
        self._gap = torch.zeros(shape, dtype=torch.int64, device=heads.device)  # MRI, [R, H, N]

    def attend(self, step: AttentionStep) -> None:
        self._last = torch.cat([self._last, step.key_positions[..., -step.tokens :]], dim=-1)
        self._gap = pad(self._gap, (0, step.tokens), value=1)
        for start, weight in step.blocks():
            t = weight.shape[3]
            now = step.first_position + torch.arange(start, start + t, device=weight.device)[:, None]
            active = weight.amax(dim=2) >= self._policy.alpha  # [R, H, t, N]
            times = torch.cat([self._last.unsqueeze(2), now.where(active, -1)], dim=2).cummax(dim=2).values
            gaps = (now - times[:, :, :-1]).where(active, 0)
            self._gap = torch.maximum(self._gap, gaps.amax(dim=2))
            self._last = times[:, :, -1]

    def keep(self, view: CacheView) -> Tensor:
        overdue = (view.newest - self._last) / self._gap
        recent = view.positions > view.newest - self._policy.interval
        return keep_highest(-overdue, recent, self._policy.budget, self._shared)

    def evicted(self, index: Tensor) -> None:
        self._last = self._last.gather(-1, index)
        self._gap = self._gap.gather(-1, index)


@dataclass(frozen=True)
class LazyEviction(Policy):
    """Evict what has been silent for long, measured by the longest silence that it came back from."""

    name: ClassVar[str] = "lazy-eviction"
    summary: ClassVar[str] = "evicts what has been silent for longer than it ever was"
    source: ClassVar[str] = "Zhang et al. 2025, arXiv 2506.15969"
    needs_attention: ClassVar[bool] = True

    interval: int = 128
    """w, tokens between two compressions, and most recent entries that always stay."""
    alpha: float = 1e-4
    """Attention from which an entry is active."""

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise UsageError(f"alpha is {self.alpha}; give a number over 0 and at most 1")
        super().__post_init__()

    @property
    def protected(self) -> int:
        return self.interval

    def start(self, heads: HeadInfo) -> PolicyState:
        return LazyEvictionState(self, heads)
