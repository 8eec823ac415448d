"""``beaconscope demo``: the whole way on the bundled model, offline."""

from __future__ import annotations

import contextlib
import random
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from beaconscope.cli import output as out
from beaconscope.cli.options import Force, Quiet, Verbose, Version
from beaconscope.cli.terminal import Terminal, quieten_libraries
from beaconscope.errors import BeaconScopeError

if TYPE_CHECKING:
    from beaconscope.reasoner import Problem
    from beaconscope.trace import Trace

MODEL = "tiny-reasoner"
BUDGETS = {"250": 128, "500": 256, "1000": 512}
"""Entries of each head at each size: two fifths of what a full cache holds at the end."""
INTERVAL = 32
POLICIES = "beacon,snapkv,h2o,keydiff"
_WIDTH = 78


def demo(
    size: Annotated[
        Literal["250", "500", "1000"], typer.Option(help="About how many tokens the model is going to write.")
    ] = "500",
    seed: Annotated[int, typer.Option(min=0, help="Of the problem.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of what is written.")] = Path(
        "beaconscope-demo"
    ),
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Version = False,
) -> None:
    """Record, analyze, replay and report the bundled model, and show what was found: offline, in about a minute.

    The model solves a problem by looking back, and its task knows for every token where it has to look. So what the
    tool finds can be held against the truth.
    """
    terminal = Terminal(quiet, verbose)
    quieten_libraries(terminal)
    _make_folder(output, force)

    from beaconscope.reasoner import SIZES, make_problem
    from beaconscope.report import load_findings, load_replay
    from beaconscope.trace import load_trace

    problem = make_problem(SIZES[size], random.Random(seed))
    prompt = output / "problem.txt"
    prompt.write_text(problem.text + "\n", encoding="utf-8")
    terminal.note(f"The problem, {SIZES[size].prompt_length} tokens, in {prompt}:\n\n{_wrapped(problem.text)}\n")

    with _maps_compiled() as compiled:
        for command in _commands(output, BUDGETS[size], SIZES[size].trace_length + 16):
            if command[0] == "report":
                compiled.wait()
            _run(command, terminal, force=force)
    full = load_trace(output / "full.parquet")
    beacon = load_trace(output / "beacon.parquet")
    terminal.note(
        f"What the model wrote with a full cache, {full.length - full.prompt_length} tokens:\n\n"
        f"{_wrapped(_shortened(full))}\n"
    )
    analysis = load_findings(output / "analysis.parquet", beacon).result
    replay = load_replay(output / "replay.parquet")
    terminal.table(
        [
            ("full cache", _outcome(full, problem)),
            ("BeaconKV", f"{_outcome(beacon, problem)}, with {BUDGETS[size]} of {full.length} entries"),
            ("revisits", _agreement(beacon, analysis)),
            ("clusters", analysis["verdict"]["text"]),
            ("lost", f"share of the revisits' attention that {BUDGETS[size]} entries would have lost:"),
            *(("", line) for line in _losses(replay)),
            ("answer", replay["answer"]["text"]),
        ]
    )
    terminal.wrote(output / "report.html")


def _commands(folder: Path, budget: int, limit: int) -> list[list[str]]:
    """What the demo runs, as a user would type it."""
    names = ("problem.txt", "full.parquet", "beacon.parquet", "analysis.parquet", "replay.parquet", "report.html")
    prompt, full, beacon, analysis, replay, report = (str(folder / name) for name in names)
    record = ["record", "--model", MODEL, "--prompt", prompt, "--layers", "all", "-n", str(limit)]
    grid = ["--policy", POLICIES, "--budget", str(budget), "--interval", str(INTERVAL)]
    return [
        [*record, "--cache", "full", "-o", full],
        [*record, "--cache", f"beacon:budget={budget},interval={INTERVAL}", "-o", beacon],
        ["analyze", beacon, "-o", analysis],
        ["replay", beacon, "--analysis", analysis, *grid, "-o", replay],
        ["report", beacon, "--analysis", analysis, "--replay", replay, "-o", report],
    ]


