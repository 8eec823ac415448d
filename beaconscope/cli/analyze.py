"""``beaconscope analyze``: what revisits what in a trace, which heads do it, and whether their queries cluster."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from beaconscope.cli import output as out
from beaconscope.cli.options import Force, Heads, Json, Layers, Output, Quiet, Verbose, Version
from beaconscope.cli.terminal import Terminal, quieten_libraries
from beaconscope.errors import UsageError

WHAT = "What to analyze"
REVISITS = "What counts as a revisit"
CLUSTERS = "Clusters of queries"
CAUSAL = "Does it matter?"


def analyze(
    traces: Annotated[
        list[Path], typer.Argument(readable=False, metavar="TRACE...", help="A trace; several are compared.")
    ],
    layers: Layers = "all",
    heads: Heads = "all",
    over: Annotated[
        str,
        typer.Option(
            help="Attention over everything recorded, as a full cache has it, or over what the cache held.",
            rich_help_panel=WHAT,
            metavar="everything|held",
        ),
    ] = "everything",
    top: Annotated[int, typer.Option(min=1, help="Rows of each table.", rich_help_panel=WHAT)] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.", rich_help_panel=WHAT)] = 0,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Heads computed side by side; changes no number. Default: one for each core, at most 8.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Tokens back from which on a position is distant. Default: an eighth of the trace, 64 to 128; a "
            "quarter of a short one.",
            rich_help_panel=REVISITS,
        ),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(help="Take so many first positions as sinks instead of detecting them.", rich_help_panel=REVISITS),
    ] = None,
    sink_share: Annotated[
        float, typer.Option(help="Mean attention above which a position is a sink.", rich_help_panel=REVISITS)
    ] = 0.05,
    min_share: Annotated[
        float, typer.Option(help="Share that one distant place must draw, at least (aim).", rich_help_panel=REVISITS)
    ] = 0.3,
    min_mass: Annotated[
        float, typer.Option(help="Distant attention of a global query, at least.", rich_help_panel=REVISITS)
    ] = 0.1,
    min_z: Annotated[
        float, typer.Option(help="Robust z of the aim against the head's own past, at least.", rich_help_panel=REVISITS)
    ] = 3.0,
    min_rise: Annotated[
        float, typer.Option(help="Rise above the upper quartile of that past, at least.", rich_help_panel=REVISITS)
    ] = 0.2,
    history: Annotated[int, typer.Option(help="Steps of that past.", rich_help_panel=REVISITS)] = 256,
    focus: Annotated[
        int,
        typer.Option(help="Positions that hold half of a global query's distant mass.", rich_help_panel=REVISITS),
    ] = 16,
    span: Annotated[
        int, typer.Option(help="Tokens that hold half of a global query's distant mass.", rich_help_panel=REVISITS)
    ] = 32,
    fdr: Annotated[float, typer.Option(help="False discovery rate of revisits.", rich_help_panel=REVISITS)] = 0.05,
    agree_within: Annotated[
        int, typer.Option(help="Tokens within which heads look at one place.", rich_help_panel=REVISITS)
    ] = 8,
    lone_share: Annotated[
        float,
        typer.Option(help="Aim at which one head alone makes a revisit; 1.01 for never.", rich_help_panel=REVISITS),
    ] = 0.9,
    lone_focus: Annotated[
        int, typer.Option(help="Tokens that hold half of a lone look back.", rich_help_panel=REVISITS)
    ] = 8,
    lone_rate: Annotated[
        float, typer.Option(help="Share of steps above which lone looks are noise.", rich_help_panel=REVISITS)
    ] = 0.2,
    target_mass: Annotated[
        float, typer.Option(help="Share of distant mass that target spans hold.", rich_help_panel=REVISITS)
    ] = 0.8,
    shifts: Annotated[int, typer.Option(help="Draws of the time-shifted null.", rich_help_panel=REVISITS)] = 200,
    clusters: Annotated[int, typer.Option(help="Largest number of clusters tried.", rich_help_panel=CLUSTERS)] = 12,
    cluster_heads: Annotated[
        int, typer.Option(help="Query heads whose queries are clustered.", rich_help_panel=CLUSTERS)
    ] = 6,
    cluster_queries: Annotated[
        int, typer.Option(help="Queries of a head that are clustered, at most.", rich_help_panel=CLUSTERS)
    ] = 400,
    permutations: Annotated[int, typer.Option(help="Draws of the permutation test.", rich_help_panel=CLUSTERS)] = 999,
    causal: Annotated[
        bool,
        typer.Option(
            "--causal", help="Ask the model which looks back mattered; needs --model.", rich_help_panel=CAUSAL
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="The recording's model: hub id, local folder or .gguf file.", rich_help_panel=CAUSAL),
    ] = None,
    device: Annotated[str, typer.Option(help="Where it runs.", rich_help_panel=CAUSAL)] = "auto",
    output: Output = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Version = False,
) -> None:
    """Say which tokens revisit earlier thoughts, what they revisit, by which heads, and whether their queries cluster.

    Several traces are compared instead. Nothing is written unless --output names a file.
    """
    for trace in traces:
        out.input_file(trace)
    if causal != (model is not None):
        raise UsageError("--causal and --model belong together; give both or neither")
    if causal and len(traces) > 1:
        raise UsageError("--causal takes one trace; leave it out to compare several")
    if output is not None:
        if len(traces) > 1:
            raise UsageError("--output holds the tokens of one trace; give one trace, or --json for a comparison")
        if output in traces:
            raise UsageError(f"{output} is the trace itself; give --output another name")
        out.writable_file(output, force=force)

    terminal = Terminal(quiet, verbose)
    quieten_libraries(terminal)

    from beaconscope import AnalyzeOptions, load_trace
    from beaconscope.analyze import analyze as run
    from beaconscope.analyze import compare

    options = AnalyzeOptions(
        layers=layers,
        heads=heads,
        over=over,  # type: ignore[arg-type]
        window=window,
        sinks=sinks,
        sink_share=sink_share,
        min_share=min_share,
        min_mass=min_mass,
        min_z=min_z,
        min_rise=min_rise,
        history=history,
        focus=focus,
        span=span,
        fdr=fdr,
        agree_within=agree_within,
        lone_share=lone_share,
        lone_focus=lone_focus,
        lone_rate=lone_rate,
        target_mass=target_mass,
        shifts=shifts,
        clusters=clusters,
        cluster_heads=cluster_heads,
        cluster_queries=cluster_queries,
        permutations=permutations,
        seed=seed,
    )
    loaded = [load_trace(trace) for trace in traces]
    analyses = []
    for opened in loaded:
        with terminal.progress(f"Analyzing {opened.path.name}", "heads") as report:
            analyses.append(run(opened, options, report, jobs=jobs))
    if model is not None:
        from beaconscope import LoadOptions, load_model
        from beaconscope.analyze import add_causal

        terminal.note(f"Loading {model}.")
        # Not flash attention: blinding needs a backend that takes any mask.
        known = load_model(LoadOptions(model, device=device, attn="auto"))
        terminal.note("Feeding it the text again, each sentence blind to what is far back and not blind.")
        with terminal.progress("Blinding", "tokens") as report:
            analyses[0] = add_causal(loaded[0], analyses[0], known.model, report)
    if output is not None:
        analyses[0].save(output)
    if len(analyses) > 1:
        compared = compare(loaded, analyses)
        if json:
            typer.echo(dumps(compared.to_dict(), indent=2, allow_nan=False))
        elif not quiet:
            from beaconscope.cli.analyze_tables import show_comparison

            show_comparison(compared, top)
        return
    if json:
        typer.echo(dumps(analyses[0].to_dict(), indent=2, allow_nan=False))
    elif not quiet:
        from beaconscope.cli.analyze_tables import show_analysis

        show_analysis(analyses[0], top)
    if output is not None:
        # With --json the result on stdout stays JSON.
        next_command = ("beaconscope", "replay", str(traces[0]), "--analysis", str(output))
        Terminal(quiet or json, verbose).wrote(output, *next_command)
