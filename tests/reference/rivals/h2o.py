"""H2O: the attention that an entry has got so far, over prompt and every step, no decay; the last r and the best."""

from __future__ import annotations

from dataclasses import dataclass

from .past import Past, Sets, full, with_best


@dataclass
class H2O:
    budget: int
    recent: int | None = None
    interval: int = 1

    def fires(self, past: Past) -> bool:
        return full(past, self.budget, self.interval)

    def keep(self, past: Past) -> Sets:
        recent = self.budget // 2 if self.recent is None else self.recent
        sets = []
        for head in past.heads:
            cached = past.cached[head]
            got = accumulated(past, head)
            sets.append(with_best(cached, set(cached[len(cached) - recent :]), got, self.budget))
        return sets


def accumulated(past: Past, head: int) -> dict[int, float]:
    """What every query of the group has ever given to each cached position."""
    got = dict.fromkeys(past.cached[head], 0.0)
    for row in past.seen:
        for position, weight in zip(row[head].positions, row[head].weights.sum(axis=0), strict=True):
            if position in got:
                got[position] += weight
    return got
