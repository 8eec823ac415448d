"""Pooling of scores along the entries of a cache."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d


def pool_neighbours(scores: Tensor, kernel: int, how: Literal["mean", "max"]) -> Tensor:
    """Pool every entry with its neighbours in the cache, ``kernel`` entries in all.

    Parameters
    ----------
    scores
        float [..., N], oldest first.
    kernel
        Odd. At both ends a mean counts what is missing as 0, a maximum leaves it out.
    how
        Mean or maximum.

    Returns
    -------
    Tensor
        float [..., N].
    """
    rows = scores.reshape(-1, 1, scores.shape[-1])
    pool = avg_pool1d if how == "mean" else max_pool1d
    return pool(rows, kernel, stride=1, padding=kernel // 2).view(scores.shape)
