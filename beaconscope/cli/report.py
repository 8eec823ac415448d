"""``beaconscope report``: a trace as one HTML page that needs no network."""

from __future__ import annotations

import re
import shlex
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from beaconscope.cli import output as out
from beaconscope.cli.options import Force, Output, Quiet, Verbose, Version, unicode_option
from beaconscope.cli.terminal import Terminal, quieten_libraries
from beaconscope.errors import BeaconScopeError, UsageError
from beaconscope.files import valid_unicode
from beaconscope.units import in_bytes

if TYPE_CHECKING:
    from beaconscope.report import Findings, Subject
    from beaconscope.trace import Trace

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|M|G)?B?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}


def report(
    traces: Annotated[
        list[Path], typer.Argument(readable=False, metavar="TRACE [TRACE]", help="A trace, or two side by side.")
    ],
    analysis: Annotated[
        list[Path] | None,
        typer.Option(
            readable=False, metavar="FILE", help="From `analyze -o FILE`, one for each trace. Default: analyze now."
        ),
    ] = None,
    replay: Annotated[
        list[Path] | None,
        typer.Option(readable=False, metavar="FILE", help="From `replay -o FILE`, one for each trace."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page. Default: the trace's name.")] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave out the text: a mark in place of every token.")
    ] = False,
    max_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the page, at most, such as 20MB; the weakest attention goes.")
    ] = "10MB",
    umap_heads: Annotated[
        int, typer.Option(min=0, help="Query heads laid out by UMAP, those that revisit most; the others get PCA.")
    ] = 6,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn at random.")] = 0,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    output: Output = None,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Version = False,
) -> None:
    """Show a trace as one HTML page: what is revisited, from where, by which heads, and what the cache lost."""
    check_inputs(traces, analysis, replay)
    if len(traces) > 2:
        raise UsageError(f"{len(traces)} traces are too many for a page; give one or two")
    most = _bytes(max_size)
    page = output or Path(f"{traces[0].stem}.html")
    if page in [*traces, *(analysis or []), *(replay or [])]:
        raise UsageError(f"{page} is read here; give --output another name")
    out.writable_file(page, force=force)
    terminal = Terminal(quiet, verbose)
    quieten_libraries(terminal)

    from beaconscope.report import ReportOptions, build_report
    from beaconscope.report.page import write_page

    if title is not None:
        title = unicode_option("--title", title)
    options = ReportOptions(title=title, redact=redact, max_bytes=most, space_heads=umap_heads, seed=seed)
    subjects = read_subjects(traces, analysis, replay, terminal)
    names = [valid_unicode(path.name) for path in traces]
    command = shlex.join(["beaconscope", "report", *names, "--seed", str(seed)])
    with terminal.progress("Drawing", "heads") as progress:
        html = build_report(subjects, options, command=command, progress=progress)
    write_page(page, html)
    terminal.detail(in_bytes(len(html.encode())))
    # The charts are to be of the same analysis and replay.
    known = [("--analysis", analysis), ("--replay", replay)]
    given = [word for name, paths in known if paths for word in (name, str(paths[0]))]
    terminal.wrote(page, "beaconscope", "figures", str(traces[0]), *given)
    if open_page:
        webbrowser.open(page.resolve().as_uri())


def check_inputs(traces: list[Path], analysis: list[Path] | None, replay: list[Path] | None) -> None:
    """Check files before anything is read.

    Raises
    ------
    BeaconScopeError
        Where one cannot be read.
    UsageError
        Where there are not as many analyses or replays as traces.
    """
    for path in [*traces, *(analysis or []), *(replay or [])]:
        out.input_file(path)
    for name, given in (("analysis", analysis), ("replay", replay)):
        if given and len(given) != len(traces):
            raise UsageError(
                f"--{name} is given {len(given)} times for {len(traces)} traces; give one for each, in order"
            )


def read_subjects(
    traces: list[Path], analysis: list[Path] | None, replay: list[Path] | None, terminal: Terminal
) -> list[Subject]:
    """Read what is known of each trace, and analyze those of which no analysis is given."""
    from beaconscope import load_trace
    from beaconscope.report import Subject, load_replay

    subjects = []
    for number, path in enumerate(traces):
        trace = load_trace(path)
        subjects.append(
            Subject(
                trace,
                _findings(trace, analysis[number] if analysis else None, terminal),
                truth=_truth(trace),
                replay=load_replay(replay[number]) if replay else None,
            )
        )
    return subjects


def _findings(trace: Trace, path: Path | None, terminal: Terminal) -> Findings:
    from beaconscope.report import findings_of, load_findings

    if path is not None:
        return load_findings(path, trace)
    from beaconscope.analyze import analyze

    with terminal.progress(f"Analyzing {trace.path.name}", "heads") as progress:
        return findings_of(analyze(trace, progress=progress))


def _truth(trace: Trace) -> list[dict[str, Any]] | None:
    """What each token had to look back at, where the trace is one of the bundled reasoner."""
    from beaconscope.reasoner import truth

    if "tiny-reasoner" not in trace.model_id:
        return None
    try:
        recalls = truth(trace)
    except BeaconScopeError:
        return None
    return [
        {"position": recall.position, "kind": recall.kind, "sources": [list(span) for span in recall.sources]}
        for recall in recalls
    ]


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or len(match[1]) > 20:
        raise UsageError(f"--max-size {text!r} is no size; give one such as 10MB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])
