"""Examine one architecture: record it in several ways, and compare every number of the traces with its twin."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

import beaconscope
from beaconscope import BeaconCache, BeaconKV, BeaconScopeError, Full, Prompt, RecordOptions, Trace, load_trace
from testing.architectures.checks import (
    check_attention,
    check_evictions,
    check_logprobs,
    check_tokens,
    hidden_entries,
    token_ids,
    unchecked_layers,
)
from testing.architectures.models import tiny_model
from testing.architectures.twin import Twin, generate
from tests.tiny import tiny_tokenizer

RIGHT = "right"
NOTED = "right, with a note"
REFUSED = "refused"
WRONG = "WRONG"
TRACEBACK = "TRACEBACK"
UNBUILT = "not built"

PROMPT = "Plan: add, then double; then look back at the first numbers. 3 and 4? 12 and 9?"
SHORTER = "Halve 12, and then add 30 to it; is that even? Yes or no."
NEW = 100
FEW = 24
"""New tokens where a short text will do."""
CHUNK = 30
"""Tokens of the prompt that are fed at once where it is fed in pieces."""
SMALL: dict[str, Any] = {"budget": 32, "interval": 8, "recent": 8, "beacons": 4}
LARGE: dict[str, Any] = {**SMALL, "budget": 512}
_EXPECTED_NOTES = ("The trace takes at most", "The cache never filled", "Prompts ", "The model's context of")


@dataclass(frozen=True)
class Result:
    """What one variant of an architecture gave."""

    architecture: str
    variant: str
    status: str
    details: list[str] = field(default_factory=list)
    """What is wrong, why it is refused, or what to know."""


class _Refused(Exception):
    """BeaconScope refuses the model, in one line."""


def examine(architecture: str, variant: str, config: PreTrainedConfig, folder: Path) -> Result:
    """Record a tiny model of ``config`` with a full and with compressed caches, and check every number."""
    try:
        twin = Twin(config)
        prompt = list(PROMPT.encode())
        given, own = twin.run(prompt), twin.run(prompt, numbered=False)
    except Exception as error:
        return Result(architecture, variant, UNBUILT, [one_line(error)])
    examination = _Examination(config, twin, folder)
    if not torch.allclose(given.logits, own.logits, atol=1e-3):
        examination.notes.append("generate, and so the tool, numbers positions otherwise than the model left to itself")
    status = RIGHT
    try:
        examination.run()
    except _Refused as refusal:
        examined = examination.stage != _Examination.stage
        status = NOTED if examined else REFUSED
        examination.notes.append(f"{examination.stage}: {refusal}" if examined else str(refusal))
    except Exception as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if "/testing/" not in each.filename]
        at = f" ({'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno})" if frames else ""
        return Result(
            architecture, variant, TRACEBACK, [f"{examination.stage}: {one_line(error)}{at}", *examination.details()]
        )
    if examination.wrong:
        status = WRONG
    elif status == RIGHT and examination.notes:
        status = NOTED
    return Result(architecture, variant, status, examination.details())


class _Examination:
    """The recordings of one model. ``wrong`` and ``notes`` say what was found."""

    stage = "full cache"

    def __init__(self, config: PreTrainedConfig, twin: Twin, folder: Path) -> None:
        self._config = config
        self._twin = twin
        self._folder = folder
        self._space: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.notes: list[str] = []

    def details(self) -> list[str]:
        """Everything that was found, once each."""
        return list(dict.fromkeys([*self.wrong, *self.notes]))

    def run(self) -> None:
        """Record in every way, and check."""
        full = self._full()
        self._large(full)
        small = self._small()
        self._batch()
        self._generate(small)

    def _full(self) -> Trace:
        """A full cache: tokens, hits, masses, logprobs and recomputed attention."""
        trace = self._record(Full())
        truth = self._twin.run(token_ids(trace))
        ids = token_ids(trace)[: trace.prompt_length]
        try:
            expected = generate(tiny_model(copy.deepcopy(self._config)), ids, NEW)
        except Exception as error:
            self.notes.append(f"generate itself fails ({one_line(error)})")
        else:
            self._find(check_tokens(trace, expected, truth))
        self._find(check_logprobs(trace, truth) + check_attention(trace, truth))
        unknown = unchecked_layers(trace, truth)
        if unknown:
            self.notes.append(f"transformers gives no weights of layers {unknown}: their attention is not checked")
        return trace

    def _large(self, full: Trace) -> None:
        """A cache that never fills, eager attention, the prompt in pieces: the same tokens."""
        self.stage = "large cache, eager, prompt in pieces"
        trace = self._record(BeaconKV(**LARGE), attn="eager", max_new_tokens=FEW, prefill_chunk=CHUNK)
        ids = token_ids(trace)
        self._find([] if ids == token_ids(full)[: len(ids)] else ["tokens are not those of the full cache"])
        truth = self._twin.run(ids)
        self._find(check_logprobs(trace, truth) + check_attention(trace, truth))

    def _small(self) -> Trace:
        """A compressed cache: what it dropped is hidden from the twin, which must then compute the same."""
        self.stage = "small cache"
        said = len(self.notes)
        policy = BeaconKV(**SMALL)
        trace = self._record(policy)
        ids = token_ids(trace)
        self._check_compressed(trace)
        silent = not any("compress" in note for note in self.notes[said:])
        self._find(check_evictions(trace, self._spaced(policy), self._twin.run(ids), silent))
        return trace

    def _batch(self) -> None:
        """Two prompts of unequal length together, each as if it were alone."""
        self.stage = "batch of unequal prompts"
        options = self._options(BeaconKV(**SMALL), max_new_tokens=FEW)
        folder = self._folder / "batch"
        prompts = [Prompt("longer", PROMPT), Prompt("shorter", SHORTER)]
        model = tiny_model(copy.deepcopy(self._config))
        paths = _refusing(
            beaconscope.record_prompts,
            model,
            endless_tokenizer(),
            prompts,
            options,
            folder=folder,
            batch_size=2,
            force=True,
            note=self._hear,
        )
        for path in paths:
            self._check_compressed(load_trace(path))

    def _generate(self, recorded: Trace) -> None:
        """``generate`` with a cache of our own: the tokens of the recording."""
        self.stage = "generate with a BeaconCache"
        model = tiny_model(copy.deepcopy(self._config))
        cache = _refusing(BeaconCache, model, **{**SMALL, **self._space})
        ids = token_ids(recorded)
        new = ids[recorded.prompt_length :]
        argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        written = _refusing(generate, model, ids[: recorded.prompt_length], len(new), **{argument: cache})
        self._find([] if written == new else ["tokens are not those of the recording"])

    def _check_compressed(self, trace: Trace) -> None:
        truth = self._twin.run(token_ids(trace), hidden_entries(trace))
        self._find(check_logprobs(trace, truth) + check_attention(trace, truth))

    def _find(self, wrong: Sequence[str]) -> None:
        self.wrong += [f"{self.stage}: {each}" for each in wrong]

    def _hear(self, note: str) -> None:
        if not note.startswith(_EXPECTED_NOTES):
            self.notes.append(note)

    def _record(self, policy: Full | BeaconKV, attn: str | None = None, **options: Any) -> Trace:
        """Record a fresh model; where a refusal says so, with queries compared after the rotary embedding."""
        while True:
            try:
                return _refusing(
                    beaconscope.record,
                    tiny_model(copy.deepcopy(self._config), attn),
                    endless_tokenizer(),
                    PROMPT,
                    self._options(policy, **options),
                    output=self._folder / f"{self.stage}.parquet",
                    force=True,
                    note=self._hear,
                )
            except _Refused as refusal:
                if "post-rope" not in str(refusal) or self._space:
                    raise
                self._space = {"query_space": "post-rope"}
                self.notes.append(f"needs --query-space post-rope: {refusal}")

    def _options(self, policy: Full | BeaconKV, **options: Any) -> RecordOptions:
        settings = {"layers": "all", "raw": True, "max_new_tokens": NEW, "local_window": 24, **options}
        shadow = BeaconKV(beacons=4, recent=8, **self._space)
        return RecordOptions(policy=self._spaced(policy), shadow=shadow, **settings)

    def _spaced(self, policy: Any) -> Any:
        return dataclasses.replace(policy, **self._space) if isinstance(policy, BeaconKV) else policy


def endless_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without an end token, so that every text reaches its limit."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


def one_line(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _refusing(function: Any, *arguments: Any, **options: Any) -> Any:
    """Call ``function``, and turn what BeaconScope refuses into :class:`_Refused`; a refusal is one line."""
    try:
        return function(*arguments, **options)
    except BeaconScopeError as error:
        text = str(error)
        if not text or len(text.splitlines()) > 1:
            raise AssertionError(f"a refusal is one line, not {text!r}") from error
        raise _Refused(text) from error
