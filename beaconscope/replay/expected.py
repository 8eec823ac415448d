"""What queries are expected to look for, worked out once for all Expected Attention settings that expect alike.

The distribution of the queries so far does not depend on what a cache keeps, and what it expects an entry to be given
not on which others compete. So each setting looks up what is expected of all that one of them holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from beaconscope.kv.policies import CacheView, ExpectedAttention
from beaconscope.kv.policies.expected_attention import ExpectedQueries
from beaconscope.replay.held import Held, Union, unite
from beaconscope.replay.layer import LayerData


class _SharedExpectation(ExpectedQueries):
    """The queries so far as several settings see them, one position of compression after the other."""

    def __init__(self, policy: ExpectedAttention, data: LayerData) -> None:
        super().__init__(policy, data.heads())
        self._data = data
        self._members: list[Held] = []
        self._seen = 0
        self._known = torch.empty(0)
        self._union = Union(torch.empty((1, 0, 0), dtype=torch.int64), None)

    def join(self, held: Held) -> None:
        """Take in what a setting holds."""
        self._members.append(held)

    def observe(self, query: Tensor, first_position: int) -> None:
        """Every query is seen once, whatever a setting shows."""

    def logits(self, view: CacheView) -> Tensor:
        newest = view.newest
        if newest + 1 > self._seen:
            super().observe(self._data.query[:, :, :, self._seen : newest + 1], self._seen)
            self._seen = newest + 1
            self._union = unite([held for held in self._members if held.newest == newest], newest + 1)
            key = self._data.entries(self._data.key, self._union.positions)
            self._known = super().logits(CacheView(key, key, self._union.positions, newest))
        index = self._union.columns(view.positions).unsqueeze(2)
        return self._known.gather(3, index.expand(-1, -1, self._known.shape[2], -1))


class Expectations:
    """The expectations of the settings of a layer."""

    def __init__(self, data: LayerData) -> None:
        self._data = data
        self._shared: dict[tuple[int, int, bool], _SharedExpectation] = {}

    def join(self, policy: ExpectedAttention, held: Held) -> ExpectedQueries:
        """What a setting with the entries ``held`` expects; all join before one compresses."""
        alike = (policy.future, policy.skip, policy.covariance)
        if alike not in self._shared:
            self._shared[alike] = _SharedExpectation(policy, self._data)
        self._shared[alike].join(held)
        return self._shared[alike]
