"""What revisits look at: spans of tokens, and the sentences that are looked at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from beaconscope.analyze.events import Events
from beaconscope.analyze.sentences import Sentences

_GAP = 3
"""Chosen positions so close to each other make one span."""
_EARLY = 0.2
"""Share of the generation that counts as its early plan."""


class Text:
    """The text of a trace by position, cut into sentences."""

    def __init__(self, frame: pd.DataFrame, sentences: Sentences, prompt_length: int) -> None:
        self.token_bytes: list[bytes] = list(frame["token_bytes"])
        self.phase: list[str] = [str(phase) for phase in frame["phase"]]
        self.token_id = frame["token_id"].to_numpy(np.int64)
        self.sentences = sentences
        self.prompt_length = prompt_length
        self.length = len(frame)

    def text(self, start: int, stop: int) -> str:
        """The text of the tokens from ``start`` to before ``stop``."""
        return b"".join(self.token_bytes[start:stop]).decode("utf-8", errors="replace")

    def period(self, position: int) -> str:
        """``prompt``, ``early`` (the first fifth of the generation), ``later`` or ``answer``."""
        if position < self.prompt_length:
            return "prompt"
        if self.phase[position] == "answer":
            return "answer"
        return "early" if position < self.prompt_length + _EARLY * (self.length - self.prompt_length) else "later"


def merged(events: Events, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], float]:
    """Positions that some events look at, ascending, the attention on each, and their distant attention in all."""
    target, mass = events.target[rows].ravel(), events.target_mass[rows].ravel().astype(np.float64)
    there = target >= 0
    position, index = np.unique(target[there], return_inverse=True)
    attention = np.bincount(index, weights=mass[there], minlength=len(position)).astype(np.float64)
    return position, attention, float(events.mass[rows].sum())


def spans(
    position: npt.NDArray[np.int64], mass: npt.NDArray[np.float64], total: float, share: float
) -> list[tuple[int, int, float]]:
    """The shortest spans that hold a share of a distant mass.

    Positions are taken by falling mass until they hold ``share`` of ``total``; those at most three apart make one span.

    Returns
    -------
    list of (start, stop, share)
        By falling share of ``total``; stop is past the last.
    """
    order = np.argsort(-mass, kind="stable")
    count = int(np.searchsorted(np.cumsum(mass[order]), share * total - 1e-9)) + 1
    chosen = np.sort(position[order[:count]])
    if not len(chosen):
        return []
    cut = np.flatnonzero(np.diff(chosen) > _GAP) + 1
    found = []
    for part in np.split(chosen, cut):
        inside = (position >= part[0]) & (position <= part[-1])
        found.append((int(part[0]), int(part[-1]) + 1, float(mass[inside].sum() / max(total, 1e-30))))
    return sorted(found, key=lambda span: (-span[2], span[0]))


def anchors(found: pd.DataFrame, text: Text) -> pd.DataFrame:
    """The revisited sentences, most visited first.

    Parameters
    ----------
    found
        One row per revisit and span: ``position``, ``start``, ``share``, ``sentence``.
    text
        The trace's text.

    Returns
    -------
    DataFrame
        sentence, start, stop, period, visits (revisits that look at it), mass (sum of their shares on it), first and
        last (positions of those revisits), from_positions (all of them), text.
    """
    rows: list[dict[str, Any]] = []
    for _, part in found.groupby("sentence"):
        sentence = int(part["sentence"].iloc[0])
        start, stop = int(text.sentences.start[sentence]), int(text.sentences.stop[sentence])
        visits = sorted(set(part["position"].tolist()))
        rows.append(
            {
                "sentence": sentence,
                "start": start,
                "stop": stop,
                "period": text.period(start),
                "visits": len(visits),
                "mass": float(part["share"].sum()),
                "first": visits[0],
                "last": visits[-1],
                "from_positions": visits,
                "text": text.text(start, stop),
            }
        )
    columns = ["sentence", "start", "stop", "period", "visits", "mass", "first", "last", "from_positions", "text"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.sort_values(["visits", "mass", "sentence"], ascending=[False, False, True], ignore_index=True)


def span_rows(step: int, found: Sequence[tuple[int, int, float]], text: Text) -> list[dict[str, Any]]:
    """What a span is, in words a table can hold."""
    return [
        {
            "position": step,
            "start": start,
            "stop": stop,
            "share": share,
            "distance": step - (stop - 1),
            "sentence": int(text.sentences.of[start]),
            "phase": text.phase[start],
            "period": text.period(start),
            "text": text.text(start, stop),
        }
        for start, stop, share in found
    ]
