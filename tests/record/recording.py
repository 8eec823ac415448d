"""Record tiny models, and run them again without this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from beaconscope import RecordOptions, Trace, record
from beaconscope.trace import HeadBlock, Journal
from tests.tiny import tiny_model, tiny_tokenizer

PROMPT = "Plan: add, then double. 3 and 4?"
"""32 tokens of the tiny tokenizer."""


def endless_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer without an end token, so that every text reaches its limit."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


def save_tiny(folder: Path, **overrides: Any) -> Path:
    """Save a tiny Llama and the endless tokenizer as a local model folder; ``overrides`` go to the config."""
    tiny_model("llama", **overrides).save_pretrained(folder)
    endless_tokenizer().save_pretrained(folder)
    return folder


def record_tiny(
    model: PreTrainedModel,
    folder: Path,
    prompt: str = PROMPT,
    *,
    name: str = "t",
    note: Callable[[str], None] | None = None,
    **options: Any,
) -> Trace:
    """Record a prompt as it is, without a chat template, all layers."""
    settings = RecordOptions(**{"raw": True, "layers": "all", "max_new_tokens": 24, **options})
    return record(model, endless_tokenizer(), prompt, settings, output=folder / f"{name}.parquet", note=note)


@contextmanager
def spoiled(spoil: Callable[[HeadBlock], None]) -> Iterator[None]:
    """Change what recordings write of heads, as ``spoil`` changes the arrays of each block, but nothing that they do.

    So a trace can hold what no recording writes any more.
    """
    append = Journal.append

    def spoil_and_append(journal: Journal, block: HeadBlock) -> None:
        spoil(block)
        append(journal, block)

    with mock.patch.object(Journal, "append", spoil_and_append):
        yield


def at_position(name: str, value: float, layer: int, position: int, *place: int) -> Callable[[HeadBlock], None]:
    """Put a number into the array ``name`` of a layer's blocks, at a position and a place: KV head, query head, ..."""

    def spoil(block: HeadBlock) -> None:
        if block.layer == layer and block.first_position <= position < block.first_position + len(block.query):
            getattr(block, name)[(position - block.first_position, *place)] = value

    return spoil


def generate_plainly(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What transformers generates greedily."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()


def token_ids(trace: Trace) -> list[int]:
    return trace.tokens["token_id"].tolist()


def evictions_of(trace: Trace, at: tuple[int, int]) -> list[tuple[int, list[int]]]:
    """When the cache of a (layer, KV head) was compressed, and which positions it dropped each time."""
    return [(eviction.position, eviction.evicted.tolist()) for eviction in trace.evictions(*at)]


def attentions_of(model: PreTrainedModel, ids: list[int]) -> list[np.ndarray]:
    """Attention [Hq, T, T] of each layer in one pass over everything, from eager attention."""
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
    return [weights[0].numpy() for weights in output.attentions]


def ranges(weights: np.ndarray, sinks: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mass of attention [Hq, T, T] on sinks, on the last ``window`` positions and on the rest, each [Hq, T]."""
    queries, keys = np.indices(weights.shape[1:])
    sink = keys < sinks
    local = ~sink & (queries - keys <= window)
    distant = ~sink & ~local
    return tuple((weights * part).sum(-1) for part in (sink, local, distant))
