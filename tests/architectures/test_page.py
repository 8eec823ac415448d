"""The page of models has one row for each architecture, and says in it what holds for which variant."""

from __future__ import annotations

from testing.architectures.page import page
from testing.architectures.results import NOTED, REFUSED, RIGHT, UNBUILT, Result


def rows(results: list[Result]) -> list[str]:
    return [line for line in page("5.0", results).splitlines() if line.startswith("| `")]


def test_an_architecture_that_works_says_what_was_tried() -> None:
    assert rows([Result("a", "default", RIGHT), Result("a", "short window", RIGHT)]) == [
        "| `a` | default, short window |"
    ]


def test_a_note_says_which_variant_it_is_of() -> None:
    results = [Result("a", "default", RIGHT), Result("a", "short window", REFUSED, ["layer 2 is odd"])]
    assert rows(results) == ["| `a` | default, short window | short window: refused: a layer is odd |"]


def test_a_note_of_every_variant_stands_alone() -> None:
    results = [
        Result("a", "default", NOTED, ["layer 1 is odd"]),
        Result("a", "short window", NOTED, ["layer 2 is odd"]),
    ]
    assert rows(results) == ["| `a` | default, short window | a layer is odd |"]


def test_a_refusal_is_the_message() -> None:
    assert rows([Result("a", "default", REFUSED, ["A | B is refused"])]) == ["| `a` | default | A \\| B is refused |"]


def test_what_could_not_be_built_is_left_out_where_others_could() -> None:
    results = [
        Result("a", "default", RIGHT),
        Result("a", "short window", UNBUILT, ["no"]),
        Result("b", "default", UNBUILT, ["why"]),
    ]
    assert rows(results) == ["| `a` | default |", "| `b` | why |"]


def test_the_head_counts_architectures() -> None:
    text = " ".join(page("5.0", [Result("a", "default", RIGHT), Result("b", "default", REFUSED, ["no"])]).split())
    assert "transformers 5.0" in text
    assert "Of 2 architectures 1 work, 1 are refused." in text
