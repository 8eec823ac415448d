"""Run the text of a trace again under other caches, for what a replay cannot say: what the model itself makes of it.

1. *Teacher-forced*: the same tokens are fed through the full cache and through each setting, block by block, and the
   two distributions of the next token are compared where they stand, so that no more than a block of them is held.
2. *Free-running*: each setting, and the full cache, writes on from the prompt with the generation settings and the seed
   of the recording, those that came from the model included.

The full cache is what the others are compared with, not the recording, which may have been made with another cache.
A setting that evicted nothing did what the full cache does. Nothing was measured of it then, so it has no measures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.cache import CompressedCache
from beaconscope.kv.layer import CompressedLayer
from beaconscope.kv.policies import Full, Policy
from beaconscope.models import TappedModel, cache_argument, tap, token_bytes
from beaconscope.models.finite import explain_not_finite, finite_logits
from beaconscope.models.hooks import LayerCall
from beaconscope.progress import Progress
from beaconscope.record.decoding import Decoding
from beaconscope.record.generate import Generation, NotFinite
from beaconscope.record.generation_config import check_decoding
from beaconscope.record.vocabulary import end_tokens, kinds_of_tokens
from beaconscope.trace import Trace, split_phases
from beaconscope.trace.facts import prefill_passes

_TOGETHER = 64
"""Tokens whose distributions are held at a time."""
_SAME_MODEL = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Forced:
    """One setting on the tokens of the recording; against the full cache on the same."""

    tokens: int
    """Generated tokens of the recording, T."""
    evicted: int
    """Entries that were gone when the last of them was predicted, over all layers and KV heads. Where a setting has 0,
    it has no measures."""
    kl: float | None
    """Kullback-Leibler divergence of the next token's distribution from the full cache's, mean over tokens, nats."""
    kl_most: float | None
    perplexity: float | None
    """Of the recorded tokens, exp of their mean negative log probability."""
    agreement: float | None
    """Share of the tokens at which both hold the same one most likely, 0 to 1."""


@dataclass(frozen=True)
class Free:
    """What one setting wrote by itself; against what the full cache wrote."""

    tokens: int
    evicted: int
    """Entries that were gone when the last token was predicted, over all layers and KV heads. Where a setting has 0,
    it has no measures."""
    agreement: float | None
    """Share of the places, of the longer text, that hold the same token, 0 to 1."""
    first_divergence: int | None
    """Place of the first other token, counted from the end of the prompt; None where all are the same."""
    answer: str
    """What follows the thought; all of it where there is no thought."""
    same_answer: bool | None
    """The answers are the same but for white space."""
    right: bool | None
    """The answer holds the right one as a word; None where the trace does not know it."""


@dataclass(frozen=True)
class LiveCheck:
    """A setting, run for real."""

    policy: Policy
    forced: Forced
    free: Free

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the policy."""
        return {"forced": asdict(self.forced), "free": asdict(self.free)}


def check_live(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trace: Trace,
    policies: Sequence[Policy],
    progress: Progress | None = None,
) -> list[LiveCheck]:
    """Run the text of ``trace`` under the full cache and under each of ``policies``.

    Parameters
    ----------
    model, tokenizer
        Those that the trace was recorded with.
    trace
        A trace.
    policies
        Usable live.
    progress
        Told how many tokens of how many have been fed.

    Returns
    -------
    list of LiveCheck
        Of the full cache, then of ``policies`` in order.

    Raises
    ------
    BeaconScopeError
        When the trace is of another model, nothing was generated, or the model's logits are not finite.
    UsageError
        For a policy that works in replay only.
    """
    check_model(model, trace)
    tapped = tap(model)
    ids = [int(token) for token in trace.tokens["token_id"]]
    prompt, generated = ids[: trace.prompt_length], ids[trace.prompt_length :]
    if not generated:
        raise BeaconScopeError(f"{trace.path} has a prompt and nothing generated, so there is nothing to run again")
    for policy in policies:
        policy.check_live()
    wanted = [Full(), *policies]
    runs = _Runs(tapped, tokenizer, trace, prompt, len(generated), wanted, progress or (lambda done, total: None))
    with torch.inference_mode():
        forced = runs.forced(generated)
        written, evicted = zip(*(runs.free(policy) for policy in wanted), strict=True)
    answers = [runs.answer(tokens) for tokens in written]
    right = trace.metadata.get("right_answer")
    free = [
        _compared(tokens, gone, policy.evicts, written[0], answer, answers[0], right)
        for policy, tokens, gone, answer in zip(wanted, written, evicted, answers, strict=True)
    ]
    return [LiveCheck(*each) for each in zip(wanted, forced, free, strict=True)]


