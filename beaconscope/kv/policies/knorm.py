"""Knorm: keep the keys of small norm, which get most attention (Devoto et al., arXiv 2406.11430).

1. The score of an entry is minus the norm of its key.
2. The B highest scores stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, keep_highest


class KnormState(PolicyState):
    """Needs no memory: keys decide."""

    def __init__(self, policy: Knorm, heads: HeadInfo) -> None:
        super().__init__(policy)
        self._policy = policy
        self._shared = heads.shared

    def keep(self, view: CacheView) -> Tensor:
        recent = view.positions > view.newest - self._policy.recent
        return keep_highest(-view.key_norm, recent, self._policy.budget, self._shared)


@dataclass(frozen=True)
class Knorm(Policy):
    """Keep the entries whose keys have the smallest norm."""

    name: ClassVar[str] = "knorm"
    summary: ClassVar[str] = "keeps the keys of the smallest norm"
    source: ClassVar[str] = "Devoto et al. 2024, arXiv 2406.11430"

    interval: int = 128
    recent: int = 0
    """Most recent entries that always stay."""

    def __post_init__(self) -> None:
        self._check_least(recent=0)
        super().__post_init__()

    @property
    def protected(self) -> int:
        return self.recent

    def start(self, heads: HeadInfo) -> PolicyState:
        return KnormState(self, heads)
