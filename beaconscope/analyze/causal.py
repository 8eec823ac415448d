"""Does a look back matter? The long-range gain of every generated token, from the model itself.

The gain of a step is log p(next token | everything) - log p(next token | its sentence may not look far), in nats.

1. The trace's tokens are fed to the model sentence by sentence, on a cache of keys and values that saw everything.
   Sliding layers see as much of it as ever.
2. Each sentence is fed twice on the same cache: once blind, its queries seeing only the last W positions and the sinks
   in every layer; what that adds to the cache is taken away again; and once with open eyes, which extends the cache.

So only the current sentence is blinded; what earlier ones fetched stays. Memory is that of the cache and one sentence.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy.stats import binomtest
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from beaconscope.analyze.analysis import Analysis
from beaconscope.analyze.sentences import Sentences, sentences_of
from beaconscope.errors import BeaconScopeError, no_memory
from beaconscope.models import cache_argument, tap
from beaconscope.models.finite import explain_not_finite, finite_logits
from beaconscope.progress import Progress
from beaconscope.trace import Trace

MATTERS = 1.0
"""Nats of gain from which on a look back mattered."""
_CHUNK = 512
"""Tokens of the prompt that are fed at once."""
_SHOWN = 50
"""Steps listed of each kind of disagreement."""
_SINKS = 4
"""First positions that stay visible where no sinks were found."""
_CHECKED, _CHECKED_MOST = 64, 2048
"""Tokens, from the least to the most, on which it is checked that the model takes masks."""
_APART, _APART_HALF = 1e-3, 0.1
"""Largest difference of probabilities in that check, in float32 and in a type of 16 bits."""


def add_causal(trace: Trace, analysis: Analysis, model: PreTrainedModel, progress: Progress | None = None) -> Analysis:
    """Compute the long-range gain of every step and hold the revisits against it.

    Parameters
    ----------
    trace, analysis
        A trace and its analysis, whose window and sinks are used.
    model
        The model of the recording, as transformers loads it.
    progress
        Called with the tokens done and their number.

    Returns
    -------
    Analysis
        With ``gain`` in tokens and revisits, and ``causal`` filled.

    Raises
    ------
    BeaconScopeError
        Where the model cannot have written the trace, has layers that this cannot blind, or logits that are not finite.
    """
    frame = trace.tokens
    token_id = torch.from_numpy(frame["token_id"].to_numpy(np.int64))
    sinks = [int(sink["position"]) for sink in analysis.summary["sinks"]] or list(range(_SINKS))
    window = int(analysis.summary["window"])
    gain, logprob = long_range_gain(model, token_id, trace.prompt_length, sentences_of(frame), window, sinks, progress)
    tokens = analysis.tokens.assign(gain=gain)
    revisits = analysis.revisits.assign(gain=gain[analysis.revisits["position"].to_numpy(np.int64)])
    recorded = frame["logprob"].to_numpy(np.float64)[1:]
    apart = np.abs(recorded - logprob[:-1])
    causal = {
        "threshold": MATTERS,
        "window": window,
        # A compressed or sampled run says something else; a large number here means another model.
        "logprob_difference": float(np.nanmedian(apart)) if np.isfinite(apart).any() else None,
        **_against_gain(tokens),
    }
    return dataclasses.replace(analysis, tokens=tokens, revisits=revisits, causal=causal)


@torch.inference_mode()
def long_range_gain(
    model: PreTrainedModel,
    token_id: Tensor,
    prompt_length: int,
    sentences: Sentences,
    window: int,
    sinks: list[int],
    progress: Progress | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Long-range gain of each step, and the log-probability of what it writes with everything in view.

    Parameters
    ----------
    model
        Attention backend sdpa or eager, whose masks may be anything.
    token_id
        int64 [T].
    prompt_length, sentences
        Of the trace.
    window
        W: a blind query sees itself and the W positions before it.
    sinks
        Positions that a blind query sees besides.
    progress
        Called with the tokens done and T.

    Returns
    -------
    gain, logprob
        In nats, [T], by the position of the query; nan for steps of the prompt and the last one.
    """
    length = len(token_id)
    report = progress or (lambda done, total: None)
    report(0, length)
    views = _views(model, token_id)
    device = model.device
    # Without the model's config every layer keeps everything, sliding ones too; masks do the rest.
    cache = DynamicCache()
    gain, logprob = np.full(length, np.nan, np.float32), np.full(length, np.nan, np.float32)
    first = max(0, prompt_length - 1)
    begin = int(sentences.start[sentences.of[first]]) if first < length else length
    for start in range(0, begin, _CHUNK):
        stop = min(begin, start + _CHUNK)
        _feed(model, cache, views, token_id, start, stop)
        report(stop, length)
    for start, stop in zip(sentences.start.tolist(), sentences.stop.tolist(), strict=True):
        if stop <= begin:
            continue
        written = token_id[start + 1 : stop + 1].to(device)
        count = len(written)
        blind = None
        if stop - 1 > window:
            blind = _feed(model, cache, views, token_id, start, stop, _blinkers(start, stop, window, sinks))
            cache.crop(start - stop)  # negative: how many of the last tokens go
        seeing = _feed(model, cache, views, token_id, start, stop)
        for logits in (seeing,) if blind is None else (seeing, blind):
            _check_finite(model, logits, token_id, start)
        if count:
            with_all = _logprob(seeing, written)
            rows = slice(start, start + count)
            logprob[rows] = with_all
            gain[rows] = 0.0 if blind is None else with_all - _logprob(blind, written)
        report(stop, length)
    gain[:first] = np.nan
    logprob[:first] = np.nan
    return gain, logprob