class _CountingCache(CompressedCache):
    """A cache that knows how many of its entries were gone when each forward pass began."""

    def __init__(self, tapped: TappedModel, policy: Policy, token_kinds: Tensor | None, max_length: int | None) -> None:
        super().__init__(tapped, policy, token_kinds=token_kinds, max_length=max_length)
        self._first = next((layer.layer for layer in self.compressed_layers), None)
        self._gone: dict[int, int | Tensor] = {}  # by the position of the first token of a pass

    def begin(self, call: LayerCall) -> None:
        """See :class:`~beaconscope.models.hooks.TappedCache`."""
        super().begin(call)
        if call.layer == self._first:
            layers = [layer for layer in self.compressed_layers if layer.lanes]
            start = layers[0].lanes[0].seen if layers else 0
            self._gone[start] = sum((_evicted_of(layer) for layer in layers), start=0)

    def evicted_before(self, position: int) -> int:
        """Entries, over layers and KV heads, that the query at a position could not attend to any more."""
        starts = [start for start in self._gone if start <= position]
        return int(self._gone[max(starts)]) if starts else 0


def _evicted_of(layer: CompressedLayer) -> int | Tensor:
    """Entries that a layer's only lane has seen and holds no more, over its KV heads."""
    lane = layer.lanes[0]
    held = layer.kept_positions(lane, 0)  # [H, N]
    if layer.policy.ragged:
        return held.shape[0] * lane.seen - (held >= 0).sum()
    # On the host, where nobody waits for the device.
    return held.shape[0] * (lane.seen - held.shape[1])


class _Runs:
    """One model and one prompt, under several caches."""

    def __init__(
        self,
        tapped: TappedModel,
        tokenizer: PreTrainedTokenizerBase,
        trace: Trace,
        prompt: list[int],
        generated: int,
        policies: Sequence[Policy],
        progress: Progress,
    ) -> None:
        self._tapped = tapped
        self._tokenizer = tokenizer
        self._trace = trace
        self._prompt = prompt
        self._policies = policies
        options = trace.options
        try:
            # A chain of thought that was given says nothing of how long the model's own may be.
            limit = generated if options["teacher_forced"] else int(options["max_new_tokens"])
            self._decoding = Decoding.of_trace(options)
            check_decoding(self._decoding, tapped.model)
            self._chunk = None if options["prefill_chunk"] is None else max(1, int(options["prefill_chunk"]))
            self._markers = str(options["think_open"]), str(options["think_close"])
        except (KeyError, TypeError, ValueError) as error:
            raise BeaconScopeError(f"{trace.path} does not say how it was generated; record it again") from error
        # As far as the model can go, as in the recording.
        ends = [end for end in (tapped.context, tapped.rotary_limit) if end is not None]
        self._limit = min([limit, *(end - len(prompt) for end in ends)])
        self._max_length = len(prompt) + max(generated, self._limit)
        self._total = len(policies) * (generated + self._limit)
        self._done = 0
        self._progress = progress

    def _cache(self, policy: Policy) -> _CountingCache:
        kinds = kinds_of_tokens(self._tapped.model, self._tokenizer) if policy.needs_kinds else None
        return _CountingCache(self._tapped, policy, token_kinds=kinds, max_length=self._max_length)

    def _fed(self, tokens: int) -> None:
        self._done += tokens
        self._progress(self._done, self._total)

    def forced(self, generated: list[int]) -> list[Forced]:
        """Feed the recorded tokens to every cache."""
        caches = [self._cache(policy) for policy in self._policies]
        feeds = [_Feed(self._tapped.model, cache, len(self._prompt)) for cache in caches]
        device = self._tapped.model.device
        text = torch.tensor([self._prompt + generated], device=device)
        start = 0
        for size in prefill_passes(self._trace):
            before = [feed(text[:, start : start + size])[-1:] for feed in feeds]  # [1, V] each
            start += size
        told: list[list[Tensor]] = [[] for _ in feeds]
        for first in range(start, text.shape[1], _TOGETHER):
            part = text[:, first : first + _TOGETHER]
            full: Tensor | None = None
            for number, feed in enumerate(feeds):
                after = feed(part)  # [t, V]
                self._check_finite(self._policies[number], before[number], after, text[0, : first + part.shape[1]])
                log_p = torch.cat([before[number], after[:-1]]).log_softmax(dim=-1)
                before[number] = after[-1:]
                full = log_p if full is None else full
                told[number].append(_distances(full, log_p, part[0]))
                self._fed(part.shape[1])
        # The last token is predicted by the query before it.
        evicted = [cache.evicted_before(text.shape[1] - 2) for cache in caches]
        return [
            _forced(torch.cat(parts), gone, policy.evicts)
            for parts, gone, policy in zip(told, evicted, self._policies, strict=True)
        ]

    def _check_finite(self, policy: Policy, before: Tensor, after: Tensor, ids: Tensor) -> None:
        """Refuse logits before and after the last tokens of ``ids``, [1, V] and [t, V], that are not finite."""
        finite = finite_logits(torch.cat([before, after])).tolist()
        if not all(finite):
            fed = len(ids) - len(after) + finite.index(False)
            self._refuse(policy, NotFinite(0, len(self._prompt), ids[:fed].tolist()))

    def _refuse(self, policy: Policy, error: NotFinite) -> NoReturn:
        raise BeaconScopeError(
            f"under {policy.name} the model's logits are not finite {error.place}: "
            f"{explain_not_finite(self._tapped.model, error.ids)}"
        ) from error

    def free(self, policy: Policy) -> tuple[list[int], int]:
        """Tokens that the model writes with a cache of ``policy``, and the entries gone when it wrote the last."""
        cache = self._cache(policy)
        generation = Generation(
            self._tapped.model,
            cache,
            [self._prompt],
            self._decoding,
            [self._limit],
            end_tokens(self._tapped.model, self._tokenizer),
        )
        before = self._done

        def settled() -> bool:
            self._fed(before + len(generation.written[0].tokens) - self._done)
            return False

        try:
            generation.prefill(self._chunk)
            generation.run(settled)
        except NotFinite as error:
            self._refuse(policy, error)
        self._fed(before + self._limit - self._done)
        tokens = generation.written[0].tokens
        return tokens, cache.evicted_before(len(self._prompt) + len(tokens) - 2)

    def answer(self, tokens: list[int]) -> str:
        """What follows the thought in what was written."""
        whole = self._prompt + tokens
        phases = split_phases(token_bytes(self._tokenizer, whole), len(self._prompt), *self._markers)
        said = [token for token, phase in zip(whole, phases, strict=True) if phase == "answer"]
        return " ".join(str(self._tokenizer.decode(said, skip_special_tokens=True)).split())


