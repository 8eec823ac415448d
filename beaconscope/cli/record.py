"""``beaconscope record``: run a model on a prompt and write what its attention did."""

from __future__ import annotations

from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from beaconscope.cli import output as out
from beaconscope.cli.ending import ending
from beaconscope.cli.errors import INTERRUPTED
from beaconscope.cli.options import (
    WORKERS,
    Address,
    Engine,
    Force,
    Json,
    Output,
    Quiet,
    Verbose,
    Version,
    unicode_option,
)
from beaconscope.cli.terminal import Terminal, quieten_libraries
from beaconscope.engines import check_engine
from beaconscope.errors import UsageError

if TYPE_CHECKING:
    from beaconscope.kv.policies import BeaconKV, Policy

MODEL = "Model"
PROMPT = "Prompt"
GENERATION = "Generation"
CACHE = "KV cache"
TRACE = "Trace"

_NOT_JSON = {"True": "true", "False": "false", "None": "null", "TRUE": "true", "FALSE": "false", "NULL": "null"}
"""What is likely to be meant by words that JSON reads as text."""

# Options of a policy default to None, which leaves the default to the policy; help shows that of BeaconKV.


def record(
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="Hub id, local folder or .gguf file.", rich_help_panel=MODEL),
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Branch, tag or commit on the hub.", rich_help_panel=MODEL)
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        typer.Option(help="Type to load the weights in; auto is that of the checkpoint.", rich_help_panel=MODEL),
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.", metavar="DEVICE", rich_help_panel=MODEL)
    ] = "auto",
    device_map: Annotated[
        str | None,
        typer.Option(metavar="MAP", help="Spread the model over devices, for instance auto.", rich_help_panel=MODEL),
    ] = None,
    attn: Annotated[
        Literal["auto", "sdpa", "eager", "flash_attention_2"],
        typer.Option(help="Attention backend; auto is sdpa where the model has it.", rich_help_panel=MODEL),
    ] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the model brings.", rich_help_panel=MODEL)
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Text file with the prompt; - is stdin.", rich_help_panel=PROMPT),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='Many prompts, an object with "id" and "prompt" on each line; one trace each, in a folder. '
            "What is finished is skipped.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are run together.", rich_help_panel=PROMPT)] = 1,
    jobs: Annotated[
        int,
        typer.Option(
            help="Processes for many prompts, each with a model (and a GPU) of its own.", rich_help_panel=WORKERS
        ),
    ] = 1,
    engine: Engine = "loky",
    address: Address = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.", rich_help_panel=PROMPT)] = None,
    template_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Variable of the chat template, such as enable_thinking=false; VALUE is JSON, or else text.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Feed the prompt without the chat template.", rich_help_panel=PROMPT)
    ] = False,
    completion: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Teacher-force this chain of thought instead of generating.", rich_help_panel=PROMPT
        ),
    ] = None,
    think_open: Annotated[
        str, typer.Option(metavar="TEXT", help="Where thinking starts.", rich_help_panel=PROMPT)
    ] = "<think>",
    think_close: Annotated[
        str, typer.Option(metavar="TEXT", help="Where thinking ends.", rich_help_panel=PROMPT)
    ] = "</think>",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Stop after this many.", rich_help_panel=GENERATION)
    ] = 1024,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sample at this temperature; 0 is greedy decoding.", show_default="0", rich_help_panel=GENERATION
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Sample from this many of the most likely tokens; 0 is off.",
            show_default="0",
            rich_help_panel=GENERATION,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the most likely tokens that together have this probability; 1 is off.",
            show_default="1",
            rich_help_panel=GENERATION,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from tokens with at least this fraction of the highest probability; 0 is off.",
            show_default="0",
            rich_help_panel=GENERATION,
        ),
    ] = None,
    model_sampling: Annotated[
        bool,
        typer.Option(
            "--model-sampling",
            help="Sample as the model's generation config recommends; the options above replace its values.",
            rich_help_panel=GENERATION,
        ),
    ] = False,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Lower the scores of tokens that occurred, also in greedy decoding; 1 is off.",
            show_default="the model's",
            rich_help_panel=GENERATION,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Random seed of sampling, and of a cache policy that draws.",
            show_default="0",
            rich_help_panel=GENERATION,
        ),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Feed the prompt N tokens at a time and compress in between, which bounds memory.",
            rich_help_panel=GENERATION,
        ),
    ] = None,
    cache: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="beacon, full, streaming-llm, random, h2o, scissorhands, fastgen, snapkv, tova, r-kv, rpc, "
            "lazy-eviction, keydiff, knorm or expected-attention, or NAME:param=value,... With full nothing is evicted "
            "and the beacons run as a shadow. `beaconscope policies` lists the defaults of each.",
            rich_help_panel=CACHE,
        ),
    ] = "beacon",
    budget: Annotated[
        int | None,
        typer.Option(help="B, entries kept per KV head.", show_default="1024", rich_help_panel=CACHE),
    ] = None,
    interval: Annotated[
        int | None,
        typer.Option(
            help="I, new entries before the next compression.",
            show_default="128 with beacon",
            rich_help_panel=CACHE,
        ),
    ] = None,
    beacons: Annotated[
        int | None,
        typer.Option(help="K, beacons per query head, 0 to 256.", show_default="16", rich_help_panel=CACHE),
    ] = None,
    recent: Annotated[
        int | None,
        typer.Option(
            help="R, newest queries that observe and newest entries that stay.",
            show_default="16 with beacon",
            rich_help_panel=CACHE,
        ),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(help="First positions that always stay.", show_default="0 with beacon", rich_help_panel=CACHE),
    ] = None,
    selector: Annotated[
        Literal["fps", "kmeans", "random", "none"] | None,
        typer.Option(help="How beacons are chosen from past queries.", show_default="fps", rich_help_panel=CACHE),
    ] = None,
    query_space: Annotated[
        Literal["pre-rope", "post-rope"] | None,
        typer.Option(help="Where queries are compared.", show_default="pre-rope", rich_help_panel=CACHE),
    ] = None,
    beacon_rotation: Annotated[
        Literal["current", "own"] | None,
        typer.Option(help="Position that beacons are rotated to.", show_default="current", rich_help_panel=CACHE),
    ] = None,
    query_pooling: Annotated[
        Literal["max", "mean"] | None,
        typer.Option(
            "--pooling",
            "--query-pooling",
            help="Pooling over observation queries.",
            show_default="max",
            rich_help_panel=CACHE,
        ),
    ] = None,
    group_pooling: Annotated[
        Literal["max", "mean"] | None,
        typer.Option(help="Pooling over the query heads of a KV head.", show_default="max", rich_help_panel=CACHE),
    ] = None,
    pool_low: Annotated[
        int | None,
        typer.Option(help="Queries left when the pool is thinned.", show_default="max(K, 32)", rich_help_panel=CACHE),
    ] = None,
    pool_high: Annotated[
        int | None,
        typer.Option(
            help="Queries at which the pool is thinned.", show_default="pool-low + 128", rich_help_panel=CACHE
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Layers to record: auto (up to six, spread over the depth), all, 0,8,16 or 0-8:2.",
            rich_help_panel=TRACE,
        ),
    ] = "auto",
    heads: Annotated[
        str, typer.Option(metavar="LIST", help="KV heads to record, written like --layers.", rich_help_panel=TRACE)
    ] = "all",
    hits: Annotated[
        int, typer.Option(help="Most attended positions logged per query head.", rich_help_panel=TRACE)
    ] = 8,
    values: Annotated[
        bool, typer.Option("--values/--no-values", help="Record values beside keys.", rich_help_panel=TRACE)
    ] = True,
    dtype_trace: Annotated[
        Literal["auto", "float16", "float32"],
        typer.Option(help="Type of the vectors; auto is exact for the model's own.", rich_help_panel=TRACE),
    ] = "auto",
    sink_positions: Annotated[
        int, typer.Option(help="First positions that count as sinks.", rich_help_panel=TRACE)
    ] = 4,
    local_window: Annotated[int, typer.Option(help="Tokens back that count as local.", rich_help_panel=TRACE)] = 128,
    output: Output = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Version = False,
) -> None:
    """Run a model on a prompt and write a trace of its attention, compressing the KV cache on the way."""
    terminal = Terminal(quiet, verbose)
    _check_sources(prompt, prompts, completion, batch_size)
    spread = jobs != 1 or engine != "loky" or address is not None
    check_engine(engine, jobs, address)
    if spread and prompts is None:
        raise UsageError("--jobs, --engine and --address go with --prompts; leave them out")
    quieten_libraries(terminal)

    from beaconscope.models import LoadOptions, load_model, load_tokenizer
    from beaconscope.record import RecordOptions, Sampling, record_with_workers
    from beaconscope.record import record as run
    from beaconscope.record import record_prompts as run_many
    from beaconscope.record.encode import check_prompts
    from beaconscope.record.options import refuse_given
    from beaconscope.record.prompts import Prompt, read_prompts, read_text
    from beaconscope.record.traces import find_unfinished
    from beaconscope.trace import check_no_journal

    given = {
        "budget": budget,
        "interval": interval,
        "beacons": beacons,
        "recent": recent,
        "sinks": sinks,
        "selector": selector,
        "query_space": query_space,
        "beacon_rotation": beacon_rotation,
        "query_pooling": query_pooling,
        "group_pooling": group_pooling,
        "pool_low": pool_low,
        "pool_high": pool_high,
    }
    policy, shadow = _policies(cache, {name: value for name, value in given.items() if value is not None}, seed or 0)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed, model_sampling)
    options = RecordOptions(
        policy=policy,
        shadow=shadow,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        system=None if system is None else unicode_option("--system", system),
        template_options=_template_options(template_option or []),
        raw=raw,
        completion=None if completion is None else read_text(completion, "completion"),
        think_open=unicode_option("--think-open", think_open),
        think_close=unicode_option("--think-close", think_close),
        layers=layers,
        heads=heads,
        hits=hits,
        values=values,
        vector_type=dtype_trace,
        sink_positions=sink_positions,
        local_window=local_window,
        prefill_chunk=prefill_chunk,
    )
    load_options = LoadOptions(model, revision, dtype, device, device_map, attn, trust_remote_code)
    if prompt is not None:
        text = read_text(prompt, "prompt")
        unfinished = [Prompt("prompt", text, options.completion)]
        path = out.trace_path(output, prompt, force=force)
        check_no_journal(path, force=force)
    else:
        assert prompts is not None
        many = read_prompts(prompts)
        if all(each.completion is not None for each in many):
            refuse_given(sampling)
        path = out.traces_folder(output, prompts)
        places, unfinished = find_unfinished(many, path, force=force, note=None)
        if not unfinished:
            terminal.note(f"{len(many)} of {len(many)} prompts are recorded already; --force records them anew.")
            _tell(terminal, path, list(places.values()), wanted=len(many), json=json)
            return

    if spread:
        with terminal.progress("Recording", "prompts") as report:
            paths = record_with_workers(
                load_options,
                many,
                options,
                folder=path,
                batch_size=batch_size,
                force=force,
                workers=jobs,
                engine=engine,
                address=address,
                progress=report,
                note=terminal.note,
            )
        _tell(terminal, path, paths, wanted=len(many), json=json)
        return
    terminal.note(f"Loading {model}.")
    tokenizer = load_tokenizer(load_options)
    # Before the weights, which may take minutes.
    check_prompts(tokenizer, unfinished, options, many=prompts is not None)
    loaded = load_model(load_options, tokenizer)
    with terminal.progress("Recording", "tokens") as report:
        if prompt is not None:
            run(
                loaded.model,
                loaded.tokenizer,
                text,
                options,
                output=path,
                force=force,
                model_id=loaded.id,
                revision=loaded.revision,
                progress=report,
                note=terminal.note,
            )
            paths = [path]
        else:
            paths = run_many(
                loaded.model,
                loaded.tokenizer,
                many,
                options,
                folder=path,
                batch_size=batch_size,
                force=force,
                model_id=loaded.id,
                revision=loaded.revision,
                progress=report,
                note=terminal.note,
            )
    _tell(terminal, path, paths, wanted=1 if prompt is not None else len(many), json=json)


