"""``beaconscope replay``: what another budget, number of beacons or method would have kept."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from beaconscope.cli import output as out
from beaconscope.cli.options import (
    WORKERS,
    Address,
    Engine,
    Force,
    Heads,
    Json,
    Layers,
    Output,
    Quiet,
    Verbose,
    Version,
)
from beaconscope.cli.terminal import Terminal, quieten_libraries
from beaconscope.errors import BeaconScopeError, UsageError

if TYPE_CHECKING:
    from beaconscope import Trace
    from beaconscope.kv.policies import Policy
    from beaconscope.models import LoadedModel
    from beaconscope.replay import Job, MeasureOptions

SETTINGS = "Settings (each a list; all combinations are tried)"
WHAT = "What is measured"
RUNNING = "How it runs"
LIVE = "Live check (runs the model)"


def replay(
    traces: Annotated[list[Path], typer.Argument(readable=False, metavar="TRACE...", help="Traces.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST",
            help="Policies, such as beacon,snapkv:window=64 (`beaconscope policies` lists them). Default: beacon.",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Entries kept per KV head. Default: a sixteenth, an eighth and a quarter of the shortest trace, "
            "rounded down to a multiple of 128, or of 8 where that is less than 128, and at least 40.",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    interval: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Entries over the budget. Default: what the policy has; without --budget, of a trace under 2048 "
            "tokens a 64th of it, at least 4.",
            rich_help_panel=SETTINGS,
        ),
    ] = None,
    beacons: Annotated[
        str | None, typer.Option(metavar="LIST", help="Beacons per query head.", rich_help_panel=SETTINGS)
    ] = None,
    recent: Annotated[
        str | None, typer.Option(metavar="LIST", help="Most recent entries that stay.", rich_help_panel=SETTINGS)
    ] = None,
    sinks: Annotated[
        str | None, typer.Option(metavar="LIST", help="First entries that stay.", rich_help_panel=SETTINGS)
    ] = None,
    selector: Annotated[
        str | None, typer.Option(metavar="LIST", help="fps, kmeans, random, none.", rich_help_panel=SETTINGS)
    ] = None,
    query_space: Annotated[
        str | None, typer.Option(metavar="LIST", help="pre-rope, post-rope.", rich_help_panel=SETTINGS)
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling", "--query-pooling", metavar="LIST", help="Over queries: max, mean.", rich_help_panel=SETTINGS
        ),
    ] = None,
    group_pooling: Annotated[
        str | None, typer.Option(metavar="LIST", help="Over query heads: max, mean.", rich_help_panel=SETTINGS)
    ] = None,
    grid: Annotated[
        Path | None,
        typer.Option(
            readable=False, metavar="FILE", help="TOML file with the settings instead.", rich_help_panel=SETTINGS
        ),
    ] = None,
    controls: Annotated[
        bool,
        typer.Option(
            help="Run full, oracle, random eviction and streaming-llm at each budget, and beside beacons as many "
            "recent queries and random ones.",
            rich_help_panel=SETTINGS,
        ),
    ] = True,
    layers: Layers = "all",
    heads: Heads = "all",
    analysis: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            metavar="FILE",
            help="Revisiting tokens from `analyze -o FILE`. Default: analyze the trace now.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    trt: Annotated[
        bool, typer.Option(help="Look at thought-revisiting tokens by themselves.", rich_help_panel=WHAT)
    ] = True,
    hits: Annotated[
        int, typer.Option(help="Most attended positions of a query that count as hits.", rich_help_panel=WHAT)
    ] = 8,
    regret_mass: Annotated[
        float, typer.Option(help="Attention from which on an evicted entry is regretted.", rich_help_panel=WHAT)
    ] = 0.05,
    output_every: Annotated[
        int | None,
        typer.Option(
            help="Output error of every so many queries, and of every revisiting one; 0 for never. Default: 64 in all.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    per_token: Annotated[
        bool,
        typer.Option("--per-token", help="Write the measures of every query too.", rich_help_panel=WHAT),
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes.", rich_help_panel=WORKERS)] = 1,
    engine: Engine = "loky",
    address: Address = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from what a stopped sweep finished.", rich_help_panel=RUNNING)
    ] = False,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1.", rich_help_panel=RUNNING)] = "cpu",
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Run the best settings with the model: on the recorded text, and writing by themselves.",
            rich_help_panel=LIVE,
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Hub id, local folder or .gguf file. Default: what the trace names.",
            rich_help_panel=LIVE,
        ),
    ] = None,
    live_settings: Annotated[
        int, typer.Option(metavar="N", min=1, help="Settings that are run.", rich_help_panel=LIVE)
    ] = 3,
    top: Annotated[int, typer.Option(min=1, help="Settings shown of each budget.")] = 10,
    output: Output = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Version = False,
) -> None:
    """Say what other settings would have kept of the attention in a trace, and whether beacons are worth it.

    A replay is teacher-forced: its queries are those of the recording. Nothing is written unless --output names a file.
    """
    for path in traces:
        out.input_file(path)
    if output is None and (resume or per_token):
        raise UsageError(f"--{'resume' if resume else 'per-token'} needs a file; give --output")
    if output is not None:
        _check_output(output, traces, force=force or resume, per_token=per_token)
    if live and len(traces) > 1:
        raise UsageError("--live runs the text of one trace; give one")
    if model is not None and not live:
        raise UsageError("--model goes with --live; leave it out")
    if analysis is not None:
        out.input_file(analysis)
        if len(traces) > 1 or not trt:
            raise UsageError("--analysis says where one trace is revisited; give one trace, without --no-trt")
    lists = _lists(
        budget=budget,
        interval=interval,
        beacons=beacons,
        recent=recent,
        sinks=sinks,
        selector=selector,
        query_space=query_space,
        query_pooling=pooling,
        group_pooling=group_pooling,
    )
    if grid is not None and (policy or lists):
        raise UsageError("--grid holds all settings; leave out --policy and the lists beside it")

    terminal = Terminal(quiet, verbose)
    quieten_libraries(terminal)
    from beaconscope import load_trace
    from beaconscope.engines import check_engine
    from beaconscope.replay import (
        MeasureOptions,
        Parts,
        answer,
        best_few,
        by_setting,
        sweep,
        to_dict,
        with_controls,
    )
    from beaconscope.replay.grid import never_full

    check_engine(engine, jobs, address)
    parts = None if output is None else Parts(output.with_name(f"{output.name}.parts"))
    if parts is not None and parts.folder.exists() and not (resume or force):
        raise BeaconScopeError(
            f"a stopped sweep left {parts.folder}; give --resume to go on with it, or --force to start anew"
        )
    loaded = [load_trace(path) for path in traces]
    settings = _settings(policy, lists, grid, min(trace.length for trace in loaded))
    if live and not any(each.live and each.evicts for each in settings):
        raise UsageError("none of these settings works in a live cache; add one that does, or leave out --live")
    if idle := never_full(settings, max(trace.length for trace in loaded)):
        terminal.note(idle)
    options = MeasureOptions(hits, regret_mass, output_every)
    if output_every and not all(trace.has_values for trace in loaded):
        raise UsageError("the output error needs values, which were not recorded; leave out --output-every")
    tapped = _load(loaded[0], model, device, terminal) if live else None
    everything = with_controls(settings) if controls else settings
    work: list[Job] = []
    for trace in loaded:
        revisits = _revisits(trace, analysis, terminal) if trt else []
        work += _jobs(trace, everything, revisits, options, layers, heads, per_token, device)
    if parts is not None and not resume:
        parts.remove()
    with terminal.progress("Replaying", "layers") as report:
        found = sweep(
            work,
            workers=jobs,
            engine=engine,
            address=address,
            parts=None if parts is None else parts.folder,
            resume=resume,
            progress=report,
        )
    table = by_setting(found.settings)
    said = answer(found.settings, settings)
    checked = (
        None
        if tapped is None
        else _run_again(tapped, loaded[0], best_few(table, said, settings, live_settings), terminal)
    )
    plain = to_dict(table, said, checked)
    if output is not None and parts is not None:
        from beaconscope.replay.sweep import write_whole

        if per_token:
            write_whole(_tokens_path(output), found.tokens)
        write_whole(output, found.settings, {"beaconscope.replay": dumps(plain, allow_nan=False)})
        parts.remove()
    if json:
        typer.echo(dumps(plain, indent=2, allow_nan=False))
    elif not quiet:
        from beaconscope.cli.replay_tables import show_live, show_replay

        show_replay(table, said, top)
        if checked is not None:
            show_live(table, said, checked)
    if output is not None:
        wrote = Terminal(quiet or json, verbose)
        if per_token:
            wrote.wrote(_tokens_path(output))
        known = () if analysis is None else ("--analysis", str(analysis))
        next_command = ("beaconscope", "report", str(traces[0]), *known, "--replay", str(output))
        wrote.wrote(output, *(next_command if len(traces) == 1 else ()))


def _tokens_path(output: Path) -> Path:
    return output.with_name(f"{output.stem}.tokens{output.suffix}")


def _check_output(output: Path, traces: list[Path], *, force: bool, per_token: bool) -> None:
    for path in (output, _tokens_path(output)) if per_token else (output,):
        if path in traces:
            raise UsageError(f"{path} is the trace itself; give --output another name")
        out.writable_file(path, force=force)


def _lists(**given: str | None) -> dict[str, list[object]]:
    """The lists that were given, as values."""
    found: dict[str, list[object]] = {}
    for name, text in given.items():
        if text is None:
            continue
        pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
        if not pieces:
            raise UsageError(f"--{name.replace('_', '-')} is empty; give values such as 16,64")
        if name in ("budget", "interval", "beacons", "recent", "sinks"):
            wrong = [piece for piece in pieces if not piece.isascii() or not piece.isdigit() or len(piece) > 10]
            if wrong:
                raise UsageError(f"--{name} {wrong[0]!r} is no whole number; give a list such as 16,64")
            found[name] = [int(piece) for piece in pieces]
        else:
            found[name] = list(pieces)
    return found


def _settings(policy: list[str] | None, lists: dict[str, list[object]], grid: Path | None, length: int) -> list[Policy]:
    """What the user wants to compare."""
    from beaconscope.replay import complete_lists, expand, read_grid, split_policies

    if grid is not None:
        return read_grid(grid)
    names = [name for text in policy or ["beacon"] for name in split_policies(text)]
    if not names:
        raise UsageError("--policy is empty; give one, such as beacon")
    return expand(names, complete_lists(names, lists, length))


def _revisits(trace: Trace, analysis: Path | None, terminal: Terminal) -> list[int]:
    """Positions of a trace's thought-revisiting tokens."""
    if analysis is None:
        from beaconscope import AnalyzeOptions
        from beaconscope.analyze import analyze

        with terminal.progress(f"Analyzing {trace.path.name}", "heads") as report:
            # Clusters and their tests are of no use here and take most of the time.
            options = AnalyzeOptions(cluster_heads=0)
            tokens = analyze(trace, options, report).tokens
    else:
        from beaconscope.report import load_findings

        tokens = load_findings(analysis, trace).tokens
    return [int(position) for position in tokens.loc[tokens["revisit"].astype(bool), "position"]]


