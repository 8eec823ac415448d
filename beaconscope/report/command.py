"""The command that makes a recording, put together from what its trace says of it.

A trace has every option of its recording, and of the model its name and the type that its weights had. It does not have
the names of the files that the texts came from: those are for the reader to fill in.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from beaconscope.trace import Trace

_DTYPES = ("float32", "float16", "bfloat16")
_ONE_PROMPT = "prompt"
"""Name of the prompt of a recording that has only one."""
OPTIONS: Mapping[str, tuple[str, Any]] = {
    "system": ("--system", None),
    "raw": ("--raw", False),
    "think_open": ("--think-open", "<think>"),
    "think_close": ("--think-close", "</think>"),
    "max_new_tokens": ("--max-new-tokens", 1024),
    "prefill_chunk": ("--prefill-chunk", None),
    "layers": ("--layers", "auto"),
    "heads": ("--heads", "all"),
    "hits": ("--hits", 8),
    "values": ("--no-values", True),
    "vector_type": ("--dtype-trace", "auto"),
    "sink_positions": ("--sink-positions", 4),
    "local_window": ("--local-window", 128),
}
"""Of a trace, the flag of `record` that sets each, and its default."""
SAMPLING: Mapping[str, tuple[str, Any]] = {
    "temperature": ("--temperature", None),
    "top_k": ("--top-k", None),
    "top_p": ("--top-p", None),
    "min_p": ("--min-p", None),
    "repetition_penalty": ("--repetition-penalty", None),
    "seed": ("--seed", None),
    "model_sampling": ("--model-sampling", False),
}
_OLD_DEFAULTS: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": 0,
}
"""Defaults of the same settings in traces of version 0.1."""
_TEXTS = ("system", "think_open", "think_close")


def recording_command(trace: Trace, redact: bool) -> str:
    """The command of a recording, with every option that is not at its default.

    Parameters
    ----------
    trace
        Of the recording.
    redact
        Put words in capitals in place of the model's name and of texts.
    """
    options, policy = trace.options, trace.policy
    model = trace.metadata.get("model", {})
    sampling = _given(options)
    said = ["beaconscope", "record", "--model", "MODEL" if redact else (trace.model_id or "MODEL")]
    if model.get("revision"):
        said += ["--revision", "REVISION" if redact else str(model["revision"])]
    # What the weights were loaded in, and not whether that was asked for: said always, it holds in either case.
    if model.get("dtype") in _DTYPES:
        said += ["--dtype", str(model["dtype"])]
    if model.get("attention_backend") in ("eager", "flash_attention_2"):
        said += ["--attn", str(model["attention_backend"])]
    if trace.metadata.get("prompt_id") not in (None, _ONE_PROMPT):
        said += ["--prompts", "PROMPTS.jsonl"]
    else:
        said += ["--prompt", "PROMPT_FILE"]
        if options.get("teacher_forced"):
            said += ["--completion", "COMPLETION_FILE"]
    said += _policy(policy, sampling)
    said += _not_default(sampling, SAMPLING)
    for name, value in (options.get("template_options") or {}).items():
        said += ["--template-option", f"{name}={'VALUE' if redact else json.dumps(value)}"]
    said += _not_default(
        {**options, **({key: "TEXT" for key in _TEXTS if options.get(key)} if redact else {})}, OPTIONS
    )
    return shlex.join(said)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of sampling that the recording was given; an older trace has a value for each."""
    sampling = dict(options.get("sampling") or {})
    if "model_sampling" in sampling:
        return sampling
    given = {key: value for key, value in sampling.items() if value != _OLD_DEFAULTS.get(key)}
    # Greedy decoding had no use for the others, nor has a text that is given.
    drawn = bool(given.get("temperature")) and not options.get("teacher_forced")
    return {key: value for key, value in given.items() if drawn or key == "seed"}


def _policy(policy: Mapping[str, Any], sampling: Mapping[str, Any]) -> Iterator[str]:
    """The flags that choose a policy. BeaconKV's parameters have flags of their own; a full cache has its beacons'."""
    # Here, because torch takes its time to load.
    from beaconscope.kv.policies import POLICIES

    name, params = str(policy.get("name") or ""), policy.get("params") or {}
    full = name == "full" and isinstance(params.get("shadow", {}), dict)
    if full:
        yield from ("--cache", "full")
        name, params = "beacon", params.get("shadow", {})
    defaults = POLICIES[name]().params() if name in POLICIES else {}
    other = {key: value for key, value in params.items() if value is not None and value != defaults.get(key)}
    # The seed of the sampling is that of the policy too, unless the policy is given one, which beside a full cache it
    # cannot be.
    seed = params.get("seed")
    other.pop("seed", None)
    if seed is not None and seed != (sampling.get("seed") or 0) and not full:
        other["seed"] = seed
    if name == "beacon" and "seed" not in other:
        for key, value in other.items():
            yield from (f"--{key.replace('_', '-')}", str(value))
    elif name:
        inside = ",".join(f"{key}={value}" for key, value in other.items())
        yield from ("--cache", f"{name}:{inside}" if inside else name)


def _not_default(options: Mapping[str, Any], flags: Mapping[str, tuple[str, Any]]) -> Iterator[str]:
    for key, (flag, default) in flags.items():
        value = options.get(key, default)
        if value is None or value == default:
            continue
        yield flag
        if not isinstance(default, bool):
            yield str(value)
