"""LazyEviction: evict what has been silent for long, measured by the longest silence that it came back from.

An entry is active in a step when any query head of the group gives it at least alpha. Its own step counts as its first
active one; its longest gap is at least 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from .past import Past, Sets, full, with_best


@dataclass
class LazyEviction:
    budget: int
    interval: int = 128
    alpha: float = 1e-4

    def fires(self, past: Past) -> bool:
        return full(past, self.budget, self.interval)

    def keep(self, past: Past) -> Sets:
        sets = []
        for head in past.heads:
            cached = past.cached[head]
            active = {p: [p] for p in cached}
            for t, row in enumerate(past.seen):
                for j, position in enumerate(row[head].positions):
                    if position in active and t > position and row[head].weights[:, j].max() >= self.alpha:
                        active[position].append(t)
            score = {}
            for position, times in active.items():
                longest = max([1, *(b - a for a, b in pairwise(times))])
                score[position] = -Fraction(past.newest - times[-1], longest)
            sets.append(with_best(cached, set(cached[len(cached) - self.interval :]), score, self.budget))
        return sets
