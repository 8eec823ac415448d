"""Names and texts that are not UTF-8."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beaconscope.files import valid_unicode

E_ACUTE = "\N{LATIN SMALL LETTER E WITH ACUTE}"


@pytest.mark.parametrize(
    ("data", "decoded_by", "expected"),
    [
        (b"plan", "ascii", "plan"),
        # The C locale decodes nothing but ASCII; the bytes are UTF-8 all the same.
        (f"caf{E_ACUTE} \N{SNOWMAN}".encode(), "ascii", f"caf{E_ACUTE} \N{SNOWMAN}"),
        (b"caf\xe9", "ascii", "caf\N{REPLACEMENT CHARACTER}"),
        (b"\xff" + E_ACUTE.encode(), "utf-8", "\N{REPLACEMENT CHARACTER}" + E_ACUTE),
        (b"caf\xe9", "latin-1", f"caf{E_ACUTE}"),
    ],
)
def test_bytes_that_a_locale_did_not_decode_are_read_as_utf8(data, decoded_by, expected):
    assert valid_unicode(data.decode(decoded_by, "surrogateescape")) == expected


def test_a_path_is_read_as_its_name():
    assert valid_unicode(Path("folder", os.fsdecode(b"caf\xff"))) == "folder/caf\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("text", ["\ud800", "a\udfff\udc7f", "b\udcff"])
def test_half_of_a_pair_is_replaced_or_refused(text):
    assert set(valid_unicode(text)) <= {"a", "b", "\N{REPLACEMENT CHARACTER}"}
    with pytest.raises(UnicodeError):
        valid_unicode(text, "strict")


@given(st.text(st.characters(codec=None)))
def test_what_comes_out_is_unicode_and_what_was_is_as_it_was(text):
    found = valid_unicode(text)
    found.encode()
    try:
        text.encode()
    except UnicodeEncodeError:
        assert found != text
    else:
        assert found == text
        assert valid_unicode(text, "strict") == text
