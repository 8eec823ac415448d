"""The cache of one layer, run with a rule, written for the eye and not for speed.

1. A step brings the prompt (or a piece of it), or one token. Its queries attend to what is in the cache, causally; what
   each query gave to which position then and there is written down.
2. If the rule fires, it says for every KV head which of the cached positions stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from tests.reference.beacon_kv import steps

Array = NDArray[np.float64]
Sets = list[list[int]]


class Seen(NamedTuple):
    """What one query of every head of a group attended to."""

    positions: list[int]
    weights: Array  # [G, n]


@dataclass
class Past:
    """Everything that has happened in one layer up to ``newest``."""

    query: Array  # [T, H, G, D], post-RoPE
    key: Array  # [T, H, D], post-RoPE
    value: Array  # [T, H, Dv]
    prompt: int
    kinds: Sequence[str]
    """Of each token: "plain", "special" or "punctuation"."""
    scaling: float
    newest: int = -1
    firing: int = 0
    """Compressions so far, the one at hand included."""
    cached: Sets = field(default_factory=list)
    seen: list[list[Seen]] = field(default_factory=list)
    """By position of the query and KV head."""

    @property
    def heads(self) -> range:
        return range(self.key.shape[1])

    @property
    def group(self) -> int:
        return self.query.shape[2]

    def logits(self, t: int, head: int, positions: Sequence[int]) -> Array:
        """[G, n]: the query at ``t`` with the keys at ``positions``."""
        return self.query[t, head] @ self.key[list(positions), head].T * self.scaling

    def attention(self, t: int, head: int, positions: Sequence[int]) -> Array:
        """[G, n]: softmax of the query at ``t`` over those of ``positions`` that it may see, 0 elsewhere."""
        visible = np.array([p <= t for p in positions])
        logits = np.where(visible, self.logits(t, head, positions), -np.inf)
        return softmax(logits, axis=1)


class Kept(NamedTuple):
    position: int
    sets: Sets


class Rule(Protocol):
    def fires(self, past: Past) -> bool: ...

    def keep(self, past: Past) -> Sets: ...


def simulate(
    rule: Rule,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    prompt: int,
    *,
    kinds: Sequence[str] | None = None,
    chunks: Sequence[int] | None = None,
    scaling: float | None = None,
) -> list[Kept]:
    """What ``rule`` keeps at every compression of one layer, by KV head."""
    query, key, value = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    length, heads, _, size = query.shape
    past = Past(
        query,
        key,
        value,
        prompt,
        ["plain"] * length if kinds is None else kinds,
        size**-0.5 if scaling is None else scaling,
        cached=[[] for _ in range(heads)],
    )
    kept: list[Kept] = []
    for step in steps(length, prompt, chunks):
        for head in past.heads:
            past.cached[head] += step
        for t in step:
            row = []
            for head in past.heads:
                visible = [p for p in past.cached[head] if p <= t]
                row.append(Seen(visible, past.attention(t, head, visible)))
            past.seen.append(row)
        past.newest = step[-1]
        if rule.fires(past):
            past.firing += 1
            sets = rule.keep(past)
            for head in past.heads:
                assert set(sets[head]) <= set(past.cached[head])
                past.cached[head] = sorted(sets[head])
            kept.append(Kept(past.newest, [list(positions) for positions in past.cached]))
    return kept


def full(past: Past, budget: int, interval: int) -> bool:
    """Whether the cache holds ``interval`` entries over the budget."""
    return len(past.cached[0]) >= budget + interval


def best(scores: dict[int, float], count: int) -> list[int]:
    """The ``count`` positions with the highest scores; the oldest of equal ones."""
    return sorted(scores, key=lambda p: (-scores[p], p))[:count]


def with_best(cached: Sequence[int], always: set[int], scores: dict[int, float], budget: int) -> list[int]:
    """``always``, then the best of the others up to ``budget``."""
    others = {p: scores[p] for p in cached if p not in always}
    return sorted([*always, *best(others, budget - len(always))])


def pooled(values: Sequence[float], kernel: int, how: str) -> list[float]:
    """Each value with its neighbours, ``kernel`` in all; a mean counts what lies outside as 0, a maximum not at all."""
    half = kernel // 2
    result = []
    for i in range(len(values)):
        near = [values[j] for j in range(i - half, i + half + 1) if 0 <= j < len(values)]
        result.append(sum(near) / kernel if how == "mean" else max(near))
    return result