@contextlib.contextmanager
def _maps_compiled() -> Iterator[subprocess.Popen[bytes]]:
    """A process that compiles what the report is going to need, beside the first commands; it ends with the block."""
    code = "from beaconscope.report.space import compile_umap; compile_umap()"
    silent = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, "-P", "-c", code], stdin=silent, stdout=silent, stderr=silent)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _run(command: Sequence[str], terminal: Terminal, *, force: bool) -> None:
    """Run one of our own commands in this process, without its words.

    Raises
    ------
    typer.Exit
        With its exit code, where it failed; it has said why.
    """
    from beaconscope.cli import app

    terminal.note(f"$ {_typed(['beaconscope', *command])}")
    begin = time.monotonic()
    whole = [*command, *(["--force"] if force else []), "--quiet"]
    code = typer.main.get_command(app).main(whole, prog_name="beaconscope", standalone_mode=False)
    if code:
        raise typer.Exit(int(code))
    terminal.note(f"  {time.monotonic() - begin:.0f} s\n")


def _typed(command: Sequence[str]) -> str:
    """A command as a user would type it, over several lines where it is long."""
    lines = [""]
    for word in map(shlex.quote, command):
        if lines[-1] and len(lines[-1]) + len(word) > _WIDTH - 4:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _make_folder(folder: Path, force: bool) -> None:
    """Make the folder of the demo.

    Raises
    ------
    BeaconScopeError
        Where something is there and ``force`` is not given, or it cannot be written.
    """
    if folder.exists():
        if not folder.is_dir():
            raise BeaconScopeError(f"{folder} is a file; give another --output")
        if any(folder.iterdir()) and not force:
            raise BeaconScopeError(f"{folder} exists; give --force to overwrite the demo in it, or another --output")
        return
    out.writable_file(folder, force=force)
    folder.mkdir()


def _outcome(trace: Trace, problem: Problem) -> str:
    """The answer, and whether it is right; a chain that has lost its way goes on up to the limit without one."""
    from beaconscope.reasoner import solve

    right = str(solve(problem).answer)
    words = [str(token).strip() for token in trace.tokens.token[trace.prompt_length :]]
    if "answer" not in words[:-2]:
        return f"no answer in {len(words)} tokens, then stopped (it is {right})"
    said = words[words.index("answer") + 2]
    return f"answer {said}, right" if said == right else f"answer {said}, wrong (it is {right})"


def _agreement(trace: Trace, analysis: dict[str, Any]) -> str:
    """The revisits that were found, against the truth."""
    from beaconscope.reasoner import agreement, truth

    summary = analysis["summary"]
    found = [row["position"] for row in analysis["revisits"]]
    first = summary["length"] - summary["steps"] - summary["missing_steps"]
    seen = agreement(truth(trace), found, window=summary["window"], first=first)
    return (
        f"{len(found)} found: {seen.right} of the {seen.wanted} looks that the task has farther back than "
        f"{summary['window']} tokens, {seen.near} of its nearer ones, and {seen.found - seen.right} that it does not "
        "have"
    )


def _losses(replay: dict[str, Any]) -> list[str]:
    """Each setting with what it loses, least first."""
    figure = replay["ranked_by"]
    rows = [row for row in replay["settings"] if row["policy"] != "full"]
    rows.sort(key=lambda row: row[figure], reverse=True)
    return [f"{1 - row[figure]:5.1%}  {row['setting']}" for row in rows]


def _shortened(trace: Trace) -> str:
    """The generated text, its middle left out where it is long."""
    words = [str(token).strip() for token in trace.tokens.token[trace.prompt_length :]]
    if len(words) > 130:
        words = [*words[:90], "[...]", *words[-30:]]
    return " ".join(words)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")
