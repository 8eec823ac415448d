"""What each generated token has to look back at, read off the text of a trace.

``solve`` in ``task`` knows this for the *right* chain of thought. Here the same is read from the chain that a model
has in fact written, right or wrong, so that it also serves for sampled chains and for chains under a compressed cache:

1. the entries of the plan and the definitions are read from the prompt;
2. the word after ``for L`` is an operation: its source is the entry of step L;
3. the word after ``for L operation`` is a letter: same source;
4. the word after ``+ x gives`` or ``- x gives`` is a value: its source is the definition of x in the prompt, or any
   earlier sentence ``so x = digit .`` of the chain.

A token whose source does not exist (a step or a letter that was made up) has no label.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from beaconscope.errors import BeaconScopeError
from beaconscope.reasoner.task import ADDING, SUBTRACTING, Kind, Recall, Span
from beaconscope.reasoner.vocabulary import DIGITS, LABELS, LETTERS, WORDS, decode


class TraceLike(Protocol):
    """As much of a trace as the labels need."""

    @property
    def tokens(self) -> Any:
        """A data frame with the columns ``position`` and ``token_id``."""

    @property
    def prompt_length(self) -> int:
        """How many of the tokens are the prompt."""


def truth(trace: TraceLike) -> list[Recall]:
    """Labelled revisits of a recorded trace of the bundled reasoner, by position.

    Raises
    ------
    BeaconScopeError
        Where the trace is not one of the bundled reasoner.
    """
    frame = trace.tokens.sort_values("position")
    token_ids = [int(index) for index in frame["token_id"]]
    positions = [int(position) for position in frame["position"]]
    if positions != list(range(len(positions))):
        raise BeaconScopeError("the trace lacks positions; truth labels need every token from position 0 on")
    return label(token_ids, trace.prompt_length)


def label(token_ids: Sequence[int], prompt_length: int) -> list[Recall]:
    """Recalls among the generated tokens of a sequence.

    Parameters
    ----------
    token_ids
        Prompt and chain of thought.
    prompt_length
        How many of them are the prompt.

    Returns
    -------
    list of Recall
        Ascending by position.

    Raises
    ------
    BeaconScopeError
        Where the prompt is not a problem of the bundled reasoner.
    """
    if any(not 0 <= index < len(WORDS) for index in token_ids):
        raise BeaconScopeError("the trace has tokens that the bundled reasoner lacks; truth labels exist for it alone")
    words = decode(token_ids)
    entries, sources = _read_prompt(words[:prompt_length])
    recalls: list[Recall] = []

    def add(position: int, kind: Kind, spans: list[Span]) -> None:
        if spans:
            recalls.append(Recall(position, kind, tuple(spans)))

    for position in range(prompt_length + 3, len(words)):
        before3, before2, before1 = words[position - 3 : position]
        if before2 == "for" and before1 in LABELS:
            add(position, "operation", entries.get(before1, []))
        elif before3 == "for" and before2 in LABELS and before1 in (*ADDING, *SUBTRACTING, "keep"):
            add(position, "letter", entries.get(before2, []))
        elif before3 in ("+", "-") and before2 in LETTERS and before1 == "gives":
            add(position, "value", sources.get(before2, []))
        elif before3 == "so" and before2 in LETTERS and before1 == "=" and words[position] in DIGITS:
            sources[before2] = [*sources.get(before2, []), (position - 2, position + 2)]
    return recalls


@dataclass(frozen=True)
class Agreement:
    """How found revisits agree with labelled recalls."""

    wanted: int
    """Recalls of something distant."""
    found: int
    """Revisits, those left out that are a recall of something nearer: they may be found or not."""
    right: int
    """Revisits that are wanted."""
    near: int
    """Revisits that are a recall of something nearer."""


def agreement(recalls: Sequence[Recall], revisits: Collection[int], window: int, first: int = 0) -> Agreement:
    """Compare positions that revisit with labelled recalls.

    Parameters
    ----------
    recalls
        Of :func:`truth`.
    revisits
        Positions whose query looks back; a recalled token is looked up by the query of the position before it.
    window
        A recall is wanted where each of its sources is more than so many positions back.
    first
        Positions before this one were not searched.
    """
    wanted = {recall.position - 1 for recall in recalls if recall.distance > window and recall.position > first}
    near = {recall.position - 1 for recall in recalls} - wanted
    counted = set(revisits) - near
    return Agreement(len(wanted), len(counted), len(counted & wanted), len(set(revisits) & near))


def _read_prompt(words: list[str]) -> tuple[dict[str, list[Span]], dict[str, list[Span]]]:
    """Spans of the plan's entries by step number, and of the definitions by letter."""
    try:
        given, plan, start = words.index("given"), words.index("plan"), words.index("start")
    except ValueError:
        raise BeaconScopeError(
            "the prompt is no problem of the bundled reasoner; it needs given, plan and start"
        ) from None
    sources: dict[str, list[Span]] = {}
    for position in range(given + 1, plan - 3, 4):
        sources.setdefault(words[position], []).append((position, position + 4))
    entries: dict[str, list[Span]] = {}
    begin = plan + 1
    for position in range(plan + 1, start):
        if words[position] == ";":
            entries.setdefault(words[begin], []).append((begin, position + 1))
            begin = position + 1
    return entries, sources
