"""RPC: the prompt stays; every P generated tokens the k-th compression keeps k * P / c of them and the last R."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import softmax

from .past import Past, Sets, best, pooled


@dataclass
class RPC:
    period: int = 1024
    recent: int = 32
    ratio: int = 4
    kernel: int = 7

    def fires(self, past: Past) -> bool:
        generated = past.newest + 1 - past.prompt
        return generated > 0 and generated % self.period == 0

    def keep(self, past: Past) -> Sets:
        cached = past.cached[0]
        prompt = [p for p in cached if p < past.prompt]
        candidates = [p for p in cached if past.prompt <= p <= past.newest - self.recent]
        total = []
        for head in past.heads:
            for g in range(past.group):
                rows = [
                    softmax(past.logits(t, head, candidates)[g])
                    for t in range(past.newest + 1 - self.recent, past.newest + 1)
                ]
                total.append(np.sum(rows, axis=0))
        smooth = pooled(np.mean(total, axis=0).tolist(), self.kernel, "mean")
        chosen = best(dict(zip(candidates, smooth, strict=True)), past.firing * self.period // self.ratio)
        last = [p for p in cached if p > past.newest - self.recent]
        return [sorted([*prompt, *chosen, *last]) for _ in past.heads]
