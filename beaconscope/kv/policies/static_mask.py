"""Static masks: what the sparse attention of an architecture lets a query see, whatever it looks for."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState


class StaticMaskState(PolicyState):
    """Needs no memory: positions decide."""

    def __init__(self, policy: StaticMask, heads: HeadInfo) -> None:
        super().__init__(policy)
        self._policy = policy
        self._heads = heads

    def keep(self, view: CacheView) -> Tensor:
        newest = view.positions.new_tensor([view.newest])
        seen = self._policy.mask(newest, view.positions[0, 0], self._heads)[:, 0]  # [H, N]
        return seen.expand_as(view.positions)


@dataclass(frozen=True)
class StaticMask(Policy):
    """A mask over positions. It forgets nothing: what one query does not see, a later one may."""

    live: ClassVar[bool] = False
    unused: ClassVar[frozenset[str]] = frozenset({"interval"})

    @abstractmethod
    def mask(self, queries: Tensor, keys: Tensor, heads: HeadInfo) -> Tensor:
        """What queries at positions [T] see of entries at positions [N], bool [H, T, N]."""

    def start(self, heads: HeadInfo) -> PolicyState:
        return StaticMaskState(self, heads)
