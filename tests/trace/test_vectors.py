from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from beaconscope.errors import BeaconScopeError
from beaconscope.trace import to_vector_type
from tests.trace.made import bfloat16

ordinary = st.floats(-60000, 60000, width=32)


@given(arrays(np.float32, 20, elements=ordinary))
def test_float32_is_untouched(values: np.ndarray) -> None:
    assert to_vector_type(values, "float32") is values


@given(arrays(np.float16, 20, elements=st.floats(-60000, 60000, width=16)))
def test_float16_survives_either_type(values: np.ndarray) -> None:
    np.testing.assert_array_equal(to_vector_type(values, "float16"), values)
    np.testing.assert_array_equal(to_vector_type(values, "float32"), values)
    np.testing.assert_array_equal(to_vector_type(values.astype(np.float32), "float16"), values)


@given(arrays(np.float32, 20, elements=ordinary))
def test_bfloat16_is_exact_in_float16_down_to_its_floor(values: np.ndarray) -> None:
    values = bfloat16(values)
    converted = to_vector_type(values, "float16").astype(np.float32)
    large = np.abs(values) >= 2.0**-17
    np.testing.assert_array_equal(converted[large], values[large])
    assert np.all(np.abs(converted - values) <= 2.0**-25)


@pytest.mark.parametrize("value", [65536.0, -1e5, 3e38])
@pytest.mark.parametrize("exact", [True, False])
def test_out_of_range(value: float, exact: bool) -> None:
    with pytest.raises(BeaconScopeError, match=r"does not fit in float16.*--dtype-trace float32"):
        to_vector_type(np.array([1.0, value], np.float32), "float16", exact=exact)


def test_more_digits_than_float16() -> None:
    third = np.array([1 / 3], np.float32)
    with pytest.raises(BeaconScopeError, match="--dtype-trace float32"):
        to_vector_type(third, "float16")
    assert to_vector_type(third, "float16", exact=False) == np.float16(1 / 3)


def test_what_is_not_finite_stays_so() -> None:
    values = np.array([np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(to_vector_type(values, "float16"), values.astype(np.float16))
