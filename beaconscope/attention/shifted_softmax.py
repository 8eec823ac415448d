"""A softmax over the entries of a cache in two steps, of which the first is the same for caches of other entries.

The exponentials of a row of logits are taken less its largest logit *rounded up to a multiple of 16*, and not less the
largest itself. Rows over other entries mostly have that multiple in common, and then bit for bit the exponentials of
the entries that they share, so that a replay of many settings may take them once (:mod:`beaconscope.replay.observed`).
What is lost is range: a weight of less than about 1e-31 may become 0, where a usual softmax goes on to 1e-38.
"""

from __future__ import annotations

import math

from torch import Tensor

_STEP = 16.0
_CERTAIN = math.exp(-_STEP) * 1.0001
"""An exponential over this is of a logit less than 16 below the shift, rounding aside."""


def exponentials(logits: Tensor) -> Tensor:
    """exp(logit - c) for rows [..., N], where c is the row's largest logit rounded up to a multiple of 16."""
    shift = (logits.amax(dim=-1, keepdim=True) / _STEP).ceil_().mul_(_STEP)
    return (logits - shift).exp_()


def shift_differs(common: Tensor) -> Tensor:
    """Which rows may be shifted otherwise where other entries compete, from the exponentials of some that always do.

    Parameters
    ----------
    common
        [..., n].

    Returns
    -------
    Tensor
        bool [...]; False where one of the n is so large that the largest logit is in the same multiple of 16.
    """
    return common.amax(dim=-1) < _CERTAIN


def normalized(some: Tensor) -> Tensor:
    """The softmax that exponentials [..., N] are of; overwrites them."""
    return some.mul_(some.sum(dim=-1, keepdim=True).reciprocal_())
