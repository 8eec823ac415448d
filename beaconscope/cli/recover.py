"""``beaconscope recover``: make a trace of a recording that was cut."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from beaconscope.cli import output as out
from beaconscope.cli.options import Force, Output, Quiet, Verbose, Version
from beaconscope.cli.terminal import Terminal
from beaconscope.errors import UsageError


def recover(
    trace: Annotated[
        Path,
        typer.Argument(
            readable=False, metavar="TRACE", help="What the recording was to write, or the journal beside it."
        ),
    ],
    output: Output = None,
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Version = False,
) -> None:
    """Make a trace of a recording that was cut: everything that every layer had written."""
    from beaconscope.trace import journal_path, load_trace
    from beaconscope.trace import recover as recover_trace

    terminal = Terminal(quiet, verbose)
    if not trace.name:
        raise UsageError(f"{trace} names no file; give the output of an interrupted recording")
    if output is not None:
        out.writable_file(output, force=force)
    has_journal = trace.is_dir() or journal_path(trace).is_dir()
    with terminal.progress("Recovering", "rows") as report:
        path = recover_trace(trace, output=output, force=force, progress=report)
    if not has_journal:
        terminal.note(f"{path} is finished; there was nothing to recover")
        return
    recovered = load_trace(path)
    if not recovered.whole:
        terminal.note(f"{recovered.length} tokens; the trace is marked as cut: {recovered.cut_reason}")
    terminal.wrote(path, "beaconscope", "info", str(path))
