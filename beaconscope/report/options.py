"""The settings of a report."""

from __future__ import annotations

from dataclasses import dataclass

from beaconscope.errors import UsageError


@dataclass(frozen=True)
class ReportOptions:
    """The settings of a report, checked where they are made.

    Parameters
    ----------
    title
        Heading of the page; None takes the trace's file name.
    redact
        Put a mark in place of every token's text, and leave out the prompt and names of files.
    max_bytes
        Size of the page, at most. What gives way is the weakest attention.
    space_heads
        Query heads whose query space is laid out by UMAP, those that revisit most; the others get PCA.
    fit_queries
        Queries that UMAP is fitted on, at most: revisits and those that beacons were taken from, then others. The
        rest of the shown ones are placed by the fitted map.
    shown_queries
        Queries shown of a head, at most.
    seed
        Of UMAP and of every sample.

    Raises
    ------
    UsageError
        For values out of range.
    """

    title: str | None = None
    redact: bool = False
    max_bytes: int = 10_000_000
    space_heads: int = 6
    fit_queries: int = 1200
    shown_queries: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_bytes < 1_000_000:
            raise UsageError(f"a report of {self.max_bytes} bytes cannot hold its own program; give at least 4 MB")
        for name, low in (("space_heads", 0), ("fit_queries", 20), ("shown_queries", 20), ("seed", 0)):
            if not low <= getattr(self, name) < 1 << 31:
                raise UsageError(f"{name} {getattr(self, name)} makes no sense; give at least {low}, below 2^31")
        if self.fit_queries > 4000:
            raise UsageError(f"fit_queries {self.fit_queries} is more than 4000, which UMAP takes minutes for")
