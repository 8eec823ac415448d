"""``beaconscope info``: say what a trace holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from json import dumps
from typing import Any

import typer

from beaconscope.cli import output as out
from beaconscope.cli.ending import ending
from beaconscope.cli.options import Json, Quiet, TraceFile, Verbose, Version
from beaconscope.cli.terminal import Terminal, printable
from beaconscope.units import in_bytes

_PROMPT_SHOWN = 300


def info(
    trace: TraceFile,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Version = False,
) -> None:
    """Say what a trace holds: model, prompt, settings, size. With --verbose, every option and version too."""
    out.input_file(trace)

    from beaconscope.trace import load_trace, summarize

    loaded = load_trace(trace)
    summary = summarize(loaded)
    if json:
        typer.echo(dumps(summary, indent=2))
        return
    Terminal(quiet, verbose).table(_lines(summary, ending(loaded)))
    if verbose:
        Terminal(quiet, verbose).table(_more(summary))


def _lines(summary: Mapping[str, Any], end: str) -> Iterator[tuple[str, str]]:
    model = summary["model"]
    yield "trace", f"{summary['path']}, {in_bytes(summary['file_bytes'])}, format {summary['format_version']}"
    if summary["created"]:
        yield "recorded", str(summary["created"])
    if not summary["whole"]:
        yield "cut", summary["cut_reason"] or "the recording did not come to its end"
    yield (
        "model",
        _joined(
            [
                model["id"] or "unknown",
                model["revision"] and f"revision {model['revision']}",
                model["dtype"],
                model["parameters"] and f"{model['parameters']:,} parameters",
                summary["device"] and f"on {summary['device']}",
            ]
        ),
    )
    prompt = printable(summary["prompt"] or "")
    yield "prompt", prompt if len(prompt) <= _PROMPT_SHOWN else prompt[:_PROMPT_SHOWN] + " ..."
    if end:
        yield "ends with", end
    phases = ", ".join(f"{count:,} {phase}" for phase, count in summary["phases"].items() if count)
    yield "tokens", f"{summary['length']:,} ({phases})"
    yield "layers", _layers(summary["layers"])
    yield "vectors", f"{summary['vector_type']}, {in_bytes(summary['vector_bytes'])} before compression"
    yield (
        "hits",
        f"{summary['hits']} per query head; attention is over {summary['attention_over'] or 'an unknown cache'}",
    )
    policy = summary["policy"]
    settings = _settings(policy.get("params") or {})
    yield "cache", f"{policy.get('name', 'unknown')}{': ' if settings else ''}{settings}"
    yield "compressions", f"{summary['compressions']:,} per KV head"


def _more(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "options", _settings(summary["options"])
    yield "timings", ", ".join(_timing(name, value) for name, value in summary["timings"].items() if value is not None)
    yield "memory", ", ".join(f"{name} {in_bytes(value)}" for name, value in summary["peak_memory"].items() if value)
    yield "versions", ", ".join(f"{name} {value}" for name, value in summary["versions"].items())


def _layers(layers: list[Mapping[str, Any]]) -> str:
    """Which layers and heads there are; layers of one shape are said once."""
    shapes: dict[str, list[int]] = {}
    for layer in layers:
        heads = ",".join(map(str, layer["kv_heads"]))
        value = "no values" if layer["value_size"] is None else f"values of {layer['value_size']}"
        shape = (
            f"KV heads {heads} x {layer['query_heads_per_kv_head']} query heads, keys of {layer['key_size']}, {value}"
        )
        shapes.setdefault(shape, []).append(layer["layer"])
    return "; ".join(f"{','.join(map(str, numbers))} ({shape})" for shape, numbers in shapes.items())


def _timing(name: str, value: float) -> str:
    seconds = name.endswith("_seconds")
    number = f"{value:,.0f}" if 999.5 <= value < 1e9 else f"{value:.3g}"  # hours are no powers of ten
    return f"{name.removesuffix('_seconds').replace('_', ' ')} {number}{' s' if seconds else ''}"


def _settings(values: Mapping[str, Any]) -> str:
    """Names with their values, those of a group after its own name; what is not set is left out."""
    parts = [
        f"{name}: {_settings(value)}" if isinstance(value, Mapping) else f"{name}={value}"
        for name, value in values.items()
        if value is not None
    ]
    return printable(", ".join(parts))


def _joined(parts: Iterable[str | None]) -> str:
    return printable(", ".join(part for part in parts if part))
