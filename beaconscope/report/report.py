"""Make a report: collect, fit into the size that was asked for, and put the page together."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from beaconscope import __version__
from beaconscope.errors import BeaconScopeError
from beaconscope.files import valid_unicode
from beaconscope.progress import Progress
from beaconscope.report.collect import Collected, collect
from beaconscope.report.findings import Findings
from beaconscope.report.looks import NEAR_WEIGHT, Looks
from beaconscope.report.options import ReportOptions
from beaconscope.report.page import render
from beaconscope.trace import Trace

_HIT_BYTES = 3.6
"""Of the page for each hit: head, distance and mass, compressed, in base64. The first guess; then it is measured."""
_FULL_SHARE = 0.3
"""Of the room for hits that those of a full cache take."""
_ROUNDS = 6
"""Pages that are put together to find how many hits fit."""


@dataclass(frozen=True)
class Subject:
    """A trace with what is known of it."""

    trace: Trace
    findings: Findings
    truth: list[dict[str, Any]] | None = None
    """What each token had to look back at, where that is known."""
    replay: dict[str, Any] | None = None
    """JSON of a replay."""


def build_report(
    subjects: Sequence[Subject], options: ReportOptions, *, command: str = "", progress: Progress | None = None
) -> str:
    """The page of one trace, or of two side by side.

    Parameters
    ----------
    subjects
        One or two.
    options
        Settings.
    command
        That makes this report; shown in it.
    progress
        Called after each KV head of each trace.

    Raises
    ------
    BeaconScopeError
        Where the page cannot be made as small as it has to be.
    """
    total = sum(len(subject.trace.heads) for subject in subjects)
    collected: list[Collected] = []
    done = 0
    for subject in subjects:

        def count(of_this: int, _: int | None, before: int = done) -> None:
            if progress is not None:
                progress(before + of_this, total)

        collected.append(
            collect(
                subject.trace, subject.findings, options, truth=subject.truth, replay=subject.replay, progress=count
            )
        )
        done += len(subject.trace.heads)
    title = options.title or " and ".join(
        "a redacted trace" if options.redact else valid_unicode(subject.trace.path.name) for subject in subjects
    )
    about = {
        "version": __version__,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "command": "" if options.redact else command,
        "title": title,
    }
    return _fitted(title, subjects, collected, about, options.max_bytes)


def _fitted(
    title: str, subjects: Sequence[Subject], collected: Sequence[Collected], about: dict[str, Any], most: int
) -> str:
    """The page with as many hits as there is room for in ``most`` bytes.

    Raises
    ------
    BeaconScopeError
        Where there is no room for the page without any.
    """
    without_hits = _page(title, subjects, collected, about, 0)
    bare = len(without_hits.encode())
    if bare > most:
        raise BeaconScopeError(
            f"the report takes {bare / 1e6:.1f} MB without any attention in it; give --max-size {bare / 1e6 + 1:.0f}MB"
        )
    there = sum(len(each.recorded) + len(each.full or ()) for each in collected)
    count = min(there, int((most - bare) * 0.97 / _HIT_BYTES))
    for _ in range(_ROUNDS):
        page = _page(title, subjects, collected, about, count)
        size = len(page.encode())
        if size <= most:
            return page
        per_hit = (size - bare) / max(1, count)
        count = int((most - bare) * 0.95 / per_hit)
    return without_hits


def _page(
    title: str, subjects: Sequence[Subject], collected: Sequence[Collected], about: dict[str, Any], count: int
) -> str:
    """The page with at most ``count`` hits in all."""
    traces = []
    for subject, each in zip(subjects, collected, strict=True):
        pack = each.pack.copy()
        left_out = list(each.left_out)
        window = int(each.about["summary"]["window"])
        sinks = [row["position"] for row in each.about["summary"]["sinks"]]
        room = count // len(collected)
        sets = [("recorded", each.recorded, room)]
        if each.full is not None:
            full_room = min(len(each.full), max(int(room * _FULL_SHARE), room - len(each.recorded)))
            sets = [("recorded", each.recorded, room - full_room), ("full", each.full, full_room)]
        heads = len(each.about["heads"])
        for name, looks, most in sets:
            kept, least = looks.strongest(most, window, sinks)
            kept.add_to(pack, name, subject.trace.length, heads)
            if least:
                left_out.append(_left_out(name, looks, kept, least))
        plain = each.about | {"manifest": pack.manifest, "left_out": left_out}
        traces.append((plain, pack.encode()))
    return render(title, traces, about)


def _left_out(name: str, looks: Looks, kept: Looks, least: float) -> str:
    whose = "recorded hits" if name == "recorded" else "hits of a full cache"
    if not len(kept):
        return f"all {len(looks):,} {whose}, for want of room"
    return (
        f"{len(looks) - len(kept):,} of {len(looks):,} {whose}: those of less than {least:.3f} of a query's attention, "
        f"or {min(1.0, least / NEAR_WEIGHT):.3f} where they go to sinks or nearby"
    )
