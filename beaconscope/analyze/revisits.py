"""Thought-revisiting tokens: steps whose global queries are more than the trace's own noise.

The null shifts each query head's series in time by a random offset of its own, which keeps how often a head looks back,
and at what, and breaks only that heads do so together. Two statistics of a step are held against it:

1. how many heads look back at once: under the null a sum of independent trials, so its tail is exact;
2. how many of them look at one place, from draws of the null.

A step's p-value is twice the smaller of the two (at most 1), and Benjamini-Hochberg over the steps says which are
significant. The third way to be a revisit needs no company, for models in which one head does all the looking back:

3. one head looks back hard (``lone_share``) at a span of at most ``lone_focus`` tokens, and no more than ``lone_rate``
   of all steps have such a look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import false_discovery_control

from beaconscope.analyze.options import AnalyzeOptions


@dataclass(frozen=True)
class Revisits:
    """What is known of each of N steps, from ``first_step`` on."""

    first_step: int
    heads: npt.NDArray[np.int64]  # [N], query heads that look back
    agree: npt.NDArray[np.int64]  # [N], most of them that look at one place
    p: npt.NDArray[np.float64]  # [N], nan for a step that is not known
    q: npt.NDArray[np.float64]  # [N], adjusted for the false discovery rate
    lone: npt.NDArray[np.bool_]  # [N], one head looks back hard, and that is rare
    lone_rate: float
    """Share of known steps with such a look, before it is asked whether that is rare; nan without steps."""
    flagged: npt.NDArray[np.bool_]  # [N], revisits
    reason: npt.NDArray[np.str_]  # [N], ``together``, ``agree``, ``alone`` or empty

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Positions of the revisits."""
        return np.flatnonzero(self.flagged) + self.first_step


def find_revisits(
    head: npt.NDArray[np.int64],
    step: npt.NDArray[np.int64],
    center: npt.NDArray[np.int64],
    strong: npt.NDArray[np.bool_],
    steps: range,
    options: AnalyzeOptions,
    known: npt.NDArray[np.bool_] | None = None,
) -> Revisits:
    """Find the revisits among ``steps``.

    Parameters
    ----------
    head, step, center, strong
        Of each global query: its query head (any numbering), its position, where it looks, and whether it looks hard
        enough to count alone.
    steps
        The positions that were looked at.
    options
        Thresholds and seed.
    known
        Which steps are known of all heads, [N]; None for all steps. The others are left out, as if the known steps
        followed on each other: what a head may have looked at there would count as a step without a look.
    """
    known = np.ones(len(steps), np.bool_) if known is None else known
    number = np.cumsum(known) - 1  # of each step among the known ones
    there = known[step - steps.start]
    found = _revisits_of(
        head[there], number[step[there] - steps.start], center[there], strong[there], int(known.sum()), options
    )

    def spread(values: npt.NDArray[Any], empty: Any) -> npt.NDArray[Any]:
        """The values of known steps at all steps."""
        whole = np.full(len(known), empty, values.dtype)
        whole[known] = values
        return whole

    return Revisits(
        steps.start,
        spread(found.heads, 0),
        spread(found.agree, 0),
        spread(found.p, np.nan),
        spread(found.q, np.nan),
        spread(found.lone, False),
        found.lone_rate,
        spread(found.flagged, False),
        spread(found.reason, ""),
    )


def _revisits_of(
    head: npt.NDArray[np.int64],
    at: npt.NDArray[np.int64],
    center: npt.NDArray[np.int64],
    strong: npt.NDArray[np.bool_],
    count: int,
    options: AnalyzeOptions,
) -> Revisits:
    """The revisits among ``count`` steps that are all known, numbered from 0; ``at`` is the step of each query."""
    if count == 0:
        none = np.zeros(0)
        whole, boolean = none.astype(np.int64), none.astype(np.bool_)
        return Revisits(0, whole, whole, none, none, boolean, np.nan, boolean, none.astype(np.str_))
    heads = np.bincount(at, minlength=count)
    agree = _agreement(at, center, count, options.agree_within)
    rates = np.bincount(np.unique(head, return_inverse=True)[1]) / count if len(head) else np.zeros(0)
    p_together = _tail(rates)[np.minimum(heads, len(rates))]
    p_agree = _shifted_tail(head, at, center, count, options)[agree]
    p = np.minimum(1.0, 2 * np.minimum(p_together, p_agree))
    q = false_discovery_control(p, method="bh")
    significant = (q <= options.fdr) & (heads > 1)
    lone = np.zeros(count, np.bool_)
    lone[at[strong]] = True
    lone_rate = float(lone.mean())
    if lone_rate > options.lone_rate:
        lone[:] = False
    reason = np.where(significant, np.where(p_agree < p_together, "agree", "together"), np.where(lone, "alone", ""))
    return Revisits(0, heads, agree, p, q, lone, lone_rate, significant | lone, reason)


def _tail(rates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """P(at least k heads at once) for k = 0 to H, where head h fires independently with probability ``rates[h]``."""
    mass = np.ones(1)
    for rate in rates:
        mass = np.convolve(mass, [1 - rate, rate])
    return np.minimum(1.0, np.cumsum(mass[::-1])[::-1])


def _agreement(
    at: npt.NDArray[np.int64], center: npt.NDArray[np.int64], count: int, within: int
) -> npt.NDArray[np.int64]:
    """For each of ``count`` steps, the most events whose centers lie within ``within`` tokens, [count].

    ``at`` and ``center`` [E] are the step and the place of each event.
    """
    most = np.zeros(count, np.int64)
    if len(at):
        wide = int(center.max()) + within + 2
        key = np.sort(at * wide + center)
        together = np.searchsorted(key, key + within, side="right") - np.arange(len(key))
        np.maximum.at(most, key // wide, together)
    return most


def _shifted_tail(
    head: npt.NDArray[np.int64],
    at: npt.NDArray[np.int64],
    center: npt.NDArray[np.int64],
    count: int,
    options: AnalyzeOptions,
) -> npt.NDArray[np.float64]:
    """P(at least k events of one step agree) for every k that is needed, from the shifted series."""
    number = np.unique(head, return_inverse=True)[1] if len(head) else head
    heads = int(number.max()) + 1 if len(head) else 0
    seen = np.zeros(heads + 2, np.int64)
    random = np.random.default_rng(options.seed)
    for _ in range(options.shifts if heads > 1 else 0):
        moved = (at + random.integers(0, count, heads)[number]) % count
        most = _agreement(moved, center, count, options.agree_within)
        seen += np.bincount(most, minlength=heads + 2)
    if heads <= 1:
        return np.ones(heads + 2)
    reached = np.cumsum(seen[::-1])[::-1]
    tail = (1 + reached) / (1 + options.shifts * count)
    tail[:2] = 1.0  # one head agrees with itself
    return np.minimum(tail, 1.0)
