"""Record: a model, a cache, a tap and a journal, put together.

Data flows one way: :class:`~beaconscope.record.generate.Generation` drives the model, whose cache tells the
:class:`~beaconscope.record.recorder.Recorder` of every step; what it gathers goes to one journal for each sequence,
which becomes the trace at the end.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from beaconscope.errors import BeaconScopeError, UsageError, no_memory
from beaconscope.kv.cache import CompressedCache
from beaconscope.kv.policies import Full
from beaconscope.models import TappedModel, is_bundled, tap, token_bytes
from beaconscope.models.finite import explain_not_finite
from beaconscope.progress import Note, Progress
from beaconscope.record.decoding import Decoding
from beaconscope.record.encode import check_prompts, count_unknown, encode_completion, encode_prompt
from beaconscope.record.generate import Generation, NotFinite
from beaconscope.record.generation_config import resolve_decoding
from beaconscope.record.options import RecordOptions, with_shadow
from beaconscope.record.plan import Plan, make_plan
from beaconscope.record.prompts import Prompt
from beaconscope.record.recorder import Recorder
from beaconscope.record.traces import find_unfinished, prompt_batches, traces_folder
from beaconscope.record.vocabulary import end_tokens, kinds_of_tokens, special_ids
from beaconscope.trace import HeadBlock, Journal, TokenBlock, Trace, journal_path, load_trace, split_phases

_LIBRARIES = ("torch", "transformers", "numpy", "pyarrow")
_NAMES = 3
"""Prompts of a batch that a note names."""


def record(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    options: RecordOptions | None = None,
    *,
    output: str | Path = "trace.parquet",
    force: bool = False,
    model_id: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
    note: Note | None = None,
) -> Trace:
    """Run ``model`` on ``prompt`` and write the trace of what its attention did.

    Parameters
    ----------
    model, tokenizer
        As transformers loads them. The model's attention is tapped, which does not change its numbers.
    prompt
        The user's text; it is put into the chat template unless ``options.raw``.
    options
        Of the recording.
    output
        The Parquet file to write.
    force
        Replace a file that is there.
    model_id, revision
        Kept in the trace; default to what the model says of itself.
    progress, note
        Told how many new tokens are there, of how many at most, and what is worth knowing. Without ``note`` only
        tokens that the model does not know are spoken of, as a warning.

    Returns
    -------
    Trace
        Of what was written. When SIGINT arrives (Ctrl-C) it ends early, and its metadata say so.

    Raises
    ------
    BeaconScopeError
        When the model cannot be recorded, the prompt does not fit, or the output cannot be written.
    KeyboardInterrupt
        When a second SIGINT arrives before the trace is written; the message says how to recover it.
    """
    options = options or RecordOptions()
    entry = Prompt("prompt", prompt, completion=options.completion)
    check_prompts(tokenizer, [entry], options, many=False)
    job = _Job(model, tokenizer, options, model_id, revision, progress, note)
    job.run([entry], [Path(output)], force)
    return load_trace(Path(output))


def record_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    options: RecordOptions | None = None,
    *,
    folder: str | Path,
    batch_size: int = 1,
    force: bool = False,
    model_id: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
    note: Note | None = None,
) -> list[Path]:
    """Record many prompts, one trace each: ``folder/ID.parquet``.

    Prompts whose trace is there and whole are skipped, so that an interrupted run goes on where it stopped; ``force``
    records them anew. Prompts with a completion of their own are run one at a time, the others ``batch_size`` together.

    Returns
    -------
    list of Path
        The traces in the order of ``prompts``, those that were there before too; fewer after a SIGINT (Ctrl-C).

    Raises
    ------
    BeaconScopeError
        As :func:`record`; the message names the prompt.
    KeyboardInterrupt
        As :func:`record`.
    """
    if batch_size < 1:
        raise UsageError(f"batch-size is {batch_size}; give at least 1")
    if options is not None and options.completion is not None:
        raise UsageError("a completion belongs to one prompt; give each prompt its own")
    options = options or RecordOptions()
    paths, unfinished = find_unfinished(prompts, Path(folder), force=force, note=note)
    # All of them now, so that the last one is not refused after hours.
    check_prompts(tokenizer, unfinished, options)
    job = _Job(model, tokenizer, options, model_id, revision, progress, note, many=True)
    with traces_folder(Path(folder)):
        for batch in prompt_batches(unfinished, batch_size):
            try:
                stopped = job.run(batch, [paths[prompt.id] for prompt in batch], force=True)
            except BeaconScopeError as error:
                raise type(error)(f"prompt {', '.join(prompt.id for prompt in batch)}: {error}") from error
            if stopped:
                break
    return [path for path in paths.values() if path.exists()]


@dataclass(frozen=True)
class _Text:
    """What one journal is told of its text."""

    prompt: Prompt
    ids: list[int]


class _Job:
    """Recordings of one model with the same options."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        options: RecordOptions,
        model_id: str | None,
        revision: str | None,
        progress: Progress | None,
        note: Note | None,
        *,
        many: bool = False,
    ) -> None:
        self.options = with_shadow(options)
        self._many = many
        self._tapped: TappedModel = tap(model)
        self._tokenizer = tokenizer
        self._model_id = model_id or getattr(model.config, "_name_or_path", "") or type(model).__name__
        self._revision = revision
        self._decoding, self._decoding_notes = resolve_decoding(model, options.sampling)
        self._seed_notes = _idle_seed(self.options, self._decoding)
        self._progress = progress or (lambda done, total: None)
        self._note = note or (lambda text: None)
        # Who asked for no notes has to know of it all the same.
        self._warn = note or (lambda text: warnings.warn(text, stacklevel=5))

    def run(self, prompts: Sequence[Prompt], outputs: Sequence[Path], force: bool) -> bool:
        """Record one batch; True when it was interrupted."""
        texts = [_Text(prompt, encode_prompt(self._tokenizer, prompt.prompt, self.options)) for prompt in prompts]
        given = prompts[0].completion
        forced = None if given is None else encode_completion(self._tokenizer, given)
        self._check_vocabulary([*(text.ids for text in texts), forced or []])
        if self.options.prefill_chunk is not None and len({len(text.ids) for text in texts}) > 1:
            raise UsageError("prompts of different lengths cannot be fed in chunks together; give --batch-size 1")
        self._warn_of_unknown(prompts, given)
        plan = make_plan(
            self._tapped,
            self.options,
            [len(text.ids) for text in texts],
            None if forced is None else len(forced),
            outputs[0].resolve().parent,
        )
        for line in plan.notes:
            self._say(prompts, line)
        self._note_once(self._seed_notes)
        if forced is None:
            self._note_once(self._decoding_notes)
        try:
            with ExitStack() as stack:
                journals = [
                    stack.enter_context(
                        Journal.create(output, plan.layout, self._metadata(text, plan.max_length), force=force)
                    )
                    for text, output in zip(texts, outputs, strict=True)
                ]
                run = _Run(
                    self._tapped,
                    self.options,
                    self._decoding,
                    texts,
                    forced,
                    plan,
                    journals,
                    self._tokenizer,
                    self._progress,
                )
                interrupted = run.generate()
                for index, journal in enumerate(journals):
                    journal.finalize(run.closing(index, interrupted))
        except NotFinite as error:
            raise BeaconScopeError(self._not_finite(prompts, error, [])) from error
        except KeyboardInterrupt:
            left = _left(outputs)
            if not left:
                raise
            raise KeyboardInterrupt(f"stopped before the trace was written; {left}") from None
        except BeaconScopeError as error:
            left = _left(outputs)
            # An error of the journal says it already.
            if not left or "recover" in str(error):
                raise
            raise type(error)(f"{error}; {left}") from error
        except (MemoryError, RuntimeError) as error:
            left = _left(outputs)
            if not left or not no_memory(error):
                raise
            raise BeaconScopeError(f"no memory is left; {left}") from error
        if run.stopped is not None:
            cut = [output for output, row in zip(outputs, run.generation.written, strict=True) if not row.done]
            raise BeaconScopeError(self._not_finite(prompts, run.stopped, cut)) from run.stopped
        self._note_unopened(texts, run)
        self._note_not_finite(prompts, run)
        if not interrupted:
            self._note_cache(prompts, run)
        return interrupted

    def _check_vocabulary(self, texts: Sequence[Sequence[int]]) -> None:
        """Refuse tokens that the model has no embedding of."""
        embeddings = self._tapped.model.get_input_embeddings().weight
        assert isinstance(embeddings, torch.Tensor)
        last = max(max(ids, default=0) for ids in texts)
        if last >= len(embeddings):
            raise BeaconScopeError(
                f"the tokenizer has token {last} ({self._tokenizer.convert_ids_to_tokens(last)}), and the model only "
                f"{len(embeddings)} tokens; give the model its own tokenizer"
            )

    def _warn_of_unknown(self, prompts: Sequence[Prompt], completion: str | None) -> None:
        """Say when texts have tokens that the model does not know."""
        system = [] if self.options.system is None else [self.options.system]
        texts = [(f"the prompt{self._named([each])}", [*system, each.prompt]) for each in prompts]
        if completion is not None:
            texts.append((f"the completion{self._named(prompts)}", [completion]))
        for what, parts in texts:
            count, total = count_unknown(self._tokenizer, parts)
            if count:
                text = (
                    f"{count} of {total} tokens of {what} {'is' if count == 1 else 'are'} unknown to this model "
                    f"({self._tokenizer.unk_token}), which cannot tell them apart."
                )
                if is_bundled(self._tapped.model):
                    text += " It reads only problems of its own, as `python -m beaconscope.reasoner` prints them."
                self._warn(text)

    def _named(self, prompts: Sequence[Prompt]) -> str:
        """Which of many prompts these are; nothing where there is only one."""
        if not self._many:
            return ""
        names = ", ".join(prompt.id for prompt in prompts[:_NAMES])
        return f" {names}" + (f" and {len(prompts) - _NAMES} more" if len(prompts) > _NAMES else "")

    def _say(self, prompts: Sequence[Prompt], text: str) -> None:
        """Tell what is worth knowing of a batch."""
        self._note(self._of(prompts, text))

    def _of(self, prompts: Sequence[Prompt], text: str) -> str:
        """A text about a batch, with the prompts' names where there are many."""
        return f"Prompt{'s' if len(prompts) > 1 else ''}{self._named(prompts)}: {text}" if self._many else text

    def _note_once(self, notes: list[str]) -> None:
        """Tell what holds for every batch, and not again."""
        for text in notes:
            self._note(text)
        notes.clear()

    def _note_unopened(self, texts: Sequence[_Text], run: _Run) -> None:
        """Say when a text closes a thought that nothing opened, so that all of it counts as answer."""
        think_open, think_close = self.options.think_open, self.options.think_close
        for text, row in zip(texts, run.generation.written, strict=True):
            tokens = token_bytes(self._tokenizer, text.ids + row.tokens)
            phases = split_phases(tokens, len(text.ids), think_open, think_close)
            if "think" not in phases and think_close.encode() in b"".join(tokens[len(text.ids) :]):
                self._say(
                    [text.prompt],
                    f"The text closes a thought ({think_close}) that nothing opened, so all of it counts as answer; "
                    f"where the model thinks from the start, let the prompt end with {think_open} (with --raw).",
                )

    def _note_cache(self, prompts: Sequence[Prompt], run: _Run) -> None:
        """Say when nothing was compressed, and what would have changed that."""
        policy = self.options.policy
        longest = max(run.generation.lengths)
        if policy.capacity is not None and longest < policy.capacity:
            text = f"The cache never filled: {longest} tokens, {policy.capacity} slots. Nothing was compressed"
            most = longest - policy.interval
            remedy = f"; a --budget of at most {most} would have." if most >= policy.least_budget else "."
            self._say(prompts, text + remedy)

    def _not_finite(self, prompts: Sequence[Prompt], error: NotFinite, kept: Sequence[Path]) -> str:
        """Say that a recording stopped at logits that are not finite, why, and where what came before is."""
        of_prompt = f" of prompt{self._named([prompts[error.row]])}" if self._many else ""
        text = f"the model's logits{of_prompt} are not finite {error.place}: "
        text += explain_not_finite(self._tapped.model, error.ids)
        if kept:
            text += f"; what was recorded before is in {' and '.join(map(str, kept))}, marked as cut"
        return text

    def _note_not_finite(self, prompts: Sequence[Prompt], run: _Run) -> None:
        """Say when what was recorded of a head is not finite, though the logits are."""
        if not run.not_finite:
            return
        named = [
            f"layer {layer} head {head} ({count} position{'s' * (count != 1)})"
            for (layer, head), count in sorted(run.not_finite.items())
        ]
        if len(named) > _NAMES:
            named[_NAMES - 1 :] = [f"{len(named) - _NAMES + 1} more heads"]
        text = (
            f"Queries, keys or values are not finite in {' and '.join(named)}, though the logits are; analyze and "
            "replay leave them out."
        )
        self._warn(self._of(prompts, text))

    def _metadata(self, text: _Text, max_length: int) -> dict[str, Any]:
        model = self._tapped.model
        options = self.options
        rotary, attention = _layer_facts(self._tapped, max_length)
        return {
            "model": {
                "id": self._model_id,
                "revision": self._revision,
                "config": model.config.to_dict(),
                "dtype": str(model.dtype).removeprefix("torch."),
                "parameters": model.num_parameters(),
                "attention_backend": self._tapped.backend,
            },
            "tokenizer": {
                "id": self._model_id,
                "special_ids": sorted(special_ids(self._tokenizer)),
            },
            "rotary": rotary,
            "attention": attention,
            "prompt": text.prompt.prompt,
            "prompt_id": text.prompt.id,
            "prompt_length": len(text.ids),
            "right_answer": text.prompt.answer,
            "think_open": options.think_open,
            "think_close": options.think_close,
            "options": {
                **{key: value for key, value in dataclasses.asdict(options).items() if key not in ("policy", "shadow")},
                "decoding": self._decoding.to_dict(),
                "teacher_forced": text.prompt.completion is not None,
            },
            "policy": {"name": options.policy.name, "params": options.policy.params()},
            "versions": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in _LIBRARIES},
            },
            "device": str(model.device),
            "attention_over": "what the cache held" if options.policy.evicts else "everything",
        }


