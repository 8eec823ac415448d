"""TOVA: the newest query's attention, mean over all heads of the layer, which keep one set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .past import Past, Sets, best, full


@dataclass
class Tova:
    budget: int
    interval: int = 1

    def fires(self, past: Past) -> bool:
        return full(past, self.budget, self.interval)

    def keep(self, past: Past) -> Sets:
        cached = past.cached[0]
        weights = np.concatenate([past.attention(past.newest, head, cached) for head in past.heads])  # [H * G, n]
        chosen = sorted(best(dict(zip(cached, weights.mean(axis=0), strict=True)), self.budget))
        return [chosen for _ in past.heads]
