"""Cut the text of a trace into sentences, on token boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

_ENDS = (".", "?", "!")
_CLOSING = "\"')]}*\u201d\u2019"
_LONGEST = 128


@dataclass(frozen=True)
class Sentences:
    """S sentences that cover all T tokens, in order."""

    start: npt.NDArray[np.int64]  # [S]
    stop: npt.NDArray[np.int64]  # [S], past the last
    of: npt.NDArray[np.int64]  # [T], the sentence of each token

    def __len__(self) -> int:
        return len(self.start)


def sentences_of(frame: pd.DataFrame) -> Sentences:
    """Cut the text of a trace, of whose tokens ``frame`` has one row each: ``token`` and ``phase``."""
    return split_sentences([str(token) for token in frame["token"]], [str(phase) for phase in frame["phase"]])


def split_sentences(tokens: Sequence[str], phases: Sequence[str]) -> Sentences:
    """Cut where a sentence ends, a line ends or the phase changes, and after 128 tokens at the latest.

    A full stop ends a sentence unless the next token goes on without a space (``3.14``, ``e.g.``) in a text whose
    tokens carry their spaces. White space after an end belongs to the sentence that ended.
    """
    count = len(tokens)
    spaced = any(token[:1] == " " for token in tokens)
    starts = [0] if count else []
    for index in range(1, count):
        before, here = tokens[index - 1], tokens[index]
        blank = not here.strip() and phases[index] == phases[index - 1]
        if index - starts[-1] >= _LONGEST or phases[index] != phases[index - 1]:
            starts.append(index)
        elif blank or not any(token.strip() for token in tokens[starts[-1] : index]):
            continue
        elif _line_ended(tokens, starts[-1], index):
            starts.append(index)
        elif _stopped(tokens, starts[-1], index):
            goes_on = spaced and before.strip().endswith(".") and here[:1].isalnum()
            closes = all(letter in _CLOSING for letter in here.strip())
            if not goes_on and not closes:
                starts.append(index)
    start = np.array(starts, np.int64)
    stop = np.append(start[1:], count).astype(np.int64) if count else start
    return Sentences(start, stop, np.repeat(np.arange(len(start)), stop - start))


def _line_ended(tokens: Sequence[str], start: int, index: int) -> bool:
    """Whether a line break lies in the token before ``index``, or in the blank tokens before it."""
    at = index - 1
    while at >= start and not tokens[at].strip():
        if "\n" in tokens[at]:
            return True
        at -= 1
    return at >= start and "\n" in tokens[at]


def _stopped(tokens: Sequence[str], start: int, index: int) -> bool:
    """Whether what is before ``index`` ends a sentence, closing quotes and blank tokens left aside."""
    for token in reversed(tokens[start:index]):
        words = token.strip().rstrip(_CLOSING)
        if words:
            return words.endswith(_ENDS)
    return False
