"""The oracle: what the next queries will attend to, which only a replay knows.

1. Before a compression the replay hands over the steps until the next one, with all keys
   (:meth:`OracleState.foresee`).
2. The score of an entry is the attention that it is going to get, summed over these queries and the group.
3. The B highest scores of all positions so far stay. What is dropped may come back, so that no policy that compresses
   at the same positions and keeps as many entries retains more attention.
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


class OracleState(PolicyState):
    """The attention that is going to be given."""

    def __init__(self, policy: Oracle, heads: HeadInfo) -> None:
        super().__init__(policy)
        self._shared = heads.shared
        self._empty = torch.zeros((heads.rows, len(heads.kv_heads), 0), device=heads.device)
        self._mass = self._empty  # [R, H, N], by position

    def foresee(self, step: AttentionStep) -> None:
        """See a future step, whose entries are all positions up to its last; call it in order, before :meth:`keep`."""
        for _, weight in step.blocks():
            self.receive(weight.sum(dim=(2, 3)))

    def receive(self, attention: Tensor) -> None:
        """See what future queries give in all to the first N positions, [R, H, N]."""
        self._mass = pad(self._mass, (0, max(0, attention.shape[-1] - self._mass.shape[-1])))
        self._mass[..., : attention.shape[-1]] += attention

    def keep(self, view: CacheView) -> Tensor:
        mass = pad(self._mass, (0, max(0, view.newest + 1 - self._mass.shape[-1])))
        self._mass = self._empty
        none = torch.zeros_like(view.positions, dtype=torch.bool)
        return keep_highest(mass.gather(-1, view.positions), none, self._budget, self._shared)


@dataclass(frozen=True)
class Oracle(Policy):
    """Keep what the queries until the next compression attend to most: the upper bound."""

    name: ClassVar[str] = "oracle"
    summary: ClassVar[str] = "keeps what the next queries will attend to: the upper bound (replay only)"
    source: ClassVar[str] = "upper bound"
    live: ClassVar[bool] = False

    interval: int = 128

    def start(self, heads: HeadInfo) -> OracleState:
        return OracleState(self, heads)