class _Feed:
    """Feeds tokens to a model with a cache, in passes that end where the cache would compress."""

    def __init__(self, model: PreTrainedModel, cache: CompressedCache, prompt: int) -> None:
        self._model = model
        self._cache = cache
        self._prompt = prompt
        self._argument = cache_argument(model)
        self._position = 0
        cache.expect_prompt(prompt)

    def __call__(self, ids: Tensor) -> Tensor:
        """Logits after each of the tokens ``ids`` [1, T], float32 [T, V]; of a prompt after the last, [1, V]."""
        of_prompt = self._position < self._prompt
        found = []
        start = 0
        while start < ids.shape[1]:
            count = ids.shape[1] - start if of_prompt else min(self._cache.room(), ids.shape[1] - start)
            positions = torch.arange(self._position, self._position + count, device=ids.device)[None]
            output = self._model(
                input_ids=ids[:, start : start + count],
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1 if of_prompt else 0,
                **{self._argument: self._cache},
            )
            found.append(output.logits[0].float())
            self._position += count
            start += count
        return torch.cat(found)


def _distances(full: Tensor, log_p: Tensor, tokens: Tensor) -> Tensor:
    """Divergence, log probability of the token, and whether the likeliest are the same, for each of T, [T, 3]."""
    divergence = (full.exp() * (full - log_p).nan_to_num()).sum(dim=-1).clamp(min=0)
    of_token = log_p.gather(-1, tokens[:, None])[:, 0]
    same = (full.argmax(dim=-1) == log_p.argmax(dim=-1)).float()
    return torch.stack([divergence, of_token, same], dim=-1).cpu()


def _forced(told: Tensor, evicted: int, evicts: bool) -> Forced:
    if evicts and not evicted:
        return Forced(len(told), 0, kl=None, kl_most=None, perplexity=None, agreement=None)
    divergence, of_token, same = told.double().unbind(dim=-1)
    return Forced(
        tokens=len(told),
        evicted=evicted,
        kl=float(divergence.mean()),
        kl_most=float(divergence.max()),
        perplexity=float((-of_token.mean()).exp()),
        agreement=float(same.mean()),
    )


def _compared(
    tokens: list[int], evicted: int, evicts: bool, full: list[int], answer: str, full_answer: str, right: str | None
) -> Free:
    if evicts and not evicted:
        nothing = dict.fromkeys(("agreement", "first_divergence", "same_answer", "right"))
        return Free(len(tokens), 0, answer=answer, **nothing)
    same = np.array([one == other for one, other in zip_longest(tokens, full)])
    return Free(
        tokens=len(tokens),
        evicted=evicted,
        agreement=float(same.mean()),
        first_divergence=None if same.all() else int(same.argmin()),
        answer=answer,
        same_answer=answer == full_answer,
        right=None if right is None else re.search(rf"(?<!\w){re.escape(right.strip())}(?!\w)", answer) is not None,
    )


def check_model(model: PreTrainedModel, trace: Trace) -> None:
    """Refuse a model that is not the one that a trace was recorded with, as far as their sizes tell.

    Raises
    ------
    BeaconScopeError
        Saying which is.
    """
    recorded = trace.metadata.get("model", {}).get("config") or {}
    loaded = model.config.to_dict()
    for name in _SAME_MODEL:
        if recorded.get(name) != loaded.get(name):
            raise BeaconScopeError(
                f"{trace.path} is of another model ({trace.model_id}: {name} is {recorded.get(name)}, not "
                f"{loaded.get(name)}); give --model the one that it was recorded with"
            )
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    vocabulary = embeddings.shape[0]
    if not trace.tokens["token_id"].between(0, vocabulary - 1).all():
        raise BeaconScopeError(
            f"{trace.path} has tokens that this model does not know; give --model the one that it was recorded with"
        )
