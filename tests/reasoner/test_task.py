"""The task: problems, their right chains, and what each token has to look at."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beaconscope.errors import UsageError
from beaconscope.reasoner.task import SIZES, Problem, Size, check_size, make_problem, read_problem, solve
from beaconscope.reasoner.vocabulary import LABELS, WORDS, decode, encode

TEXT = "given f = 7 , c = 2 . plan 03 subtract d ; 01 add f ; 02 keep d ; 04 stop ; start at 01 with 5 ."
CHAIN = (
    "<think> start at 01 with 5 . "
    "step 01 : the total is 5 . recall the plan for 01 add f . so 5 + f gives 2 . "
    "step 02 : the total is 2 . recall the plan for 02 keep d . so d = 2 . "
    "step 03 : the total is 2 . recall the plan for 03 subtract d . so 2 - d gives 0 . "
    "step 04 : the total is 0 . recall the plan for 04 stop . </think> the answer is 0 . <eos>"
)

sizes = st.builds(
    lambda letters, steps, kept: Size(letters, steps, min(kept, steps - 1)),
    st.integers(3, 10),
    st.integers(3, 43),
    st.integers(0, 8),
)
problems = st.builds(lambda size, seed: make_problem(size, random.Random(seed)), sizes, st.integers(0, 10**6))


def test_vocabulary_is_small_and_without_repeats() -> None:
    assert len(WORDS) == len(set(WORDS)) < 120


def test_solution_of_a_problem_worked_by_hand() -> None:
    solution = solve(read_problem(TEXT))

    assert " ".join(decode(solution.token_ids)) == CHAIN
    assert solution.answer == 0


def test_recalls_of_a_problem_worked_by_hand() -> None:
    problem = read_problem(TEXT)
    solution = solve(problem)
    words = decode([*problem.prompt_ids, *solution.token_ids])

    found = [
        (recall.kind, words[recall.position], [" ".join(words[begin:stop]) for begin, stop in recall.sources])
        for recall in solution.recalls
    ]

    assert found == [
        ("operation", "add", ["01 add f ;"]),
        ("letter", "f", ["01 add f ;"]),
        ("value", "2", ["f = 7 ,"]),
        ("operation", "keep", ["02 keep d ;"]),
        ("letter", "d", ["02 keep d ;"]),
        ("operation", "subtract", ["03 subtract d ;"]),
        ("letter", "d", ["03 subtract d ;"]),
        ("value", "0", ["d = 2 ."]),
        ("operation", "stop", ["04 stop ;"]),
    ]


def test_distance_runs_from_the_looking_position_to_the_end_of_the_source() -> None:
    problem = read_problem(TEXT)
    words = ["<user>", *TEXT.split(), "<assistant>", *CHAIN.split()]
    at_gives = words.index("gives")
    end_of_definition = words.index(",")

    value = next(recall for recall in solve(problem).recalls if recall.kind == "value")

    assert value.distance == at_gives - end_of_definition


@given(problems)
def test_lengths_are_what_the_size_says(problem: Problem) -> None:
    assert len(problem.prompt_ids) == problem.size.prompt_length
    assert len(solve(problem).token_ids) == problem.size.trace_length


@given(problems)
def test_answer_by_arithmetic_on_the_text(problem: Problem) -> None:
    # An independent reading of the problem: regular expressions and Python's own arithmetic.
    value = {letter: int(digit) for letter, digit in re.findall(r"([a-z]) = (\d)", problem.text)}
    plan = re.findall(r"(\d\d) (add|plus|subtract|minus|keep|stop)(?: ([a-z]))? ;", problem.text)
    total = int(problem.text.split()[-2])
    for _, operation, letter in sorted(plan):
        if operation in ("add", "plus"):
            total = (total + value[letter]) % 10
        elif operation in ("subtract", "minus"):
            total = (total - value[letter]) % 10
        elif operation == "keep":
            value[letter] = total

    assert solve(problem).answer == total


@given(problems)
def test_a_recalled_thing_stands_in_its_source_and_nowhere_else(problem: Problem) -> None:
    solution = solve(problem)
    words = decode([*problem.prompt_ids, *solution.token_ids])
    prompt_length = len(problem.prompt_ids)
    for recall in solution.recalls:
        ((begin, stop),) = recall.sources
        span = words[begin:stop]
        assert stop < recall.position
        if recall.kind == "value":
            assert words[recall.position - 2] == span[0]
            assert sum(words[at : at + 2] == span[:2] for at in range(len(words))) == 1
        else:
            assert begin < prompt_length
            assert words[recall.position] in span
            assert span[0] in LABELS


@pytest.mark.parametrize("name", SIZES)
def test_named_sizes_have_about_the_length_of_their_name_and_rare_recalls(name: str) -> None:
    size = SIZES[name]
    solution = solve(make_problem(size, random.Random(0)))

    assert abs(size.trace_length - int(name)) <= 0.02 * int(name)
    assert 0.10 <= len(solution.recalls) / size.trace_length <= 0.15


def test_a_seed_gives_the_same_problem() -> None:
    assert make_problem(SIZES["250"], random.Random(3)) == make_problem(SIZES["250"], random.Random(3))
    assert make_problem(SIZES["250"], random.Random(3)) != make_problem(SIZES["250"], random.Random(4))


@given(problems)
def test_text_and_problem_are_two_forms_of_one_thing(problem: Problem) -> None:
    assert read_problem(problem.text) == problem
    assert problem.prompt_ids == encode(["<user>", *problem.text.split(), "<assistant>"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "what is 2 + 2 ?",
        TEXT.replace("04 stop ;", ""),  # never stops, and so has no end
        TEXT.replace("add f", "add q"),  # a letter that nothing defines
        TEXT.replace("add f", "double f"),
        TEXT.replace("start at 01", "start at 09"),
        TEXT + " hurry",
    ],
)
def test_what_is_no_problem_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no problem of the bundled reasoner"):
        read_problem(text)


@pytest.mark.parametrize(
    ("part", "size"), [("letters", Size(12, 10, 2)), ("steps", Size(8, 46, 2)), ("kept", Size(8, 20, 9))]
)
def test_a_size_that_the_model_does_not_know_is_refused_by_name(part: str, size: Size) -> None:
    with pytest.raises(UsageError, match=f"not trained for {part}"):
        check_size(size)


def test_measured_sizes_are_known_to_the_model() -> None:
    for size in SIZES.values():
        check_size(size)


@pytest.mark.parametrize("sizes", [(0, 5, 1), (24, 5, 3), (8, 0, 0), (8, 48, 0), (8, 5, 5)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError):
        Size(*sizes)
