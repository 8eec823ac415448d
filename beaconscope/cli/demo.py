"""``beaconscope demo``: the whole way on the bundled model, offline."""

from __future__ import annotations

import random
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from beaconscope.cli import output as out
from beaconscope.cli.options import Force, Quiet, Verbose, Version
from beaconscope.cli.terminal import Terminal, quieten_libraries
from beaconscope.errors import BeaconScopeError

if TYPE_CHECKING:
    from beaconscope.reasoner import Problem, Recall
    from beaconscope.trace import Trace

MODEL = "tiny-reasoner"
BUDGET = 128
INTERVAL = 32
CACHES = (
    "full",
    f"beacon:budget={BUDGET},interval={INTERVAL}",
    f"random:budget={BUDGET},interval={INTERVAL}",
    f"streaming-llm:budget={BUDGET}",
)
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
    """Record the bundled model under four caches, and show what each of them lost: offline, in about a minute.

    The model solves a problem by looking back, and its task knows for every token where it has to look. So one sees
    what a cache had evicted of what was needed, and whether the answer is right.
    """
    terminal = Terminal(quiet, verbose)
    quieten_libraries(terminal)
    _make_folder(output, force)

    from beaconscope import LoadOptions, RecordOptions, load_model, parse_policy, record
    from beaconscope.reasoner import SIZES, make_problem, truth

    problem = make_problem(SIZES[size], random.Random(seed))
    prompt = output / "problem.txt"
    prompt.write_text(problem.text + "\n", encoding="utf-8")
    limit = SIZES[size].trace_length + 16
    loaded = load_model(LoadOptions(MODEL, device="cpu"))
    terminal.note(f"The problem, {SIZES[size].prompt_length} tokens, in {prompt}:\n")
    terminal.note(_wrapped(problem.text) + "\n")
    commands, rows = [], []
    for cache in CACHES:
        policy = parse_policy(cache)
        path = output / f"{policy.name}.parquet"
        options = RecordOptions(policy=policy, max_new_tokens=limit, layers="all")
        with terminal.progress(f"Recording with the cache {policy.name}", "tokens") as report:
            trace = record(
                loaded.model,
                loaded.tokenizer,
                problem.text,
                options,
                output=path,
                force=force,
                model_id=MODEL,
                progress=report,
            )
        if policy.name == "full":
            terminal.note(f"What the model writes with a full cache, {trace.length - trace.prompt_length} tokens:\n")
            terminal.note(_wrapped(_shortened(trace)) + "\n")
            needed = truth(trace)
        rows.append((policy.name, *_outcome(trace, problem, needed)))
        commands.append(
            f"beaconscope record --model {MODEL} --prompt {shlex.quote(str(prompt))} --cache {cache} "
            f"--layers all -n {limit} -o {shlex.quote(str(path))}"
        )
    terminal.table(_findings(rows, len(needed)))
    terminal.note("\nWhat was run; take any of them further:\n")
    for command in [*commands, f"beaconscope analyze {shlex.quote(str(output / 'full.parquet'))}"]:
        terminal.note(textwrap.fill(command, _WIDTH, subsequent_indent="    ", break_on_hyphens=False))
    terminal.note("")
    terminal.wrote(output, "beaconscope", "analyze", str(output / "full.parquet"))


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


def _outcome(trace: Trace, problem: Problem, needed: Sequence[Recall]) -> tuple[str, str, float]:
    """The answer, whether it is right, and the share of needed places that the cache still held when they were needed.

    ``needed`` are the recalls of the right chain; a trace that went wrong is asked for those it came to.
    """
    from beaconscope.reasoner import solve

    words = [str(token).strip() for token in trace.tokens.token[trace.prompt_length :]]
    said = words[words.index("answer") + 2] if "answer" in words[:-2] else "none"
    right = said == str(solve(problem).answer)
    held, asked = 0, 0
    for recall in needed:
        looks = recall.position - 1
        if looks >= trace.length:
            continue
        for layer, head in trace.heads:
            kept = set(trace.kept(layer, head, looks - 1).tolist())
            held += any(kept.issuperset(range(*source)) for source in recall.sources)
            asked += 1
    return said, "right" if right else "wrong", held / asked if asked else float("nan")


def _findings(rows: Sequence[tuple[str, str, str, float]], recalls: int) -> list[tuple[str, str]]:
    """What each cache came to, in words."""
    found = []
    for name, said, verdict, share in rows:
        size = "every entry" if name == "full" else f"{BUDGET} entries"
        found.append(
            (name, f"answer {said}, {verdict}; of {size}, {share:.0%} of the {recalls} places needed were still there")
        )
    return found


def _shortened(trace: Trace) -> str:
    """The generated text, its middle left out where it is long."""
    words = [str(token).strip() for token in trace.tokens.token[trace.prompt_length :]]
    if len(words) > 130:
        words = [*words[:90], "[...]", *words[-30:]]
    return " ".join(words)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")
