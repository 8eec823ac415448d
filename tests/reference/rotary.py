"""Rotary position embedding, in float64."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Style = Literal["half", "interleaved"]


def rotate(
    x: ArrayLike, positions: ArrayLike, inv_freq: ArrayLike, style: Style = "half", scaling: float = 1.0
) -> Array:
    """Turn pair ``i`` of each vector by the angle ``position * inv_freq[i]`` and stretch it by ``scaling``.

    Parameters
    ----------
    x : [..., T, D]
    positions : [T]
    inv_freq : [F]
        Radians per position. Dimensions from ``2 * F`` on have no rotation (partial rotary) and are not stretched.
    style : {"half", "interleaved"}
        Pair ``i`` is dimensions ``(i, i + F)`` or ``(2 i, 2 i + 1)``.
    scaling : float
        What some models (YaRN) multiply cos and sin by.

    Returns
    -------
    [..., T, D]
    """
    out = np.array(x, dtype=np.float64)
    frequencies = np.asarray(inv_freq, dtype=np.float64)
    count = len(frequencies)
    angle = np.asarray(positions, dtype=np.float64)[:, None] * frequencies  # [T, F]
    cos, sin = scaling * np.cos(angle), scaling * np.sin(angle)
    if style == "half":
        left, right = slice(0, count), slice(count, 2 * count)
    elif style == "interleaved":
        left, right = slice(0, 2 * count, 2), slice(1, 2 * count, 2)
    else:
        raise ValueError(f"unknown rotary style {style!r}")
    a, b = out[..., left].copy(), out[..., right].copy()
    out[..., left] = a * cos - b * sin
    out[..., right] = b * cos + a * sin
    return out


def unrotate(
    x: ArrayLike, positions: ArrayLike, inv_freq: ArrayLike, style: Style = "half", scaling: float = 1.0
) -> Array:
    """Undo `rotate` called with the same arguments."""
    return rotate(x, -np.asarray(positions, dtype=np.float64), inv_freq, style, 1 / scaling)
