"""The task of the bundled reasoner: follow a shuffled plan and recall what its letters stand for.

A problem gives letters their digits, then a plan whose steps are numbered but shuffled, then where to start::

    given f = 7 , c = 2 . plan 03 subtract d ; 01 add f ; 02 keep d ; 04 stop ; start at 01 with 5 .

The chain of thought takes the steps in order of their numbers and keeps a running total, modulo 10::

    <think> start at 01 with 5 .
    step 01 : the total is 5 . recall the plan for 01 add f . so 5 + f gives 2 .
    step 02 : the total is 2 . recall the plan for 02 keep d . so d = 2 .
    step 03 : the total is 2 . recall the plan for 03 subtract d . so 2 - d gives 0 .
    step 04 : the total is 0 . recall the plan for 04 stop . </think> the answer is 0 . <eos>

Nearly every token follows from the sentence it stands in. The exceptions are the *recalls*:

- the operation and the letter of a step stand in one place only, the step's entry of the plan;
- the digit of a letter is never said when the letter is used. It stands in one place only: the letter's definition, in
  the problem, or for a letter that was kept, in the sentence of the chain that kept it. So the digit after
  ``gives`` needs a look at an earlier *thought* or at the problem, however far back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from beaconscope.errors import UsageError
from beaconscope.reasoner.vocabulary import LABELS, LETTERS, encode

MODEL_FOLDER = Path(__file__).parent / "model"
"""The bundled model, a folder that transformers loads."""

Operation = Literal["add", "plus", "subtract", "minus", "keep", "stop"]
Kind = Literal["operation", "letter", "value"]

ADDING: tuple[Operation, ...] = ("add", "plus")
SUBTRACTING: tuple[Operation, ...] = ("subtract", "minus")
"""Two words each, so that no operation is a safe guess without a look at the plan."""

Span = tuple[int, int]
"""First position and the position after the last."""


@dataclass(frozen=True)
class Size:
    """How large a problem is.

    Parameters
    ----------
    letters
        Letters that the problem defines.
    steps
        Steps of the plan, without the closing stop.
    kept
        How many of the steps keep the running total under a new letter.

    Raises
    ------
    UsageError
        Where the vocabulary has too few letters or step numbers, or the first or last step would have to keep.
    """

    letters: int
    steps: int
    kept: int

    def __post_init__(self) -> None:
        if not 1 <= self.letters <= len(LETTERS) - self.kept:
            raise UsageError(
                f"{self.letters} letters and {self.kept} kept ones; give at least 1, and at most {len(LETTERS)} in all"
            )
        if not 1 <= self.steps < len(LABELS):
            raise UsageError(f"{self.steps} steps; give 1 to {len(LABELS) - 1}")
        if not 0 <= self.kept <= max(0, self.steps - 1):
            raise UsageError(f"{self.kept} kept totals in {self.steps} steps; give 0 to {max(0, self.steps - 1)}")

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, the marks of the chat template among them."""
        return 4 * self.letters + 4 * self.steps + 13

    @property
    def trace_length(self) -> int:
        """Tokens that a right solution generates, the closing ``<eos>`` among them."""
        return 23 * self.steps - 2 * self.kept + 29


SIZES = {
    "250": Size(letters=8, steps=10, kept=2),
    "500": Size(letters=8, steps=21, kept=4),
    "1000": Size(letters=8, steps=43, kept=8),
}
"""The sizes that the model is measured at, named by about how many tokens their traces have."""

_TRAINED = {"letters": (3, 10), "steps": (3, 43), "kept": (0, 8)}


def check_size(size: Size) -> None:
    """Refuse a size that the bundled model was not trained for.

    Raises
    ------
    UsageError
        Names the part of the size that is out of range.
    """
    for part, (least, most) in _TRAINED.items():
        found = getattr(size, part)
        if not least <= found <= most:
            raise UsageError(f"the bundled reasoner was not trained for {part} = {found}; give {least} to {most}")


@dataclass(frozen=True)
class Step:
    """An entry of the plan."""

    label: str
    operation: Operation
    letter: str | None = None

    @property
    def words(self) -> list[str]:
        """The entry as the problem writes it."""
        return [self.label, self.operation, *([self.letter] if self.letter else []), ";"]


