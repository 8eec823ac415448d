"""Labels read off a chain that was written, right or wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beaconscope.errors import BeaconScopeError
from beaconscope.reasoner import Agreement, agreement, label, truth
from beaconscope.reasoner.task import SIZES, Recall, make_problem, solve
from beaconscope.reasoner.vocabulary import encode

PROBLEM = "given f = 7 , c = 2 . plan 02 subtract d ; 01 add f ; 03 stop ; start at 01 with 5 ."
PROMPT = ["<user>", *PROBLEM.split(), "<assistant>"]


@dataclass(frozen=True)
class Recorded:
    """As much of a trace as the labels need."""

    tokens: pd.DataFrame
    prompt_length: int


def spans(chain: str) -> list[tuple[str, list[str]]]:
    words = [*PROMPT, *chain.split()]
    return [
        (words[recall.position], [" ".join(words[begin:stop]) for begin, stop in recall.sources])
        for recall in label(encode(words), len(PROMPT))
    ]


@given(st.sampled_from(sorted(SIZES)), st.integers(0, 10**6))
def test_labels_of_a_right_chain_are_those_of_its_solution(name: str, seed: int) -> None:
    problem = make_problem(SIZES[name], random.Random(seed))
    solution = solve(problem)

    found = label([*problem.prompt_ids, *solution.token_ids], len(problem.prompt_ids))

    assert tuple(found) == solution.recalls


def test_a_wrong_token_keeps_the_label_of_what_it_should_have_looked_at() -> None:
    assert spans("recall the plan for 01 subtract c . so 5 - c gives 9 .") == [
        ("subtract", ["01 add f ;"]),
        ("c", ["01 add f ;"]),
        ("9", ["c = 2 ."]),
    ]


def test_what_was_made_up_has_no_label() -> None:
    assert spans("recall the plan for 09 add z . so 5 + z gives 9 .") == []


def test_a_letter_kept_twice_may_be_recalled_from_either_place() -> None:
    assert spans("so d = 4 . so d = 6 . so 6 + d gives 2 .") == [("2", ["d = 4 .", "d = 6 ."])]


def test_a_chain_cut_short_has_the_labels_of_what_is_there() -> None:
    assert spans("recall the plan for 01") == []
    assert spans("recall the plan for 01 add") == [("add", ["01 add f ;"])]


def test_truth_reads_a_trace_whose_rows_are_in_any_order() -> None:
    problem = make_problem(SIZES["250"], random.Random(5))
    solution = solve(problem)
    token_ids = [*problem.prompt_ids, *solution.token_ids]
    frame = pd.DataFrame({"position": range(len(token_ids)), "token_id": token_ids})

    found = truth(Recorded(frame.sample(frac=1, random_state=0), len(problem.prompt_ids)))

    assert tuple(found) == solution.recalls


def test_a_trace_of_another_model_is_refused() -> None:
    frame = pd.DataFrame({"position": [0, 1, 2], "token_id": [151644, 872, 198]})
    with pytest.raises(BeaconScopeError, match="bundled reasoner"):
        truth(Recorded(frame, 2))


def test_a_prompt_that_is_no_problem_is_refused() -> None:
    frame = pd.DataFrame({"position": range(3), "token_id": encode(["<user>", "step", "<assistant>"])})
    with pytest.raises(BeaconScopeError, match="no problem"):
        truth(Recorded(frame, 3))


def test_a_trace_with_missing_positions_is_refused() -> None:
    frame = pd.DataFrame({"position": [0, 2], "token_id": encode(["<user>", "given"])})
    with pytest.raises(BeaconScopeError, match="position"):
        truth(Recorded(frame, 2))


def test_revisits_are_counted_against_the_recalls_of_something_distant() -> None:
    # GIVEN recalls by the queries at 99 (far), 119 (near, by its second source) and 139 (far), one that is not searched
    recalls = [
        Recall(41, "value", ((0, 4),)),
        Recall(100, "value", ((0, 4),)),
        Recall(120, "value", ((0, 4), (110, 114))),
        Recall(140, "value", ((8, 12),)),
    ]
    # WHEN one far and one near one are found, and one that is no recall
    found = agreement(recalls, [99, 119, 130], window=32, first=50)
    # THEN the near one counts neither way
    assert found == Agreement(wanted=2, found=2, right=1, near=1)
