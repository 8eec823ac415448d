"""Examine one architecture: record it, and hold every number of the traces against its twin."""

from __future__ import annotations

import copy
import inspect
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

import beaconscope
from beaconscope import BeaconCache, BeaconKV, BeaconScopeError, Full, RecordOptions, Trace
from testing.architectures.checks import (
    check_attention,
    check_evictions,
    check_logprobs,
    check_tokens,
    hidden_entries,
    token_ids,
    trace_path,
    unchecked_layers,
)
from testing.architectures.models import tiny_model
from testing.architectures.twin import Twin, generate
from tests.tiny import tiny_tokenizer

RIGHT, NOTED, REFUSED, WRONG, TRACEBACK, UNBUILT = (
    "right",
    "right, with a note",
    "refused",
    "WRONG",
    "TRACEBACK",
    "not built",
)
PROMPT = "Plan: add, then double; then look back at the first numbers. 3 and 4? 12 and 9?"
NEW = 100
SMALL = {"budget": 32, "interval": 8, "recent": 8, "beacons": 4}
LARGE = {"budget": 512, "interval": 8, "recent": 8, "beacons": 4}
_EXPECTED_NOTES = ("The trace takes at most", "The cache never filled")


@dataclass
class Result:
    """What one variant of an architecture gave."""

    architecture: str
    variant: str
    status: str = RIGHT
    details: list[str] = field(default_factory=list)
    """What is wrong, why it is refused, or what to know."""


class _Stop(Exception):
    """Nothing more can be examined."""


def examine(architecture: str, variant: str, config: PreTrainedConfig, folder: Path) -> Result:
    """Record a tiny model of ``config`` with a full and with compressed caches, and check every number."""
    result = Result(architecture, variant)
    stage = "building"
    try:
        twin = Twin(config)
        prompt = list(PROMPT.encode())
        numbered, unnumbered = twin.run(prompt), twin.run(prompt, numbered=False)
    except Exception as error:
        result.status, result.details = UNBUILT, [_line(error)]
        return result
    wrong: list[str] = []
    notes: list[str] = []
    if not torch.allclose(numbered.logits, unnumbered.logits, atol=1e-3):
        notes.append("transformers' generate numbers positions otherwise than its model does by itself; so does the tool")
    try:
        stage = "generate of transformers"
        try:
            expected = generate(tiny_model(copy.deepcopy(config)), prompt, NEW)
        except Exception as error:
            expected = None
            notes.append(f"generate itself fails ({_line(error)})")
        stage = "record, full cache"
        space: dict[str, Any] = {}
        full = _record(config, Full(), folder, notes, space)
        truth = twin.run(token_ids(full))
        if expected is not None:
            wrong += _named("full cache", check_tokens(full, expected, truth))
        wrong += _named("full cache", check_logprobs(full, truth) + check_attention(full, truth))
        unknown = unchecked_layers(full, truth)
        if unknown:
            notes.append(f"transformers gives no attention weights of layers {unknown}; they are not checked")
        stage = "record, large cache, eager"
        large = _record(config, BeaconKV(**LARGE, **space), folder, notes, space, attn="eager")
        wrong += _named("large cache", [] if token_ids(large) == token_ids(full) else ["tokens are not the full one's"])
        wrong += _named("large cache", check_logprobs(large, twin.run(token_ids(large))))
        stage = "record, small cache"
        said: list[str] = []
        policy = BeaconKV(**SMALL, **space)
        small = _record(config, policy, folder, said, space)
        notes += said
        stage = "small cache"
        masked = twin.run(token_ids(small), hidden_entries(small))
        wrong += _named("small cache", check_logprobs(small, masked) + check_attention(small, masked))
        silent = not any("compress" in note for note in said)
        wrong += _named("small cache", check_evictions(small, policy, twin.run(token_ids(small)), silent))
        stage = "generate with a BeaconCache"
        wrong += _named("generate with BeaconCache", _generated(config, policy, small))
    except (_Stop, BeaconScopeError) as stop:
        result.status, result.details = REFUSED, [str(stop)]
        if wrong:
            result.status, result.details = WRONG, [*wrong, *notes, f"then refused: {stop}"]
        elif stage != "record, full cache":
            result.status, result.details = NOTED, [*notes, f"{stage}: refused: {stop}"]
        return result
    except Exception as error:
        frame = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if "testing" not in f.filename), None)
        at = "" if frame is None else f" ({'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno})"
        result.status, result.details = TRACEBACK, [f"{stage}: {_line(error)}{at}", *wrong, *notes]
        return result
    result.status = WRONG if wrong else NOTED if notes else RIGHT
    result.details = [*wrong, *dict.fromkeys(notes)]
    return result


def _record(
    config: PreTrainedConfig,
    policy: Full | BeaconKV,
    folder: Path,
    notes: list[str],
    space: dict[str, Any],
    attn: str | None = None,
) -> Trace:
    """Record a fresh model; where pre-RoPE queries are not known, in the space that the refusal names."""
    name = f"{policy.name}-{getattr(policy, 'budget', 0)}"
    said: list[str] = []
    while True:
        options = RecordOptions(
            policy=policy if isinstance(policy, Full) else BeaconKV(**{**vars(policy), **space}),
            shadow=BeaconKV(beacons=4, recent=8, **space),
            layers="all",
            raw=True,
            max_new_tokens=NEW,
            local_window=24,
        )
        model = tiny_model(copy.deepcopy(config), attn)
        tokenizer = tiny_tokenizer()
        tokenizer.eos_token = None
        try:
            trace = beaconscope.record(
                model, tokenizer, PROMPT, options, output=trace_path(folder, name), force=True, note=said.append
            )
        except BeaconScopeError as error:
            text = str(error)
            if len(text.splitlines()) > 1:
                raise AssertionError(f"a refusal of several lines: {text!r}") from error
            if "post-rope" in text and not space:
                space["query_space"] = "post-rope"
                notes.append(f"only with --query-space post-rope: {text}")
                continue
            raise _Stop(text) from error
        notes += [note for note in said if not note.startswith(_EXPECTED_NOTES)]
        return trace


def _generated(config: PreTrainedConfig, policy: BeaconKV, recorded: Trace) -> list[str]:
    """What ``generate`` writes with a cache of our own, which must be what was recorded."""
    model = tiny_model(copy.deepcopy(config))
    cache = BeaconCache(model, **vars(policy))
    ids = token_ids(recorded)
    prompt = ids[: recorded.prompt_length]
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    written = generate(model, prompt, len(ids) - len(prompt), **{argument: cache})
    return [] if written == ids[len(prompt) :] else ["tokens are not those of the recording"]


def _named(where: str, found: list[str]) -> list[str]:
    return [f"{where}: {each}" for each in found]


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