def _load(trace: Trace, model: str | None, device: str, terminal: Terminal) -> LoadedModel:
    """The model of a trace, in the type that it was recorded in."""
    from beaconscope.models import LoadOptions, load_model
    from beaconscope.record import check_model

    described = trace.metadata.get("model", {})
    known = described.get("id") or ""
    if not model and not known:
        raise BeaconScopeError(f"{trace.path} does not say which model it is of; give --model")
    terminal.note(f"Loading {model or known}.")
    options = LoadOptions(
        model or known,
        revision=described.get("revision") if model in (None, known) else None,
        dtype=described.get("dtype") or "auto",
        device=device,
    )
    loaded = load_model(options)
    check_model(loaded.model, trace)
    return loaded


def _run_again(loaded: LoadedModel, trace: Trace, settings: list[Policy], terminal: Terminal) -> list[dict[str, Any]]:
    """What settings do with the model, as plain values."""
    from beaconscope.record import check_live
    from beaconscope.replay import label

    with terminal.progress("Running with the model", "tokens") as report:
        found = check_live(loaded.model, loaded.tokenizer, trace, settings, report)
    return [{"setting": label(each.policy), **each.to_dict()} for each in found]


def _jobs(
    trace: Trace,
    settings: list[Policy],
    revisits: list[int],
    options: MeasureOptions,
    layers: str,
    heads: str,
    per_token: bool,
    device: str,
) -> list[Job]:
    from beaconscope.replay import make_jobs
    from beaconscope.selection import select

    wanted = set(trace.layers if layers == "all" else select(layers, max(trace.layers) + 1, "layers"))
    count = max(head for _, head in trace.heads) + 1
    chosen = set(select(heads, count, "heads"))
    pairs = [(layer, head) for layer, head in trace.heads if layer in wanted and head in chosen]
    if not pairs:
        recorded = ", ".join(map(str, trace.layers))
        raise UsageError(f"none of these layers and heads is in {trace.path}, which has layers {recorded}")
    return make_jobs(
        trace, settings, revisits=revisits, options=options, heads=pairs, per_token=per_token, device=device
    )
