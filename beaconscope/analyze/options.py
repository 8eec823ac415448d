"""The settings of an analysis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from beaconscope.errors import UsageError

Over = Literal["everything", "held"]

MOST_TARGETS = 64
"""Distant positions kept of a global query, by falling mass."""
_MOST = (1 << 31) - 1
"""No whole number of an analysis is larger; a seed may not be."""


@dataclass(frozen=True)
class AnalyzeOptions:
    """The settings of an analysis, checked where they are made.

    Parameters
    ----------
    layers, heads
        Which layers and KV heads: ``all``, ``0,8,16`` or ``0-8:2``.
    over
        What attention is computed over: ``everything`` that was recorded, which is what a full cache would have
        attended to, or what the recording's cache ``held`` at each step.
    window
        Tokens back from which on a position is distant; None is an eighth of the trace, at least 64 and at most 128, in
        traces of less than 256 tokens a quarter, at least 16.
    sinks
        Take this many first positions as sinks; None detects them.
    sink_share
        A detected sink draws more than this share of a head's attention on average, and half of it from most queries.
    min_share
        Aim from which on a query may be global: the share of what does not go to sinks that goes to one distant place.
    min_mass
        Distant attention from which on a query may be global, sinks counted: a share of next to nothing is no look
        back.
    min_z
        Robust z of the aim against the head's own past from which on a query may be global.
    min_rise
        How far the aim must be above the upper quartile of the head's own past.
    history
        Steps of the past that a query is compared with.
    focus
        Half of a global query's distant mass lies on at most so many positions.
    span
        Half of a global query's distant mass lies within so many tokens.
    fdr
        False discovery rate at which steps count as revisits.
    agree_within
        Tokens within which two heads look at one place.
    lone_share
        Aim from which on a head that looks back alone makes a revisit; 1.01 turns the rule off.
    lone_focus
        Tokens within which half of a lone look back must lie.
    lone_rate
        Share of steps up to which lone looks back are events; where more steps have one, they are the trace's noise.
    target_mass
        Share of the distant mass that the spans of a target hold.
    shifts
        Draws of the null in which each head's series is shifted in time.
    clusters
        Largest number of clusters tried.
    cluster_heads
        Query heads, those with a part in most revisits, whose queries are clustered.
    cluster_queries
        Queries of a head that are clustered, at most.
    permutations
        Draws of the permutation tests.
    seed
        Of everything that is drawn.

    Raises
    ------
    UsageError
        For values out of range.
    """

    layers: str = "all"
    heads: str = "all"
    over: Over = "everything"
    window: int | None = None
    sinks: int | None = None
    sink_share: float = 0.05
    min_share: float = 0.3
    min_mass: float = 0.1
    min_z: float = 3.0
    min_rise: float = 0.2
    history: int = 256
    focus: int = 16
    span: int = 32
    fdr: float = 0.05
    agree_within: int = 8
    lone_share: float = 0.9
    lone_focus: int = 8
    lone_rate: float = 0.2
    target_mass: float = 0.8
    shifts: int = 200
    clusters: int = 12
    cluster_heads: int = 6
    cluster_queries: int = 400
    permutations: int = 999
    seed: int = 0

    def __post_init__(self) -> None:
        if self.over not in ("everything", "held"):
            raise UsageError(f"attention over {self.over!r} is unknown; give everything or held")
        least = {
            "window": 1, "sinks": 0, "history": 4, "focus": 1, "span": 1, "agree_within": 0, "lone_focus": 1,
            "shifts": 1, "clusters": 2, "cluster_heads": 0, "cluster_queries": 20, "permutations": 19, "seed": 0,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= _MOST:
                raise UsageError(f"{name} {value} makes no sense; give at least {low} and at most {_MOST}")
        for name in ("sink_share", "min_share", "min_mass", "fdr", "lone_rate", "target_mass"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name} {getattr(self, name)} is no share; give more than 0 and at most 1")
        if self.focus > MOST_TARGETS:
            raise UsageError(f"focus {self.focus} is more than the {MOST_TARGETS} positions kept of a query; give less")
        if not (self.min_z >= 0 and self.min_rise >= 0 and self.lone_share >= 0):  # nor what is no number
            raise UsageError("min_z, min_rise and lone_share must not be negative")

    def window_of(self, length: int) -> int:
        """W, the tokens back from which on a position is distant, in a trace of ``length`` tokens."""
        if self.window is not None:
            return self.window
        # An eighth, but not so little in a short trace that the sentence before last is distant.
        return max(16, min(64, length // 4), min(128, length // 8))
