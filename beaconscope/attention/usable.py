"""Which vectors attention can be computed from."""

from __future__ import annotations

import math

from torch import Tensor

_SAFE_NORM = 1e19
"""Its square is within the range of float32."""


def usable(vectors: Tensor) -> Tensor:
    """Return which vectors [..., D] attention can be computed from, bool [...].

    Their numbers are finite, and not so large that a product of two of them may leave the range of float32.
    """
    return vectors.float().square().sum(dim=-1).isfinite()


def all_usable(vectors: Tensor) -> bool:
    """Return whether all vectors [..., D] are :func:`usable`; False, at worst, near the end of the range."""
    if not vectors.numel():
        return True
    # The least and the largest number are nan where one is, and finding them takes no memory.
    low, high = vectors.aminmax()
    largest: float = max(-float(low), float(high))
    return largest < _SAFE_NORM / math.sqrt(vectors.shape[-1])
