"""The policies that look at no query, for one KV head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .beacon_kv import Compression, steps


def full(length: int, prompt_length: int, chunks: Sequence[int] | None = None) -> list[Compression]:
    """Keep everything: no compression ever."""
    return []


def streaming_llm(
    length: int, prompt_length: int, budget: int, sinks: int = 4, chunks: Sequence[int] | None = None
) -> list[Compression]:
    """Keep the first ``sinks`` positions and the last ``budget - sinks``, after every step."""
    if not 0 <= sinks < budget:
        raise ValueError("the sinks must leave room in the budget")
    compressions: list[Compression] = []
    cached: list[int] = []
    for step in steps(length, prompt_length, chunks):
        cached += step
        if len(cached) > budget:
            kept = cached[:sinks] + cached[len(cached) - (budget - sinks) :]
            compressions.append(Compression(step[-1], kept=np.array(kept), evicted=np.setdiff1d(cached, kept)))
            cached = kept
    return compressions


def random_eviction(
    length: int,
    prompt_length: int,
    budget: int,
    interval: int,
    recent: int,
    seed: int = 0,
    chunks: Sequence[int] | None = None,
) -> list[Compression]:
    """Keep the last ``recent`` entries and a uniform choice of the others, when BeaconKV would compress."""
    if not 0 <= recent <= budget:
        raise ValueError("recent entries are always kept, so they must fit the budget")
    rng = np.random.default_rng(seed)
    compressions: list[Compression] = []
    cached: list[int] = []
    for step in steps(length, prompt_length, chunks):
        cached += step
        if len(cached) >= budget + interval:
            old = len(cached) - recent
            kept = sorted(rng.choice(cached[:old], budget - recent, replace=False).tolist()) + cached[old:]
            compressions.append(Compression(step[-1], kept=np.array(kept), evicted=np.setdiff1d(cached, kept)))
            cached = kept
    return compressions


def check_random_eviction(
    compressions: Sequence[Compression],
    length: int,
    prompt_length: int,
    budget: int,
    interval: int,
    recent: int,
    chunks: Sequence[int] | None = None,
) -> None:
    """Assert what must hold of random eviction, whatever the random numbers."""
    left = list(compressions)
    cached: list[int] = []
    for step in steps(length, prompt_length, chunks):
        cached += step
        if len(cached) >= budget + interval:
            compression = left.pop(0)
            kept = list(compression.kept)
            assert compression.position == step[-1]
            assert len(kept) == budget
            assert kept == sorted(set(kept))
            assert set(kept) <= set(cached)
            assert kept[budget - recent :] == cached[len(cached) - recent :]
            assert list(compression.evicted) == sorted(set(cached) - set(kept))
            cached = kept
    assert not left
