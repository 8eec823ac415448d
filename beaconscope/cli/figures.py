"""``beaconscope figures``: the main charts of a trace as files for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from beaconscope.cli import output as out
from beaconscope.cli.options import Force, Quiet, TraceFile, Verbose, Version
from beaconscope.cli.report import check_inputs, read_subjects
from beaconscope.cli.terminal import Terminal, quieten_libraries
from beaconscope.errors import BeaconScopeError


def figures(
    trace: TraceFile,
    analysis: Annotated[
        Path | None, typer.Option(readable=False, metavar="FILE", help="From `analyze -o FILE`. Default: analyze now.")
    ] = None,
    replay: Annotated[Path | None, typer.Option(readable=False, metavar="FILE", help="From `replay -o FILE`.")] = None,
    png: Annotated[bool, typer.Option("--png", help="A PNG beside each SVG; needs Chromium on the PATH.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn at random.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder of the files; made where missing.")
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Version = False,
) -> None:
    """Write the main charts of a trace as SVG: overview, attention, heads, queries, beacons, trade-off."""
    analyses, replays = ([path] if path else None for path in (analysis, replay))
    check_inputs([trace], analyses, replays)
    folder = output or Path(f"{trace.stem}-figures")
    out.writable_folder(folder)
    if folder.exists() and any(folder.iterdir()) and not force:
        raise BeaconScopeError(f"{folder} is not empty; give --force to overwrite figures in it, or another --output")
    terminal = Terminal(quiet, verbose)
    quieten_libraries(terminal)

    from beaconscope.report import ReportOptions, write_figures

    subject = read_subjects([trace], analyses, replays, terminal)[0]
    folder.mkdir(parents=True, exist_ok=True)
    options = ReportOptions(space_heads=1, seed=seed)
    with terminal.progress("Drawing", "heads") as progress:
        written = write_figures(subject, folder, options, png=png, progress=progress)
    for path in written:
        terminal.detail(str(path))
    terminal.wrote(folder)