@dataclass(frozen=True)
class Problem:
    """A problem: what is given, the plan in the order in which it is shown, and where to start."""

    definitions: tuple[tuple[str, int], ...]
    plan: tuple[Step, ...]
    start: str
    """Label of the first step."""
    total: int

    @property
    def text(self) -> str:
        """The problem as the user's message of a chat."""
        words = ["given"]
        for letter, digit in self.definitions:
            words += [letter, "=", str(digit), ","]
        words[-1] = "."
        words.append("plan")
        for step in self.plan:
            words += step.words
        words += ["start", "at", self.start, "with", str(self.total), "."]
        return " ".join(words)

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt, as the chat template makes them."""
        return encode(["<user>", *self.text.split(), "<assistant>"])

    @property
    def size(self) -> Size:
        """How large the problem is."""
        kept = sum(step.operation == "keep" for step in self.plan)
        return Size(len(self.definitions), len(self.plan) - 1, kept)


@dataclass(frozen=True)
class Recall:
    """A generated token that needs a look back.

    Parameters
    ----------
    position
        Position of the generated token in the sequence (prompt and chain). The look back happens in the query of the
        position before it.
    kind
        What is recalled: the operation or the letter of a step, or the digit of a letter.
    sources
        Spans of which one has to be looked at; any of them is enough.
    """

    position: int
    kind: Kind
    sources: tuple[Span, ...]

    @property
    def distance(self) -> int:
        """Tokens from the position that looks (the one before the recalled token) back to the nearest source."""
        return min(self.position - 1 - (stop - 1) for _, stop in self.sources)


@dataclass(frozen=True)
class Solution:
    """The right chain of thought of a problem."""

    token_ids: tuple[int, ...]
    """What has to be generated after the prompt, the closing ``<eos>`` among it."""
    recalls: tuple[Recall, ...]
    answer: int


def make_problem(size: Size, rng: random.Random) -> Problem:
    """Draw a problem.

    Letters, digits, operations, the order of the plan and the number of the first step are random. The last step is
    never one that keeps. A letter that was kept is as likely to be used later as all the defined ones together.
    """
    names = rng.sample(LETTERS, size.letters + size.kept)
    given, fresh = names[: size.letters], names[size.letters :]
    definitions = tuple((name, rng.randrange(10)) for name in given)
    keeping = set(rng.sample(range(size.steps - 1), size.kept)) if size.kept else set()
    first = rng.randrange(len(LABELS) - size.steps)
    steps: list[Step] = []
    kept: list[str] = []
    for index in range(size.steps):
        label = LABELS[first + index]
        if index in keeping:
            kept.append(fresh[len(kept)])
            steps.append(Step(label, "keep", kept[-1]))
            continue
        pool = kept if kept and rng.random() < 0.5 else given
        steps.append(Step(label, rng.choice(ADDING + SUBTRACTING), rng.choice(pool)))
    steps.append(Step(LABELS[first + size.steps], "stop"))
    shown = steps.copy()
    rng.shuffle(shown)
    return Problem(definitions, tuple(shown), steps[0].label, rng.randrange(10))


def read_problem(text: str) -> Problem:
    """Read a problem from its text.

    Raises
    ------
    UsageError
        Where the text is no problem, or one that cannot be solved.
    """
    words = text.split()
    try:
        plan, start = words.index("plan"), words.index("start")
        definitions = tuple((words[at], int(words[at + 2])) for at in range(1, plan, 4))
        entries = [entry.split() for entry in " ".join(words[plan + 1 : start]).split(";")[:-1]]
        steps = tuple(Step(entry[0], cast(Operation, entry[1]), *entry[2:]) for entry in entries)
        problem = Problem(definitions, steps, words[start + 2], int(words[start + 4]))
        first = LABELS.index(problem.start)
        ordered = sorted(steps, key=lambda step: step.label)
        if [step.label for step in ordered] != list(LABELS[first : first + len(steps)]):
            raise ValueError("the steps are not numbered one after the other")
        if [step.operation == "stop" for step in ordered] != [False] * (len(steps) - 1) + [True]:
            raise ValueError("the last step, and no other, has to stop")
        solve(problem)
    except (ValueError, IndexError, KeyError, TypeError):
        problem = None
    if problem is None or problem.text != " ".join(words):
        raise UsageError(
            "this is no problem of the bundled reasoner; write it as: "
            "given f = 7 , c = 2 . plan 02 stop ; 01 add f ; start at 01 with 5 ."
        )
    return problem


def solve(problem: Problem) -> Solution:
    """Write the right chain of thought, with what each of its tokens has to look at."""
    entry: dict[str, Span] = {}
    source: dict[str, Span] = {}
    value: dict[str, int] = {}
    position = 2  # after <user> and "given"
    for letter, digit in problem.definitions:
        source[letter] = (position, position + 4)
        value[letter] = digit
        position += 4
    position += 1  # "plan"
    for step in problem.plan:
        entry[step.label] = (position, position + len(step.words))
        position += len(step.words)
    base = position + 7  # "start at L with D ." and <assistant>

    words = ["<think>", "start", "at", problem.start, "with", str(problem.total), "."]
    recalls: list[Recall] = []
    total = problem.total

    def recalled(word: str, kind: Kind, span: Span) -> None:
        recalls.append(Recall(base + len(words), kind, (span,)))
        words.append(word)

    for step in sorted(problem.plan, key=lambda step: step.label):
        words += f"step {step.label} : the total is {total} . recall the plan for {step.label}".split()
        recalled(step.operation, "operation", entry[step.label])
        if step.letter is None:
            words.append(".")
            break
        recalled(step.letter, "letter", entry[step.label])
        words += [".", "so"]
        if step.operation == "keep":
            begin = base + len(words)
            words += [step.letter, "=", str(total), "."]
            source[step.letter] = (begin, begin + 4)
            value[step.letter] = total
            continue
        sign = 1 if step.operation in ADDING else -1
        words += [str(total), "+" if sign == 1 else "-", step.letter, "gives"]
        total = (total + sign * value[step.letter]) % 10
        recalled(str(total), "value", source[step.letter])
        words.append(".")
    words += f"</think> the answer is {total} . <eos>".split()
    return Solution(tuple(encode(words)), tuple(recalls), total)
