"""Attention recomputed from recorded queries and keys, some rows at a time.

The numbers are the model's own: its scaling, soft cap, learned sinks and window are in the trace. Memory is bounded by
the rows asked for times the positions before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from beaconscope.attention.rotary import Rotary
from beaconscope.attention.spec import AttentionSpec
from beaconscope.attention.usable import usable
from beaconscope.attention.weights import HIDDEN, cap_logits_, hide_unseen_, softmax_beside
from beaconscope.trace import HeadTrace, Trace
from beaconscope.trace.facts import attention_of, rotary_of

_BLOCK_BYTES = 16 << 20
"""Weights computed in one go: small enough to stay near the processor, large enough for its matrix product."""


@dataclass(frozen=True)
class LayerFacts:
    """What the attention of a layer needs besides queries and keys."""

    spec: AttentionSpec
    """Of all KV heads of the model."""
    assumed: bool = False
    """The trace does not say, so plain attention scaled by the root of the key size is taken."""


def layer_facts(trace: Trace, layer: int) -> LayerFacts:
    """Read what the trace says of a layer's attention.

    Raises
    ------
    BeaconScopeError
        Where what it says is no such thing.
    """
    facts = attention_of(trace, layer)
    if facts is None:
        return LayerFacts(AttentionSpec(trace.layout.of(layer).key_size ** -0.5), assumed=True)
    return LayerFacts(AttentionSpec.from_dict(facts))


def layer_rotary(trace: Trace, layer: int) -> Rotary | None:
    """The rotary embedding of a layer, None where it has none or the trace does not say."""
    found = rotary_of(trace, layer)
    return None if found is None else Rotary.from_dict(found)


class HeadAttention:
    """The attention of the G query heads of one KV head. T positions.

    Queries and keys that are not finite (or too large to be multiplied) are missing; ``missing`` counts both. A missing
    key is never attended to. A missing query, and one that sees missing keys only, has no attention: its rows are nan.
    """

    def __init__(self, head: HeadTrace, facts: LayerFacts, evicted_at: npt.NDArray[np.int64] | None = None) -> None:
        query = torch.from_numpy(np.asarray(head.query, np.float32).copy()).transpose(0, 1).contiguous()  # [G, T, D]
        key = torch.from_numpy(np.asarray(head.key, np.float32).copy())  # [T, D]
        self.missing_query = ~usable(query)  # [G, T]
        self.missing_key = ~usable(key)  # [T]
        self.missing = (int(self.missing_query.sum()), int(self.missing_key.sum()))
        """Queries and keys that are missing."""
        query[self.missing_query] = 0.0
        key[self.missing_key] = 0.0
        self._query = query * facts.spec.scaling
        self._key = key
        self._any_missing_key = bool(self.missing_key.any())
        self._spec = facts.spec
        self._sink = None if facts.spec.sink_logit is None else facts.spec.sink_logit[head.kv_head]  # [G]
        if self._sink is None and self._any_missing_key:
            seen = (~self.missing_key).cumsum(dim=0)  # [T]
            if self._spec.window is not None:
                seen[self._spec.window :] -= seen[: -self._spec.window].clone()
            self.missing_query |= seen == 0
        self._evicted_at = None if evicted_at is None else torch.from_numpy(evicted_at)  # [T]
        self.groups, self.length = query.shape[:2]

    @property
    def all_held(self) -> bool:
        """Whether attention is over every position, not over what a cache held."""
        return self._evicted_at is None

    def total(self, weight: Tensor) -> Tensor:
        """Sums of rows of weights [G, b, n]: one, less what a learned sink takes; nan for missing queries."""
        return weight[:, :, 0] * 0.0 + 1.0 if self._sink is None else weight.sum(dim=-1)

    def blocks(self, most: int = 1 << 30) -> Iterator[tuple[int, int]]:
        """First and past-the-last positions of blocks of rows that fit the memory bound, of at most ``most`` rows."""
        start = 0
        while start < self.length:
            stop = min(self.length, start + most, start + self._rows_of(start + 256))
            yield start, stop
            start = stop

    def _rows_of(self, columns: int) -> int:
        return max(1, _BLOCK_BYTES // (4 * self.groups * max(1, min(columns, self.length))))

    def block(self, start: int, stop: int) -> Tensor:
        """Weights [G, stop - start, stop] of the positions from ``start`` to before ``stop``."""
        return self._attend(self._query[:, start:stop], torch.arange(start, stop), self.missing_query[:, start:stop])

    def rows(self, group: int, positions: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.int64], Tensor]]:
        """Weights [b, n] of one query head at ``positions``, some at a time; n ends with the last of them."""
        one = slice(group, group + 1)
        step = self._rows_of(self.length) * self.groups
        for first in range(0, len(positions), step):
            part = positions[first : first + step]
            at = torch.from_numpy(part)
            weight = self._attend(self._query[one, at], at, self.missing_query[one, at], group)
            yield part, weight[0]

    def _attend(self, query: Tensor, position: Tensor, missing: Tensor, group: int | None = None) -> Tensor:
        g, b, d = query.shape
        n = int(position[-1]) + 1
        logits = (query.reshape(g * b, d) @ self._key[:n].T).view(g, b, n)
        hide_unseen_(cap_logits_(logits, self._spec), position, self._spec)
        if self._any_missing_key:
            logits.masked_fill_(self.missing_key[:n], HIDDEN)
        if self._evicted_at is not None:
            logits.masked_fill_(self._evicted_at[:n] < position[:, None], HIDDEN)
        sink = self._sink if self._sink is None or group is None else self._sink[group : group + 1]
        weight = softmax_beside(logits, None if sink is None else sink[:, None, None]).contiguous()
        if bool(missing.any()):
            weight[missing] = float("nan")
        return weight


def evicted_at(trace: Trace, layer: int, kv_head: int) -> npt.NDArray[np.int64] | None:
    """When each position left the cache, int64 [T]: gone for queries after that position. None where nothing left."""
    evictions = trace.evictions(layer, kv_head)
    if not any(len(eviction.evicted) for eviction in evictions):
        return None
    at = np.full(trace.length, np.iinfo(np.int64).max)
    for eviction in reversed(evictions):
        at[eviction.evicted] = eviction.position
    return at


def pre_rope(query: npt.NDArray[np.floating[Any]], rotary: Rotary, positions: npt.NDArray[np.int64]) -> Any:
    """Queries [n, D] before the rotary embedding, float32."""
    return rotary.unrotate(torch.from_numpy(np.asarray(query, np.float32)), torch.from_numpy(positions)).numpy()