def _views(model: PreTrainedModel, token_id: Tensor) -> dict[str, int | None]:
    """Return how many positions a query sees, itself included, by kind of layer; None is all.

    Raises
    ------
    BeaconScopeError
        Where the model cannot have written the tokens, or does not take masks for what its layers see.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if int(token_id.max()) >= config.vocab_size:
        raise BeaconScopeError("the trace has tokens that this model lacks; give --model the recording's own model")
    tapped = tap(model)
    ends = [tapped.rotary_limit, *(info.chunk for info in tapped.layers)]
    end = min((each for each in ends if each is not None), default=len(token_id))
    if len(token_id) > end:
        raise BeaconScopeError(
            f"{name} attends in another way past {end} tokens (chunks, or other rotary frequencies), and the trace has "
            f"{len(token_id)}; drop --causal"
        )
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(tapped.layers)
    views: dict[str, int | None] = {}
    for kind, info in zip(kinds, tapped.layers, strict=True):
        if views.setdefault(kind, info.window) != info.window:
            raise BeaconScopeError(f"{name} has layers of one kind with different windows; drop --causal")
    if len(set(views.values())) == 1:
        views = dict([views.popitem()])
    _check_masks(model, views, token_id)
    return views


def _check_masks(model: PreTrainedModel, views: dict[str, int | None], token_id: Tensor) -> None:
    """Refuse a model that, given masks of its own kind from outside, computes something else, or nothing finite."""
    shortest = min((window for window in views.values() if window is not None), default=0)
    text = token_id[: max(_CHECKED, min(2 * shortest, _CHECKED_MOST))]
    try:
        ours = _feed(model, DynamicCache(), views, text, 0, len(text))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        if no_memory(error):
            raise
        apart = math.inf
    else:
        theirs = model(input_ids=text[None].to(model.device), use_cache=False).logits[0]
        _check_finite(model, theirs, token_id, 0)
        apart = _probability_difference(ours, theirs)
        blind = _feed(model, DynamicCache(), views, text, 0, len(text), torch.eye(len(text), dtype=torch.bool))
        if _probability_difference(blind, theirs) == 0:  # whatever it is given, it sees everything
            apart = math.inf
    if not apart <= (_APART if model.dtype == torch.float32 else _APART_HALF):
        raise BeaconScopeError(
            f"{type(model).__name__} does not take masks that say what its layers see, so no step can be blinded; drop "
            "--causal"
        )


def _check_finite(model: PreTrainedModel, logits: Tensor, token_id: Tensor, start: int) -> None:
    """Refuse logits [b, V] of the tokens from ``start`` on that are not finite, and name the layer."""
    finite = finite_logits(logits).tolist()
    if not all(finite):
        fed = start + finite.index(False) + 1
        raise BeaconScopeError(
            f"the model's logits are not finite after {fed} of {len(token_id)} tokens: "
            f"{explain_not_finite(model, token_id[:fed].tolist())}"
        )


def _probability_difference(one: Tensor, other: Tensor) -> float:
    return float((one.float().softmax(dim=-1) - other.float().softmax(dim=-1)).abs().max())


def _feed(
    model: PreTrainedModel,
    cache: DynamicCache,
    views: dict[str, int | None],
    token_id: Tensor,
    start: int,
    stop: int,
    visible: Tensor | None = None,
) -> Tensor:
    """Logits [b, V] of the tokens from ``start`` to before ``stop``; the cache grows by them.

    ``visible`` [b, stop] is what they may see, beside what kind of layer it is; None is all before them.
    """
    position, column = torch.arange(start, stop), torch.arange(stop)
    if visible is None:
        visible = column <= position[:, None]
    masks: dict[str, Tensor] = {}
    for kind, window in views.items():
        seen = visible if window is None else visible & (column > position[:, None] - window)
        hidden = torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)
        masks[kind] = hidden[None, None].to(model.device)
    output: Any = model(
        input_ids=token_id[None, start:stop].to(model.device),
        # Models with layers of several kinds take a mask for each.
        attention_mask=masks if len(masks) > 1 else masks[next(iter(masks))],
        position_ids=position[None].to(model.device),
        use_cache=True,
        **{cache_argument(model): cache},
    )
    logits: Tensor = output.logits[0]
    return logits


def _blinkers(start: int, stop: int, window: int, sinks: list[int]) -> Tensor:
    """What blind queries may see, bool [b, stop]."""
    position, column = torch.arange(start, stop)[:, None], torch.arange(stop)
    visible = column >= position - window
    visible[:, [sink for sink in sinks if sink < stop]] = True
    return visible & (column <= position)


def _logprob(logits: Tensor, written: Tensor) -> npt.NDArray[np.float32]:
    """Log-probabilities of the written tokens [n] under the first n logits."""
    chosen = logits[: len(written)].float().log_softmax(dim=-1).gather(-1, written[:, None])
    values: npt.NDArray[np.float32] = chosen[:, 0].cpu().numpy()
    return values


def _against_gain(tokens: pd.DataFrame) -> dict[str, Any]:
    """How well revisits foretell gain, over the steps that could be either."""
    steps = tokens[tokens["p"].notna() & tokens["gain"].notna()]
    flagged = steps["revisit"].to_numpy(np.bool_)
    matters = steps["gain"].to_numpy() > MATTERS
    both = int((flagged & matters).sum())
    text = tokens["token"].tolist()

    def listed(chosen: npt.NDArray[np.bool_], ascending: bool) -> list[dict[str, Any]]:
        rows = steps[chosen].sort_values(["gain", "position"], ascending=[ascending, True]).head(_SHOWN)
        return [
            {"position": int(position), "writes": text[position + 1], "gain": float(gain)}
            for position, gain in zip(rows["position"], rows["gain"], strict=True)
        ]

    return {
        "steps": len(steps),
        "revisits": int(flagged.sum()),
        "mattering": int(matters.sum()),
        "both": both,
        "precision": _share(both, int(flagged.sum())),
        "recall": _share(both, int(matters.sum())),
        "unseen": listed(matters & ~flagged, ascending=False),
        "idle": listed(flagged & ~matters, ascending=True),
    }


def _share(part: int, whole: int) -> list[float] | None:
    """A share with its Wilson interval at 95 %."""
    if not whole:
        return None
    interval = binomtest(part, whole).proportion_ci(method="wilson")
    return [part / whole, float(interval.low), float(interval.high)]
