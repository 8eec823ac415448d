"""TOVA: drop what the newest query attends to least (Oren et al., arXiv 2401.06104, section 4).

1. The score of an entry is the attention that the newest query gives it, mean over all query heads of the layer.
2. The B highest scores stay, the same in every head of the layer; after every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, keep_highest
from beaconscope.kv.policies.recent import RecentQueriesState


class TOVAState(RecentQueriesState):
    """The newest query."""

    def __init__(self, policy: TOVA, heads: HeadInfo) -> None:
        super().__init__(policy, heads, 1)
        self._policy = policy

    def keep(self, view: CacheView) -> Tensor:
        weight = self._attention(view)[:, :, :, 0]  # [R, H, G, N]
        score = weight.mean(dim=(1, 2)).unsqueeze(1).expand_as(view.positions)
        recent = view.positions > view.newest - self._policy.recent
        return keep_highest(score, recent, self._policy.budget)


@dataclass(frozen=True)
class TOVA(Policy):
    """Keep what the newest query attends to, one set for each layer."""

    name: ClassVar[str] = "tova"
    summary: ClassVar[str] = "keeps what the newest query attends to, one set for each layer"
    source: ClassVar[str] = "Oren et al. 2024, arXiv 2401.06104"
    one_set: ClassVar[bool] = True

    recent: int = 0
    """Most recent entries that always stay; some implementations protect the newest one."""

    def __post_init__(self) -> None:
        self._check_least(recent=0)
        super().__post_init__()

    @property
    def needs_queries(self) -> bool:
        return True

    @property
    def protected(self) -> int:
        return self.recent

    def start(self, heads: HeadInfo) -> PolicyState:
        return TOVAState(self, heads)
