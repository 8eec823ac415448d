"""Expected Attention: what queries like the past ones, asked from the next positions, would attend to.

The rotation to a position is a matrix; the mean of these matrices over the next positions turns mean and covariance of
the pre-RoPE queries. The softmax is over the entries that compete, which the sinks do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import softmax

from tests.reference.rotary import rotate, unrotate

from .past import Past, Sets, full, with_best


@dataclass
class ExpectedAttention:
    budget: int
    rope: dict[str, Any]
    """Arguments of `rotate`."""
    future: int = 512
    skip: int = 4
    sinks: int = 4
    interval: int = 128

    def fires(self, past: Past) -> bool:
        return full(past, self.budget, self.interval)

    def keep(self, past: Past) -> Sets:
        size = past.key.shape[-1]
        turn = np.zeros((size, size))
        for position in range(past.newest + 1, past.newest + 1 + self.future):
            turn += rotate(np.eye(size), [position] * size, **self.rope).T / self.future
        sets = []
        for head in past.heads:
            cached = past.cached[head]
            always = {p for p in cached if p < self.sinks}
            rivals = [p for p in cached if p not in always]
            keys = past.key[rivals, head]
            weights = []
            for g in range(past.group):
                times = np.arange(self.skip, past.newest + 1)
                before = unrotate(past.query[times, head, g], times, **self.rope)
                mean = turn @ before.mean(axis=0)
                covariance = turn @ np.cov(before, rowvar=False, bias=True) @ turn.T
                spread = np.array([key @ covariance @ key for key in keys])
                weights.append(softmax(keys @ mean * past.scaling + spread * past.scaling**2 / 2))
            score = np.mean(weights, axis=0) * np.linalg.norm(past.value[rivals, head], axis=1)
            sets.append(with_best(cached, always, dict(zip(rivals, score, strict=True)), self.budget))
        return sets