def _idle_seed(options: RecordOptions, decoding: Decoding) -> list[str]:
    """A note on a seed that is given and that nothing draws from; none where something does."""
    seed = options.sampling.seed
    policy = options.policy.shadow if isinstance(options.policy, Full) else options.policy
    draws = getattr(policy, "seed", None) == seed and getattr(policy, "selector", "random") == "random"
    if seed is None or not decoding.greedy or draws:
        return []
    return [f"--seed {seed} has no effect: decoding is greedy, and the cache's policy draws no random numbers from it."]


def _left(outputs: Sequence[Path]) -> str:
    """What to do with what was recorded, where the traces are not written; nothing where nothing was."""
    left = [f"`beaconscope recover {output}`" for output in outputs if journal_path(output).exists()]
    return f"what was recorded is safe: run {' and '.join(left)}" if left else ""


def _layer_facts(tapped: TappedModel, max_length: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary embeddings, each kind once, and the facts of each layer's attention that replay needs.

    A text of at most ``max_length`` tokens says which sliding layers see everything, so that a cache compresses them.
    """
    kinds: list[dict[str, Any]] = []
    of_layer: dict[str, int | None] = {}
    attention: dict[str, Any] = {}
    for info in tapped.layers:
        kind = None if info.rotary is None else info.rotary.to_dict()
        if kind is not None and kind not in kinds:
            kinds.append(kind)
        of_layer[str(info.layer)] = None if kind is None else kinds.index(kind)
        attention[str(info.layer)] = {
            "scaling": info.scaling,
            "softcap": info.softcap,
            "sink_logit": None if info.sink_logit is None else info.sink_logit.float().tolist(),
            "window": info.window,
            "compressible": not info.is_bounded(max_length),
            "kv_heads": info.kv_heads,
        }
    return {"kinds": kinds, "layers": of_layer}, attention


class _Run:
    """One batch being generated."""

    def __init__(
        self,
        tapped: TappedModel,
        options: RecordOptions,
        decoding: Decoding,
        texts: Sequence[_Text],
        forced: list[int] | None,
        plan: Plan,
        journals: Sequence[Journal],
        tokenizer: PreTrainedTokenizerBase,
        progress: Progress,
    ) -> None:
        self._options = options
        self._device = tapped.model.device
        self._texts = texts
        self._journals = journals
        self._tokenizer = tokenizer
        self._progress = progress
        self._layout = plan.layout
        self._recorder = Recorder(plan.layout, options.sink_positions, options.local_window, self._write_heads)
        kinds = kinds_of_tokens(tapped.model, tokenizer) if options.policy.needs_kinds else None
        self.cache = CompressedCache(
            tapped, options.policy, observer=self._recorder, token_kinds=kinds, max_length=plan.max_length
        )
        self.generation = Generation(
            tapped.model,
            self.cache,
            [text.ids for text in texts],
            decoding,
            plan.limits,
            end_tokens(tapped.model, tokenizer),
            forced,
        )
        self._total = max(plan.limits)
        self._tokens_written = [0 for _ in texts]
        self._prefill: list[int] = []
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self.stopped: NotFinite | None = None
        """Why it ended early, where logits were not finite."""
        self.not_finite: dict[tuple[int, int], int] = {}
        """Positions at which a query, key or value is not finite, by layer and KV head, where there are any."""

    def generate(self) -> bool:
        """Generate and hand everything to the journals; True when it was interrupted.

        Raises
        ------
        NotFinite
            When the logits after a prompt are not finite; nothing was handed over then.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        with _interruptible() as interrupted, torch.inference_mode():
            started = time.perf_counter()
            self._prefill = self.generation.prefill(self._options.prefill_chunk)
            self._settled()
            self._seconds["prefill"] = time.perf_counter() - started
            started = time.perf_counter()

            def settled() -> bool:
                self._settled()
                return interrupted.is_set()

            if not interrupted.is_set():
                try:
                    self.generation.run(settled)
                except NotFinite as error:
                    self.stopped = error
                    self._settled()
            self._recorder.hand_over(self.generation.lengths)
            self._seconds["decode"] = time.perf_counter() - started
            return interrupted.is_set()

    def _settled(self) -> None:
        """Hand over what has been generated so far."""
        lengths = self.generation.lengths
        for index in range(len(self._texts)):
            self._write_tokens(index, lengths[index])
        self._recorder.drain(self.cache, lengths)
        self._progress(max(len(row.tokens) for row in self.generation.written), self._total)

    def _write_tokens(self, index: int, length: int) -> None:
        """Append a sequence's tokens from where it was left up to ``length``."""
        start = self._tokens_written[index]
        if start == length:
            return
        prompt = self._texts[index].ids
        row = self.generation.written[index]
        of_prompt = prompt[start:length]
        written = slice(max(start - len(prompt), 0), length - len(prompt))
        missing = [float("nan")] * len(of_prompt)
        ids = of_prompt + row.tokens[written]
        self._journals[index].append_tokens(
            TokenBlock(
                first_position=start,
                token_id=np.array(ids, np.int32),
                token_bytes=token_bytes(self._tokenizer, ids),
                logprob=np.array(missing + row.logprob[written], np.float32),
                entropy=np.array(missing + row.entropy[written], np.float32),
            )
        )
        self._tokens_written[index] = length

    def _write_heads(self, row: int, block: HeadBlock) -> None:
        parts = [part for part in (block.query, block.key, block.value) if part is not None]
        if not all(np.isfinite(part).all() for part in parts):
            finite = [np.isfinite(part).reshape(*part.shape[:2], -1).all(axis=-1) for part in parts]  # [T, H] each
            missing = (~np.logical_and.reduce(finite)).sum(axis=0).tolist()
            for head, count in zip(self._layout.of(block.layer).kv_heads, missing, strict=True):
                if count:
                    self.not_finite[block.layer, head] = self.not_finite.get((block.layer, head), 0) + count
        self._journals[row].append(block)

    def closing(self, index: int, interrupted: bool) -> dict[str, Any]:
        """The metadata that are known at the end, of one sequence."""
        row = self.generation.written[index]
        tokens = max(len(each.tokens) for each in self.generation.written)
        decode = self._seconds["decode"]
        cut = (interrupted or self.stopped is not None) and not row.done
        reason = "interrupted by the user"
        if self.stopped is not None:
            other = self._texts[self.stopped.row].prompt.id
            reason = (
                str(self.stopped)
                if index == self.stopped.row
                else f"the model's logits are not finite in prompt {other}, which ran in the same batch"
            )
        return {
            "text": self._tokenizer.decode(self._texts[index].ids + row.tokens),
            "whole": not cut,
            "cut_reason": reason if cut else None,
            "ended": row.ended,
            "prefill_passes": self._prefill,
            "shared_layers": self.cache.shared_layers,
            "timings": {
                "prefill_seconds": self._seconds["prefill"],
                "decode_seconds": decode,
                "tokens_per_second": tokens / decode if decode else None,
            },
            "peak_memory": _peak_memory(self._device) | {"cache": self.cache.nbytes},
        }


def _peak_memory(device: torch.device) -> dict[str, int]:
    """Peak bytes of the process, and of the device where it counts them."""
    peak: dict[str, int] = {}
    if sys.platform != "win32":
        import resource

        # Linux counts in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        peak["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_allocated(device)
    return peak


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Turn the first SIGINT into an event, so that a step is never cut in the middle; a second one raises."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    former = signal.getsignal(signal.SIGINT)

    def first(number: int, frame: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, former if callable(former) else signal.default_int_handler)

    signal.signal(signal.SIGINT, first)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, former)