def _tell(terminal: Terminal, path: Path, paths: list[Path], *, wanted: int, json: bool) -> None:
    """Say what was written, and whether it is all that was asked for; exit code 130, as of Ctrl-C, where it is not."""
    from beaconscope.trace import load_trace, summarize

    traces = [load_trace(each) for each in paths]
    cut = [trace for trace in traces if not trace.whole]
    if json:
        summaries = [summarize(trace) for trace in traces]
        typer.echo(dumps(summaries if path.is_dir() else summaries[0], indent=2))
    if not path.is_dir() and (end := ending(traces[0])):
        terminal.note(f"The text ends with:\n{end}")
    for trace in cut:
        terminal.note(f"{trace.path} ends early, after {trace.length} tokens: {trace.cut_reason}.")
    if len(traces) < wanted:
        terminal.note(f"{wanted - len(traces)} of {wanted} prompts are left; the same command goes on with them.")
    if not json:
        terminal.wrote(path, *(("beaconscope", "info", str(paths[0])) if paths else ()))
    if cut or len(traces) < wanted:
        raise typer.Exit(INTERRUPTED)


def _check_sources(prompt: str | None, prompts: str | None, completion: str | None, batch_size: int) -> None:
    """Refuse sources that cannot hold together."""
    if prompt is None and prompts is None:
        raise UsageError("there is no prompt; give --prompt FILE, --prompt - for stdin, or --prompts FILE.jsonl")
    if prompt is not None and prompts is not None:
        raise UsageError("--prompt and --prompts exclude each other; give one of them")
    if prompts is not None and completion is not None:
        raise UsageError('--completion goes with --prompt; with --prompts, give a line its own "completion"')
    if prompts is None and batch_size > 1:
        raise UsageError("--batch-size goes with --prompts; leave it out")
    if prompt == "-" and completion == "-":
        raise UsageError("--prompt and --completion cannot both be stdin; give one of them as a file")


