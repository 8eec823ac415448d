"""Entries picked out of keys or values."""

from __future__ import annotations

import torch
from torch import Tensor


def pick_entries(entries: Tensor, index: Tensor) -> Tensor:
    """Pick entries of every head, whole rows at a time: several times as fast as gathering number by number.

    Parameters
    ----------
    entries
        Keys or values [R, H, N, D].
    index
        int64 [R, H, K], each 0 to N - 1.

    Returns
    -------
    Tensor
        [R, H, K, D].
    """
    r, h, n, d = entries.shape
    if not entries.is_contiguous():
        # A prompt as its attention left it: no copy is made of all of it.
        row, head = (torch.arange(size, device=entries.device) for size in (r, h))
        return entries[row[:, None, None], head[:, None], index]
    first = torch.arange(r * h, device=entries.device).view(r, h, 1) * n
    return entries.reshape(r * h * n, d).index_select(0, (index + first).flatten()).view(*index.shape, d)
