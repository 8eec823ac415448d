"""KeyDiff: keep the keys that are least like the others (Park et al., arXiv 2504.15364).

1. The score of an entry is minus the cosine of its key, post-RoPE, with the mean of the normalised keys in the cache.
2. The B highest scores stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, keep_highest


class KeyDiffState(PolicyState):
    """Needs no memory: keys decide."""

    def __init__(self, policy: KeyDiff, heads: HeadInfo) -> None:
        super().__init__(policy)
        self._policy = policy
        self._shared = heads.shared

    def keep(self, view: CacheView) -> Tensor:
        unit = view.unit_key
        mean = normalize(unit.mean(dim=2, keepdim=True), dim=-1)
        recent = view.positions > view.newest - self._policy.recent
        return keep_highest(-unit.mul_(mean).sum(dim=-1), recent, self._policy.budget, self._shared)


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keep the entries whose keys are least like the mean."""

    name: ClassVar[str] = "keydiff"
    summary: ClassVar[str] = "keeps the keys that are least like the mean of all"
    source: ClassVar[str] = "Park et al. 2025, arXiv 2504.15364"

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
        return KeyDiffState(self, heads)
