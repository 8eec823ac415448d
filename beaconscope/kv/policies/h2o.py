"""H2O: recent entries and heavy hitters (Zhang et al., arXiv 2306.14048, section 4).

1. Every query of the prompt and of every step gives its attention, a softmax over what is in the cache, to the entries.
2. The score of an entry is the sum of all that it has got so far from the query heads of the group, without decay.
3. The last r entries stay, then the highest scores, up to B; after every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from beaconscope.attention.step import AttentionStep
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, keep_highest


class AccumulatedAttention:
    """The attention that every entry has got so far, summed over queries and group."""

    def __init__(self, heads: HeadInfo) -> None:
        self.sum = torch.zeros((heads.rows, len(heads.kv_heads), 0), device=heads.device)  # [R, H, N]

    def add(self, step: AttentionStep) -> None:
        """Count the attention of a step."""
        self.sum = pad(self.sum, (0, step.tokens))
        for _, weight in step.blocks():
            self.sum += weight.sum(dim=(2, 3))

    def evicted(self, index: Tensor) -> None:
        """See :meth:`~beaconscope.kv.policies.base.PolicyState.evicted`."""
        self.sum = self.sum.gather(-1, index.clamp(min=0)).masked_fill_(index < 0, 0)

    def select_rows(self, rows: Tensor) -> None:
        """Keep the sequences ``rows``, int64 [R']."""
        self.sum = self.sum.index_select(0, rows.to(self.sum.device))


class H2OState(PolicyState):
    """What every entry has got so far."""

    def __init__(self, policy: H2O, heads: HeadInfo) -> None:
        super().__init__(policy)
        self._recent = policy.protected
        self._shared = heads.shared
        self._got = AccumulatedAttention(heads)

    def attend(self, step: AttentionStep) -> None:
        self._got.add(step)

    def keep(self, view: CacheView) -> Tensor:
        recent = view.positions > view.newest - self._recent
        return keep_highest(self._got.sum, recent, self._budget, self._shared)

    def evicted(self, index: Tensor) -> None:
        self._got.evicted(index)

    def select_rows(self, rows: Tensor) -> None:
        self._got.select_rows(rows)


@dataclass(frozen=True)
class H2O(Policy):
    """Keep the last ``recent`` entries and those that have got most attention so far."""

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "keeps the most recent entries and those that have got most attention so far"
    source: ClassVar[str] = "Zhang et al. 2023, arXiv 2306.14048"
    needs_attention: ClassVar[bool] = True

    recent: int | None = None
    """r, entries that always stay; None is half of the budget."""

    def __post_init__(self) -> None:
        self._check_least(recent=0)
        super().__post_init__()

    @property
    def protected(self) -> int:
        return self.budget // 2 if self.recent is None else self.recent

    def start(self, heads: HeadInfo) -> PolicyState:
        return H2OState(self, heads)
