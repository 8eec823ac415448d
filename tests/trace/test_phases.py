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
        # A closing marker has no effect where no thought is open.
        (["hi", "hm", "</think>", "42"], 1, "paaa"),
        (["hi", "hm", "</think>", "4", "<think>", "hm", "</think>", "2"], 1, "paaattta"),
        # The prompt mentions the marker; the generation opens a thought, or none.
        (["explain <think> now", "Well", "<think>", "hm", "</think>", "42"], 1, "pattta"),
        (["explain <think> now", "Well", "42"], 1, "paa"),
        (["explain <think> now", "it ends with ", "</think>", "."], 1, "paaa"),
        # The prompt has an example with a thought, whole or not closed, and its template appends something.
        (["Q <think>a</think>b", "Q <think>a", "[assistant]", "4", "2"], 3, "pppaa"),
        # The template opens and closes a thought at the end: the model is not to think.
        (["hi", "<think>", "\n\n", "</think>", "\n\n", "4", "2"], 5, "pppppaa"),
        (["hi <think>", "<think>\n\n</think>\n\n", "4", "</think>", "2"], 2, "ppaaa"),
        # The template opens a thought after the user mentioned the markers.
        (["say </think>", "<think>", " \n\t\r\n", "hm", "</think>", "42"], 3, "ppptta"),
        # Opened by the prompt and again by the model.
        (["hi", "<think>\n", "<think>", "hm", "</think>", "42"], 2, "ppttta"),
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


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("say ||", "t"),
        # Opened and closed at the end of the prompt.
        ("say ||\n\n||\n", "a"),
        # A mention, and a mention before an opening.
        ("say || now", "a"),
        ("say || now\n||\n", "t"),
    ],
)
def test_one_text_for_both_markers_at_the_end_of_the_prompt(prompt: str, expected: str) -> None:
    assert phases([prompt, "x"], 1, think_open="||", think_close="||") == "p" + expected


def test_a_closing_marker_that_ends_with_the_opening_one() -> None:
    assert phases(["say <t>/<t>", "x"], 1, think_open="<t>", think_close="/<t>") == "pa"


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
