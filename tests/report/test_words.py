"""The text of tokens as it is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beaconscope.report.words import LONGEST, redacted, shown_tokens, visible


def test_a_character_over_several_tokens_is_shown_once_with_the_first() -> None:
    smile = "😀".encode()
    assert shown_tokens([b"a", smile[:1], smile[1:3], smile[3:], b"b"]) == ["a", "😀", "", "", "b"]


def test_two_broken_characters_in_a_row_are_both_joined() -> None:
    e = "é".encode()
    assert shown_tokens([e[:1], e[1:] + e[:1], e[1:]]) == ["é", "é", ""]


def test_bytes_that_are_no_utf8_are_shown_as_replaced() -> None:
    assert shown_tokens([b"\xff", b"ok"]) == ["\ufffd", "ok"]
    assert shown_tokens([b"\xed\xa0\x80"]) == ["\ufffd\ufffd\ufffd"]


def test_a_character_that_never_ends_stays_where_it_began() -> None:
    assert shown_tokens([b"a", b"\xf0\x9f"]) == ["a", "\ufffd"]
    assert shown_tokens([b"\xf0\x9f", b"a"]) == ["\ufffd", "a"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x00b", "a\u2400b"),
        ("\x1b[31m", "\u241b[31m"),
        ("\u202eabc", "⟨202E⟩abc"),
        ("\x7f", "\u2421"),
        ("a\nb", "a\nb"),
    ],
)
def test_what_acts_is_shown_as_a_sign(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_very_long_token_is_cut_and_says_so() -> None:
    shown = visible("x" * 10_000)
    assert shown == "x" * LONGEST + "… (10,000 characters)"


@given(st.text(min_size=1, max_size=40), st.lists(st.integers(1, 4), min_size=1))
def test_tokens_joined_are_the_text_joined(text: str, sizes: list[int]) -> None:
    raw, pieces, at = text.encode("utf-8", "ignore"), [], 0
    for size in sizes * (len(text) * 4):
        pieces.append(raw[at : at + size])
        at += size
    assert "".join(shown_tokens(pieces)) == visible(raw.decode())


def test_redacting_leaves_layout_only() -> None:
    assert redacted([" secret", "word", "\n\n", " ", ""]) == [" ▒▒▒", "▒▒▒", "\n\n", " ", ""]
