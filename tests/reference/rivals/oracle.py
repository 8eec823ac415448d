"""The oracle: of all positions so far, those that the queries until the next compression attend to most."""

from __future__ import annotations

import numpy as np

from .past import Array, best


def oracle(attention: Array, newest: int, until: int, budget: int) -> list[int]:
    """``attention`` [T, G, T] of one KV head, nothing evicted; queries ``newest + 1`` to ``until - 1`` are asked."""
    mass = np.asarray(attention)[newest + 1 : until].sum(axis=(0, 1))
    return sorted(best({p: float(mass[p]) for p in range(newest + 1)}, budget))
