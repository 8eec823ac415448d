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

from beaconscope.kv.rotary import Rotary
from beaconscope.kv.step import usable
from beaconscope.trace import HeadTrace, Trace
from beaconscope.trace.facts import attention_of, rotary_of

_BLOCK_BYTES = 16 << 20
"""Weights computed in one go: small enough to stay near the processor, large enough for its matrix product."""


@dataclass(frozen=True)
class LayerFacts:
    """What the attention of a layer needs besides queries and keys."""

    scaling: float
    softcap: float | None
    sink_logit: list[list[float]] | None  # [H][G] of all KV heads
    window: int | None
    assumed: bool
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
        return LayerFacts(trace.layout.of(layer).key_size ** -0.5, None, None, None, assumed=True)
    return LayerFacts(float(facts["scaling"]), facts["softcap"], facts["sink_logit"], facts["window"], False)


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
        self._query = query * facts.scaling
        self._key = key
        self._any_missing_key = bool(self.missing_key.any())
        self._softcap = facts.softcap
        self._window = facts.window
        self._sink = None
        if facts.sink_logit is not None:
            self._sink = torch.tensor(facts.sink_logit[head.kv_head], dtype=torch.float32)  # [G]
        elif self._any_missing_key:
            seen = (~self.missing_key).cumsum(dim=0)  # [T]
            if self._window is not None:
                seen[self._window :] -= seen[: -self._window].clone()
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
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        # What lies before all the rows needs no causal mask.
        first = int(position[0])
        column = torch.arange(first, n)
        logits[:, :, first:].masked_fill_(column > position[:, None], float("-inf"))
        if self._window is not None and n > self._window:
            logits.masked_fill_(torch.arange(n) <= position[:, None] - self._window, float("-inf"))
        if self._any_missing_key:
            logits.masked_fill_(self.missing_key[:n], float("-inf"))
        if self._evicted_at is not None:
            logits.masked_fill_(self._evicted_at[:n] < position[:, None], float("-inf"))
        if self._sink is None:
            weight = logits.softmax(dim=-1)
        else:
            sink = (self._sink if group is None else self._sink[group : group + 1])[:, None, None].expand(g, b, 1)
            weight = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1].contiguous()
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
