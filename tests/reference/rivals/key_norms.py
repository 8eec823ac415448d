"""KeyDiff and Knorm, which look at keys alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .past import Past, Sets, full, with_best


@dataclass
class KeyDiff:
    budget: int
    interval: int = 128
    recent: int = 0

    def fires(self, past: Past) -> bool:
        return full(past, self.budget, self.interval)

    def keep(self, past: Past) -> Sets:
        sets = []
        for head in past.heads:
            cached = past.cached[head]
            keys = past.key[cached, head]
            unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
            mean = unit.mean(axis=0)
            cosine = unit @ mean / np.linalg.norm(mean)
            always = set(cached[len(cached) - self.recent :])
            sets.append(with_best(cached, always, dict(zip(cached, -cosine, strict=True)), self.budget))
        return sets


@dataclass
class Knorm:
    budget: int
    interval: int = 128
    recent: int = 0

    def fires(self, past: Past) -> bool:
        return full(past, self.budget, self.interval)

    def keep(self, past: Past) -> Sets:
        sets = []
        for head in past.heads:
            cached = past.cached[head]
            norm = np.linalg.norm(past.key[cached, head], axis=1)
            always = set(cached[len(cached) - self.recent :])
            sets.append(with_best(cached, always, dict(zip(cached, -norm, strict=True)), self.budget))
        return sets
