"""SnapKV: what the last w queries attend to, pooled along positions; the window and the best of the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .past import Past, Sets, full, pooled, with_best


@dataclass
class SnapKV:
    budget: int
    window: int = 32
    kernel: int = 5
    pooling: str = "mean"
    interval: int = 128

    def fires(self, past: Past) -> bool:
        return full(past, self.budget, self.interval)

    def keep(self, past: Past) -> Sets:
        sets = []
        for head in past.heads:
            cached = past.cached[head]
            total = np.zeros((past.group, len(cached)))
            for t in range(past.newest + 1 - self.window, past.newest + 1):
                total += past.attention(t, head, cached)
            before = cached[: len(cached) - self.window]
            smooth = [pooled(row[: len(before)].tolist(), self.kernel, self.pooling) for row in total]
            score = dict(zip(before, np.mean(smooth, axis=0), strict=True))
            sets.append(with_best(cached, set(cached[len(before) :]), score, self.budget))
        return sets
