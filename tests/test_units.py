"""Numbers as people read them."""

import pytest

from beaconscope.units import in_bytes


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (2.5e9, "2.5 GB"),
        (999.7e9, "1 TB"),
        (3e12, "3 TB"),
    ],
)
def test_a_number_of_bytes_has_three_digits_and_never_an_exponent(count, said):
    assert in_bytes(count) == said
