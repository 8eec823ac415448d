from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beaconscope.trace import split_phases


def phases(tokens: list[str], prompt_length: int, **markers: str) -> str:
    """The phases as one letter each."""
    split = split_phases([token.encode() for token in tokens], prompt_length, **markers)
    return "".join(phase[0] for phase in split)


@pytest.mark.parametrize(
    ("tokens", "prompt_length", "expected"),
    [
        # The markers as tokens of their own.
        (["hi", "<think>", "hm", "</think>", "42"], 1, "pttta"),
        # No marker anywhere.
        (["hi", "4", "2"], 1, "paa"),
        # Text before the thought is answer.
        (["hi", "Well", "<think>", "hm", "</think>", "42"], 1, "pattta"),
        # A marker over several tokens.
        (["hi", "<th", "ink", ">", "hm", "</", "think", ">", "42"], 1, "pttttttta"),
        # A marker inside a token, with answer behind it.
        (["hi", "so<think>hm", "hm", ".</think>\n4", "2"], 1, "pttta"),
        # Opened by the prompt, as some templates do.
        (["hi", "<think>\n", "hm", "</think>", "42"], 2, "pptta"),
        # Opened by the prompt over several tokens, never closed.
        (["hi", "<thi", "nk>", "hm", "hm"], 3, "ppptt"),
        # The prompt holds a thought that it closes.
        (["<think>", "</think>", "4", "2"], 2, "ppaa"),
        # Never closed.
        (["hi", "<think>", "hm", "hm"], 1, "pttt"),
        # Two thoughts.
        (["hi", "<think>", "</think>", "a", "<think>", "b", "</think>", "c"], 1, "pttattta"),
        # Closed but never opened: the model thought from the start.
        (["hi", "hm", "</think>", "42"], 1, "ptta"),
        # The prompt only speaks of the marker; the generation opens its own.
        (["explain <think>", "Well", "<think>", "hm", "</think>", "42"], 1, "pattta"),
        # An opening marker within a thought and a closing one after it mean nothing.
        (["hi", "<think>", "<think>", "</think>", "a", "</think>", "b"], 1, "ptttaaa"),
        # A marker that begins in the prompt.
        (["hi<thi", "nk>", "hm", "</think>", "42"], 1, "pttta"),
        # Tokens without text go with what follows them.
        (["hi", "", "<think>", "hm", "</think>", "", "42", ""], 1, "pttttaaa"),
        # Nothing but a prompt, and nothing at all.
        (["hi", "<think>"], 2, "pp"),
        ([], 0, ""),
    ],
)
def test_phases(tokens: list[str], prompt_length: int, expected: str) -> None:
    assert phases(tokens, prompt_length) == expected


def test_other_markers() -> None:
    assert phases(["q", "[T]", "x", "[/T]", "y"], 1, think_open="[T]", think_close="[/T]") == "pttta"


def test_one_text_for_both_markers() -> None:
    assert phases(["q", "||", "x", "||", "y"], 1, think_open="||", think_close="||") == "pttta"


def test_a_marker_that_begins_with_the_other() -> None:
    assert phases(["q", "<t>", "x", "<t>/", "y"], 1, think_open="<t>", think_close="<t>/") == "pttta"


def test_an_empty_marker_means_no_thought() -> None:
    assert phases(["q", "x"], 1, think_open="") == "pa"


def test_tokens_that_are_no_utf8() -> None:
    assert split_phases([b"\xff", b"\xf0\x9f<think>", b"\xfe"], 1) == ["prompt", "think", "think"]


@given(
    text=st.lists(st.sampled_from(["a", "<think>", "</think>", "é", " "]), max_size=8).map("".join),
    cuts=st.lists(st.integers(0, 60), max_size=20),
    prompt=st.integers(0, 20),
)
def test_every_tokenisation_agrees_on_every_byte_outside_the_markers(text: str, cuts: list[int], prompt: int) -> None:
    """GIVEN one text after one prompt WHEN its generation is cut into tokens anyhow THEN the single bytes decide."""
    # GIVEN
    data = text.encode()
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    tokens = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    prompt = min(prompt, len(tokens))
    prompt_bytes = sum(map(len, tokens[:prompt]))
    # WHEN
    by_token = split_phases(tokens, prompt)
    by_byte = split_phases([bytes([byte]) for byte in data], prompt_bytes)
    # THEN a token thinks exactly if a byte of it does
    place = 0
    for token, phase in zip(tokens, by_token, strict=True):
        inside = by_byte[place : place + len(token)]
        place += len(token)
        if token:
            assert phase == ("think" if "think" in inside else inside[0])
