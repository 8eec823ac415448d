"""Vectors in the type of the trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from beaconscope.errors import BeaconScopeError
from beaconscope.trace.schema import VectorType

FLOAT16_FLOOR = 2.0**-25
"""Largest error that float16 makes in a bfloat16 or float16 value within its range: half a step of its subnormals."""


def to_vector_type(
    values: npt.NDArray[np.floating[Any]], vector_type: VectorType, *, exact: bool = True
) -> npt.NDArray[np.floating[Any]]:
    """Give vectors the type in which the trace holds them, and refuse what would come out wrong.

    float16 has more digits than bfloat16 but a smaller range. Up to 65504 a bfloat16 value of at least 2^-17 is exact
    in it; a smaller one is rounded, by at most 2^-25 (3e-8). That much is let through, because nearly every recording
    has such values (about 2 in 100,000) and they are far below what bfloat16 itself resolves beside any other number.

    Parameters
    ----------
    values : float array, any shape
    vector_type : {"float16", "float32"}
    exact : bool
        Refuse values that float16 rounds by more than 2^-25. False lets it round, as is wanted where a float32 model is
        traced in float16 on purpose.

    Returns
    -------
    array of ``vector_type``, same shape
        ``values`` itself where nothing is to be done.

    Raises
    ------
    BeaconScopeError
        For a finite value beyond the range of ``vector_type``, or an inexact one.
    """
    target = np.dtype(vector_type)
    if values.dtype == target or np.can_cast(values.dtype, target, "safe"):
        return values.astype(target, copy=False)
    with np.errstate(over="ignore"):
        converted = values.astype(target)
    if bool(np.any(np.isinf(converted) & np.isfinite(values))):
        largest = float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0))
        raise BeaconScopeError(
            f"a query, key or value of {largest:.6g} does not fit in {vector_type} "
            f"(at most {np.finfo(target).max:.6g}); record with --dtype-trace float32"
        )
    if exact and target == np.float16:
        with np.errstate(invalid="ignore"):  # inf - inf
            loss = np.abs(converted.astype(values.dtype) - values)
        if bool(np.any(loss > FLOAT16_FLOOR)):
            raise BeaconScopeError(
                "the queries, keys or values have more digits than float16 holds; record with --dtype-trace float32"
            )
    return converted
