"""ScissorHands: how often, of the last queries that could see an entry, it got at least an equal share.

"When full drop the m lowest at once": a cache that holds I over its budget B drops m, so B + I - m stay; after a prompt
just as many stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from .past import Past, Sets, full, with_best


@dataclass
class ScissorHands:
    budget: int
    window: int = 400
    recent: int = 10
    drop: int | None = None
    interval: int = 1

    def fires(self, past: Past) -> bool:
        return full(past, self.budget, self.interval)

    def keep(self, past: Past) -> Sets:
        drop = self.budget // 2 if self.drop is None else self.drop
        sets = []
        for head in past.heads:
            cached = past.cached[head]
            counted = dict.fromkeys(cached, 0)
            observed = dict.fromkeys(cached, 0)
            for row in past.seen[-self.window :]:
                positions, weights = row[head]
                for j, position in enumerate(positions):
                    if position in counted:
                        for g in range(past.group):
                            counted[position] += weights[g, j] >= 1 / len(positions)
                            observed[position] += 1
            score = {p: Fraction(int(counted[p]), observed[p]) for p in cached}
            sets.append(
                with_best(cached, set(cached[len(cached) - self.recent :]), score, self.budget + self.interval - drop)
            )
        return sets
