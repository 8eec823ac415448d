"""R-KV: importance to the last 8 queries less redundancy among the keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import softmax

from .past import Array, Past, Sets, full, pooled, with_best


@dataclass
class RKV:
    budget: int
    window: int = 8
    kernel: int = 7
    weight: float = 0.1
    threshold: float = 0.5
    interval: int = 128

    def fires(self, past: Past) -> bool:
        return full(past, self.budget, self.interval)

    def keep(self, past: Past) -> Sets:
        sets = []
        for head in past.heads:
            cached = past.cached[head]
            before = cached[: len(cached) - self.window]
            rows = []
            for t in range(past.newest + 1 - self.window, past.newest + 1):
                rows.append(softmax(past.logits(t, head, before).max(axis=0)))
            importance = pooled(np.mean(rows, axis=0).tolist(), self.kernel, "max")
            redundancy = redundant(past.key[cached, head], self.threshold)
            score = {p: self.weight * importance[i] - (1 - self.weight) * redundancy[i] for i, p in enumerate(before)}
            sets.append(with_best(cached, set(cached[len(before) :]), score, self.budget))
        return sets


def redundant(keys: Array, threshold: float) -> Array:
    """Redundancy of each of ``keys`` [n, D], oldest first."""
    n = len(keys)
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    cosine = unit @ unit.T
    for i in range(n):
        cosine[i, i] = 0
        for j in reversed(range(n)):
            if cosine[i, j] > threshold:
                cosine[i, j] = 0
                break
    return softmax(cosine.mean(axis=0))  # type: ignore[no-any-return]
