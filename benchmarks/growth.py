"""How a cost grows with the length of a trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def exponent(lengths: Sequence[float], costs: Sequence[float]) -> float:
    """The power of the length that the cost grows with: the slope in logarithms, by least squares."""
    return float(np.polyfit(np.log(lengths), np.log(costs), 1)[0])
