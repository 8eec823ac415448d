"""What each of many settings would have kept of the attention, measured against the full attention of a trace.

For a head the attention of a block of queries on all keys is computed once. An entry that a setting evicts stays
evicted, so a setting is one number for each entry: the last position that still found it
(:class:`~.simulate.Lifetimes`). For a block the entries that outlive it form a mask matrix [N, C], and one product
gives the retained mass of all C settings; the few entries that go within the block are added by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from beaconscope.errors import UsageError
from beaconscope.replay.layer import LayerData
from beaconscope.replay.simulate import NEVER, Lifetimes

_BLOCK_BYTES = 64 << 20
"""Attention weights at hand at a time."""
_MOST_QUERIES = 128
"""Queries in a block at most: within it, entries that go are added one setting at a time."""


@dataclass(frozen=True)
class MeasureOptions:
    """How settings are measured."""

    hits: int = 8
    """M, the most attended positions of a query that count as its hits."""
    regret_mass: float = 0.05
    """A query that gives an evicted entry at least this much regrets it."""
    output_every: int = 16
    """Measure the output error of every so many queries, and of every TRT; it costs more than the rest. 0: never."""

    def __post_init__(self) -> None:
        if self.hits < 1:
            raise UsageError(f"hits is {self.hits}; give at least 1")
        if not 0 < self.regret_mass <= 1:
            raise UsageError(f"regret-mass is {self.regret_mass}; give more than 0 and at most 1")
        if self.output_every < 0:
            raise UsageError(f"output-every is {self.output_every}; give 0 (never) or more")


@dataclass(frozen=True)
class HeadMeasures:
    """Of one KV head and C settings, for each of Q decoding queries: means over its query heads, NaN for none."""

    positions: npt.NDArray[np.int64]  # [Q]
    mass: npt.NDArray[np.float32]  # [C, Q], share of the query's attention that went to what was kept, 0 to 1
    hit_rate: npt.NDArray[np.float32]  # [C, Q], share of its M most attended positions that were kept, 0 to 1
    output_error: npt.NDArray[np.float32]  # [C, Q], ||o_kept - o_full|| / ||o_full||, 0 and up
    regrets: npt.NDArray[np.float32]  # [C, Q], evicted entries that the query gave at least ``regret_mass``
    regret_delay: npt.NDArray[np.float32]  # [C, Q], tokens between such an eviction and the query, mean


def measure_head(
    data: LayerData, head: int, lifetimes: Sequence[Lifetimes], options: MeasureOptions, revisits: npt.NDArray[np.bool_]
) -> HeadMeasures:
    """Measure settings on one KV head.

    Parameters
    ----------
    data
        The layer.
    head
        Index of the head in ``data``.
    lifetimes
        C settings.
    options
        What to measure.
    revisits
        [T], True for the positions that are TRTs; their output error is always measured.
    """
    device = data.query.device
    last = torch.stack([setting.last[head] for setting in lifetimes])  # [C, T]
    first, length, group = data.prompt_length, data.length, data.query.shape[2]
    alone = _one_head(data, head)
    parts: list[tuple[Tensor, ...]] = []
    start = first
    while start < length:
        count = max(1, min(_MOST_QUERIES, _BLOCK_BYTES // (4 * group * length), length - start))
        stop = start + count
        everything = torch.arange(stop, device=device).expand(1, 1, stop)
        step = alone.step(start, stop, everything)
        weight = step.attention()[0, 0]  # [G, q, N]
        weight = weight / weight.sum(dim=-1, keepdim=True)  # a learned sink's share is no entry's
        chosen = _chosen(start, stop, first, revisits, options.output_every)
        parts.append(
            _measure_block(weight, last[:, :stop], start, step.value[0, 0], chosen, options, data.value is not None)
        )
        start = stop
    if not parts:
        empty = np.zeros((len(lifetimes), 0), np.float32)
        return HeadMeasures(np.zeros(0, np.int64), empty, empty, empty, empty, empty)
    joined = [torch.cat(part, dim=1).cpu().numpy().astype(np.float32) for part in zip(*parts, strict=True)]
    return HeadMeasures(np.arange(first, length), *joined)


def _one_head(data: LayerData, head: int) -> LayerData:
    """The layer with only the KV head number ``head``."""
    one = slice(head, head + 1)
    return LayerData(
        layer=data.layer,
        kv_heads=data.kv_heads[one],
        query=data.query[:, one],
        key=data.key[:, one],
        value=None if data.value is None else data.value[:, one],
        rotary=data.rotary,
        scaling=data.scaling,
        softcap=data.softcap,
        sink_logit=None if data.sink_logit is None else data.sink_logit[one],
        window=data.window,
        passes=data.passes,
    )


def _chosen(start: int, stop: int, first: int, revisits: npt.NDArray[np.bool_], every: int) -> Tensor:
    """Queries of a block whose output error is measured, indices into it."""
    if every == 0:
        return torch.zeros(0, dtype=torch.int64)
    position = np.arange(start, stop)
    return torch.from_numpy(np.flatnonzero(((position - first) % every == 0) | revisits[start:stop]))


def _measure_block(
    weight: Tensor, last: Tensor, start: int, value: Tensor, chosen: Tensor, options: MeasureOptions, has_values: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All measures of a block of queries, each [C, q].

    ``weight`` [G, q, N] is the attention, ``last`` [C, N] the last position that finds each entry, ``value`` [N, Dv].
    """
    g, q, n = weight.shape
    c = last.shape[0]
    position = start + torch.arange(q, device=weight.device)  # [q]
    outlives = (last >= start + q - 1).to(weight.dtype)  # [C, N]
    mass = (weight.reshape(g * q, n) @ outlives.T).view(g, q, c)
    goes = (last >= start) & (last < start + q - 1)
    for setting in torch.nonzero(goes.any(dim=1))[:, 0].tolist():
        entries = torch.nonzero(goes[setting])[:, 0]
        there = position[:, None] <= last[setting, entries]  # [q, s]
        mass[:, :, setting] += (weight[:, :, entries] * there).sum(dim=-1)

    top = weight.topk(min(options.hits, n), dim=-1)  # [G, q, M]
    seen = top.values > 0  # the first queries have fewer entries than M
    found = last[:, top.indices] >= position[:, None]  # [C, G, q, M]
    hit_rate = (found & seen).sum(dim=-1) / seen.sum(dim=-1)
    lost = seen & (top.values >= options.regret_mass) & ~found
    delay = (position[:, None] - last[:, top.indices]) * lost
    regrets = lost.sum(dim=(1, 3)).to(weight.dtype)  # [C, q]
    regret_delay = torch.where(regrets > 0, delay.sum(dim=(1, 3)) / regrets.clamp(min=1), float("nan"))

    error = torch.full((c, q), float("nan"), device=weight.device)
    if has_values and len(chosen):
        error[:, chosen] = _output_error(weight[:, chosen], last, position[chosen], value)
    return mass.mean(dim=0).T, hit_rate.mean(dim=1), error, regrets, regret_delay


def _output_error(weight: Tensor, last: Tensor, position: Tensor, value: Tensor) -> Tensor:
    """||o_kept - o_full|| / ||o_full|| where the softmax runs over what was kept, [C, q], mean over query heads."""
    full = weight @ value  # [G, q, Dv]
    norm = full.norm(dim=-1).clamp(min=torch.finfo(full.dtype).tiny)
    errors = []
    for setting in last:
        there = weight * (setting[None, None, :] >= position[None, :, None])
        kept = (there @ value) / there.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(full.dtype).tiny)
        errors.append(((kept - full).norm(dim=-1) / norm).mean(dim=0))
    return torch.stack(errors)


def full_lifetimes(data: LayerData) -> Lifetimes:
    """What a cache that evicts nothing keeps."""
    heads, length = len(data.kv_heads), data.length
    return Lifetimes(
        torch.full((heads, length), NEVER, dtype=torch.int64, device=data.query.device),
        (),
        torch.arange(1, length + 1),
    )
