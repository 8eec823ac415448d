"""Examine one architecture: record it in several ways, and compare every number of the traces with its twin."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

import beaconscope
from beaconscope import (
    AnalyzeOptions,
    BeaconCache,
    BeaconKV,
    BeaconScopeError,
    Full,
    Prompt,
    RecordOptions,
    Trace,
    load_trace,
)
from beaconscope.replay import make_jobs, sweep
from testing.architectures.checks import (
    LOGPROB_TOLERANCE,
    check_attention,
    check_evictions,
    check_logprobs,
    check_tokens,
    hidden_entries,
    token_ids,
    unchecked_layers,
)
from testing.architectures.models import tiny_model
from testing.architectures.results import NOTED, REFUSED, RIGHT, TRACEBACK, UNBUILT, WRONG, Result
from testing.architectures.twin import Twin, generate
from tests.tiny import tiny_tokenizer

PROMPT = "Plan: add, then double; then look back at the first numbers. 3 and 4? 12 and 9?"
SHORTER = "Halve 12, and then add 30 to it; is that even? Yes or no."
NEW = 100
FEW = 24
"""New tokens where a short text will do."""
CHUNK = 30
"""Tokens of the prompt that are fed at once where it is fed in pieces."""
SMALL: dict[str, Any] = {"budget": 32, "interval": 8, "recent": 8, "beacons": 4}
LARGE: dict[str, Any] = {**SMALL, "budget": 512}
_EXPECTED_NOTES = re.compile(
    r"The trace takes at most|The cache never filled|The model's context of|The text closes a thought"
    r"|\d+ of \d+ layers have a sliding window"
)
"""What is said of every recording of its kind, and is no peculiarity of an architecture."""


class _Refused(Exception):
    """BeaconScope refuses the model, in one line."""


class _Unknown(Exception):
    """Transformers alone cannot run the model, so that nothing is known of what is right."""


def examine(architecture: str, variant: str, config: PreTrainedConfig, folder: Path) -> Result:
    """Record a tiny model of ``config`` with a full and with compressed caches, and check every number."""
    try:
        tiny_model(copy.deepcopy(config))
    except Exception as error:
        return Result(architecture, variant, UNBUILT, [one_line(error)])
    examination = _Examination(config, folder)
    try:
        examination.run()
    except _Refused as refusal:
        if examination.stage == _Examination.stage:
            return Result(architecture, variant, REFUSED, [str(refusal)])
        examination.notes.append(f"{examination.stage}: {refusal}")
    except _Unknown as unknown:
        return Result(architecture, variant, UNBUILT, [f"transformers alone cannot run it ({unknown})"])
    except Exception as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if "/testing/" not in each.filename]
        at = f" ({'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno})" if frames else ""
        return Result(
            architecture, variant, TRACEBACK, [f"{examination.stage}: {one_line(error)}{at}", *examination.details()]
        )
    status = WRONG if examination.wrong else NOTED if examination.notes else RIGHT
    return Result(architecture, variant, status, examination.details())


class _Examination:
    """The recordings of one model. ``wrong`` and ``notes`` say what was found."""

    stage = "full cache"

    def __init__(self, config: PreTrainedConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._space: dict[str, Any] = {}
        self._compresses = True
        self._heard: list[str] = []
        self.wrong: list[str] = []
        self.notes: list[str] = []

    def details(self) -> list[str]:
        """Everything that was found, once each."""
        return list(dict.fromkeys([*self.wrong, *self.notes]))

    def run(self) -> None:
        """Record in every way, and check."""
        trace = self._record(Full())
        self._make_twins(token_ids(trace)[: trace.prompt_length])
        self._check_full(trace)
        self._pieces(trace)
        small = self._small() if self._compresses else None
        self._batch()
        self._read(trace if small is None else small)
        if small is not None:
            self._generate(trace, small)

    def _make_twins(self, prompt: list[int]) -> None:
        try:
            self._twin, self._eager = Twin(self._config), Twin(self._config, "eager")
            given, by_eager = self._twin.run(prompt), self._eager.run(prompt)
            plain = self._twin.run(prompt, numbered=False)
        except Exception as error:
            raise _Unknown(one_line(error)) from error
        if not torch.allclose(given.logits, plain.logits, atol=1e-3):
            self.notes.append("positions are those of generate, which a plain forward pass counts otherwise")
        if not torch.allclose(given.logits, by_eager.logits, atol=1e-3):
            self.notes.append("transformers' own sdpa and eager attention give different numbers")

    def _check_full(self, trace: Trace) -> None:
        """A full cache: tokens, hits, masses, logprobs and recomputed attention."""
        ids = token_ids(trace)
        truth = self._twin.run(ids)
        found = check_logprobs(trace, truth)
        try:
            written = generate(tiny_model(copy.deepcopy(self._config)), ids[: trace.prompt_length], NEW)
        except Exception as error:
            self.notes.append(f"transformers' generate fails ({one_line(error)})")
        else:
            differ = check_tokens(trace, written, truth, "generate's")
            if differ and not found and self._contradicts_itself(ids[: trace.prompt_length], written):
                self.notes.append("tokens of transformers' generate are not the likeliest of its own forward pass")
            else:
                self._find(differ)
        self._find(found + check_attention(trace, truth))
        unknown = unchecked_layers(trace, truth)
        if unknown:
            self.notes.append(f"transformers gives no weights of layers {unknown}: their attention is not checked")

    def _contradicts_itself(self, prompt: list[int], written: list[int]) -> bool:
        logits = self._twin.run(prompt + written).logits[len(prompt) - 1 : -1]
        lost = logits.amax(dim=-1) - logits.gather(-1, torch.tensor(written)[:, None])[:, 0]
        return float(lost.max()) > LOGPROB_TOLERANCE

    def _pieces(self, full: Trace) -> None:
        """A cache that never fills, eager attention, the prompt in pieces: the tokens of the full cache."""
        self.stage = "large cache, eager, prompt in pieces"
        options: dict[str, Any] = {"attn": "eager", "max_new_tokens": FEW, "prefill_chunk": CHUNK}
        try:
            trace = self._record(BeaconKV(**LARGE), **options)
        except _Refused as refusal:
            if "nothing for" not in str(refusal):
                raise
            # Every layer has a window that the text outgrows, so that it is recorded with a full cache only.
            self._compresses = False
            trace = self._record(Full(), **options)
        truth = self._eager.run(token_ids(trace))
        self._find(check_tokens(trace, token_ids(full)[trace.prompt_length :], truth, "the full cache's"))
        self._find(check_logprobs(trace, truth) + check_attention(trace, truth))

    def _small(self) -> Trace:
        """A compressed cache: what it dropped is hidden from the twin, which must then compute the same."""
        self.stage = "small cache"
        self._heard.clear()
        policy = BeaconKV(**SMALL)
        trace = self._record(policy)
        silent = not any("compress" in note for note in self._heard)
        self._check_compressed(trace)
        self._find(check_evictions(trace, self._spaced(policy), self._twin.run(token_ids(trace)), silent))
        return trace

    def _batch(self) -> None:
        """Two prompts of unequal length together, the shorter one padded on the left."""
        self.stage = "batch of unequal prompts"
        policy = BeaconKV(**SMALL) if self._compresses else Full()
        options = self._options(policy, max_new_tokens=FEW)
        prompts = [Prompt("longer", PROMPT), Prompt("shorter", SHORTER)]
        model = tiny_model(copy.deepcopy(self._config))
        try:
            paths = _refusing(
                beaconscope.record_prompts,
                model,
                endless_tokenizer(),
                prompts,
                options,
                folder=self._folder / "batch",
                batch_size=2,
                note=self._hear,
            )
        except _Refused as refusal:
            if "padding_side" in str(refusal):
                self._find([f"the refusal asks for what the tool does itself: {refusal}"])
                return
            raise
        longer, shorter = map(load_trace, paths)
        self._check_compressed(longer)
        self._check_compressed(shorter, padding=longer.prompt_length - shorter.prompt_length)

    def _read(self, trace: Trace) -> None:
        """``analyze`` and ``replay`` take the trace."""
        self.stage = "analyze"
        _refusing(beaconscope.analyze, trace, AnalyzeOptions(cluster_heads=0))
        if self._compresses:
            self.stage = "replay"
            _refusing(lambda: sweep(make_jobs(trace, [self._spaced(BeaconKV(**SMALL))])))

    def _generate(self, full: Trace, small: Trace) -> None:
        """``generate`` with a cache of our own: the tokens of a recording.

        A cache that compresses other layers than the recording is tried with a budget that is never reached.
        """
        self.stage = "generate with a BeaconCache"
        compressed = [layer for layer in small.layers if small.evictions(layer, small.kv_heads(layer)[0])]
        written, layers = self._write_with_cache(small, SMALL)
        recorded = small
        if layers != compressed:
            recorded = full
            written, _ = self._write_with_cache(full, LARGE)
        expected = token_ids(recorded)[recorded.prompt_length :]
        self._find([] if written == expected else ["tokens are not those of the recording"])

    def _write_with_cache(self, recorded: Trace, settings: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Tokens after the prompt of a recording, and the layers that the cache compresses."""
        model = tiny_model(copy.deepcopy(self._config))
        if "max_length" in inspect.signature(BeaconCache).parameters:
            settings = {**settings, "max_length": recorded.length}
        cache = _refusing(BeaconCache, model, **{**settings, **self._space})
        layers = [layer.layer for layer in cache.compressed_layers]
        prompt = token_ids(recorded)[: recorded.prompt_length]
        argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        return _refusing(generate, model, prompt, recorded.length - len(prompt), **{argument: cache}), layers

    def _check_compressed(self, trace: Trace, padding: int = 0) -> None:
        ids, hidden = token_ids(trace), hidden_entries(trace)
        truth = self._twin.run(ids, hidden, padding=padding)
        self._find(check_logprobs(trace, truth) + check_attention(trace, truth))
        if padding and not torch.allclose(truth.logits, self._twin.run(ids, hidden).logits, atol=1e-3):
            self.notes.append(
                "transformers itself gives a padded prompt of a batch other numbers than the prompt alone"
            )

    def _find(self, wrong: Sequence[str]) -> None:
        self.wrong += [f"{self.stage}: {each}" for each in wrong]

    def _hear(self, note: str) -> None:
        self._heard.append(note)
        if not _EXPECTED_NOTES.search(note):
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