def _template_options(given: list[str]) -> dict[str, Any]:
    """Read options of the form ``KEY=VALUE``.

    Raises
    ------
    UsageError
        For an option of another form, a repeated key, or one of Python's names for true, false and null.
    """
    options: dict[str, Any] = {}
    for option in given:
        key, equals, text = unicode_option("--template-option", option).partition("=")
        if not key or not equals:
            raise UsageError(f"--template-option {option!r} must be KEY=VALUE, for example enable_thinking=false")
        if key in options:
            raise UsageError(f"--template-option {key} is given twice; leave one out")
        if text in _NOT_JSON:
            raise UsageError(
                f"--template-option {option} would be the text {text!r}; "
                f"write {key}={_NOT_JSON[text]}, or {key}='\"{text}\"' for the text"
            )
        try:
            options[key] = loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError):
            options[key] = text
    return options


def _no_number(name: str) -> None:
    """Refuse NaN and infinity, which Python reads although JSON does not have them."""
    raise ValueError(name)


def _policies(cache: str, given: dict[str, object], seed: int) -> tuple[Policy, BeaconKV]:
    """The policy of the cache, and the beacons beside it where it is the full one.

    Raises
    ------
    UsageError
        For an option that the policy does not have, or a value that does not fit.
    """
    from beaconscope.kv.policies import BeaconKV, Full, parse_policy

    policy = parse_policy(cache, seed=seed, **given)
    if isinstance(policy, Full):
        shadow = parse_policy("beacon", seed=seed, **given)
    else:
        shadow = BeaconKV()
        known = policy.parameters()
        idle = ", ".join("--" + name.replace("_", "-") for name in given if name not in known)
        if idle:
            raise UsageError(f"{idle} has no effect with --cache {policy.name}; leave it out")
    assert isinstance(shadow, BeaconKV)
    return policy, shadow
