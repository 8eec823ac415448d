"""What each of many settings would have kept of the attention, measured against the full attention of a trace.

1. For a head, the attention of a block of queries on all keys is computed once, for all settings.
2. An entry that a cache evicts stays evicted, so a setting is one number for each entry: the last position that still
   found it (:class:`~.kept.Lifetimes`). The entries that were gone before the block form a mask matrix [N, C], and one
   product gives what all C settings lose.
3. The few entries that go within the block are added by hand. Blocks are cut where most settings compress, so that for
   most settings there are none.
4. The oracle and static masks take entries back; they have a mask for each query (:meth:`~.kept.Kept.found`).

What is kept is one less what is lost, so that a setting that loses nothing retains exactly 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from beaconscope.errors import UsageError
from beaconscope.replay.kept import Kept, Lifetimes
from beaconscope.replay.layer import LayerData

_BLOCK_BYTES = 64 << 20
"""Attention weights at hand at a time."""
_MOST_QUERIES = 128
"""Queries in a block at most."""


@dataclass(frozen=True)
class MeasureOptions:
    """How settings are measured."""

    hits: int = 8
    """M, the most attended positions of a query that count as its hits."""
    regret_mass: float = 0.05
    """A query that gives an evicted entry at least this much regrets it."""
    output_every: int = 64
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
    regret_delay: npt.NDArray[np.float32]  # [C, Q], tokens between such an eviction and the query, mean; NaN where
    # what is gone may come back


def measure_head(
    data: LayerData, head: int, kept: Sequence[Kept], options: MeasureOptions, revisits: npt.NDArray[np.bool_]
) -> HeadMeasures:
    """Measure settings on one KV head.

    Parameters
    ----------
    data
        The layer.
    head
        Index of the head in ``data``.
    kept
        What each of C settings kept.
    options
        What to measure.
    revisits
        [T], True for the positions that are TRTs; their output error is always measured.
    """
    alone = data.alone(head)
    settings = _Settings(head, kept)
    first, length = data.prompt_length, data.length
    parts: list[tuple[Tensor, ...]] = []
    for start, stop in _blocks(first, length, data.query.shape[2], kept):
        weight = alone.everything(start, stop).attention()[0, 0]  # [G, q, N]
        if data.sink_logit is not None:
            weight = weight / weight.sum(dim=-1, keepdim=True)  # a learned sink's share is no entry's
        gone = settings.at(start, stop)
        hit_rate, regrets, delay = _hits(weight, gone, options)
        error = torch.full((len(kept), stop - start), float("nan"), device=weight.device)
        chosen = _chosen(start, stop, first, revisits, options.output_every).to(weight.device)
        if alone.value is not None and len(chosen):
            error[:, chosen] = _output_error(weight[:, chosen], gone, chosen, alone.value[0, 0, :stop])
        parts.append((_mass(weight, gone), hit_rate, error, regrets, delay))
    if not parts:
        empty = np.zeros((len(kept), 0), np.float32)
        return HeadMeasures(np.zeros(0, np.int64), empty, empty, empty, empty, empty)
    joined = [torch.cat(part, dim=1).cpu().numpy().astype(np.float32) for part in zip(*parts, strict=True)]
    return HeadMeasures(np.arange(first, length), *joined)


def _blocks(first: int, length: int, group: int, kept: Sequence[Kept]) -> Iterator[tuple[int, int]]:
    """Blocks of decoding queries, each ending where most settings compress."""
    most = max(1, min(_MOST_QUERIES, _BLOCK_BYTES // (4 * group * max(length, 1))))
    ends = Counter(fired + 1 for each in kept for fired in each.fired)
    start = first
    while start < length:
        stop = min(start + most, length)
        if stop < length:
            stop = max(range(start + 1, stop + 1), key=lambda end: (ends[end], end))
        yield start, stop
        start = stop


def _chosen(start: int, stop: int, first: int, revisits: npt.NDArray[np.bool_], every: int) -> Tensor:
    """Queries of a block whose output error is measured, indices into it."""
    if every == 0:
        return torch.zeros(0, dtype=torch.int64)
    position = np.arange(start, stop)
    return torch.from_numpy(np.flatnonzero(((position - first) % every == 0) | revisits[start:stop]))


@dataclass(frozen=True)
class _Gone:
    """What C settings had evicted when the q queries of a block came. N entries."""

    position: Tensor  # int32 [q]
    for_good: Tensor  # int64 [L], the settings that evict for good
    last: Tensor  # int32 [L, N], the last position that finds each entry, of these
    fired: tuple[npt.NDArray[np.int64], ...]  # when each of these compresses, ascending
    at_will: Tensor  # int64 [C - L], the others
    there: Tensor  # bool [C - L, q, N], what they find

    def changing(self, start: int, stop: int) -> Iterator[int]:
        """Those of the settings for good that compress after a query of the block which has others after it."""
        for number, fired in enumerate(self.fired):
            if np.searchsorted(fired, start) < np.searchsorted(fired, stop - 1):
                yield number

    def of(self, query: Tensor) -> Tensor:
        """Whether each entry is gone for the queries ``query``, bool [C, q', N], settings for good first."""
        good = self.last[:, None, :] < self.position[query][None, :, None]
        return torch.cat([good, ~self.there[:, query]])

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """Join results for the settings for good, and for the others, in the order of the settings."""
        order = torch.cat([self.for_good, self.at_will]).argsort()
        return torch.cat(list(parts))[order]


class _Settings:
    """What C settings kept of one head, by how it can be asked for."""

    def __init__(self, head: int, kept: Sequence[Kept]) -> None:
        self._head = head
        good = [(number, each) for number, each in enumerate(kept) if isinstance(each, Lifetimes)]
        self._fired = tuple(np.array(each.fired, np.int64) for _, each in good)
        self._others = [each for each in kept if not isinstance(each, Lifetimes)]
        device = good[0][1].last.device if good else None
        self._for_good = torch.tensor([number for number, _ in good], dtype=torch.int64, device=device)
        self._at_will = torch.tensor(
            [number for number, each in enumerate(kept) if not isinstance(each, Lifetimes)],
            dtype=torch.int64,
            device=device,
        )
        lasts = [each.last[head] for _, each in good]
        self._last = torch.stack(lasts) if lasts else torch.zeros((0, 0), dtype=torch.int32)

    def at(self, start: int, stop: int) -> _Gone:
        """For the queries at ``start`` to ``stop``."""
        found = [each.found(self._head, start, stop) for each in self._others]
        position = torch.arange(start, stop, dtype=torch.int32, device=self._last.device)
        none = torch.zeros((0, stop - start, stop), dtype=torch.bool, device=self._last.device)
        last = self._last[:, :stop] if len(self._last) else self._last.new_zeros((0, stop))
        return _Gone(position, self._for_good, last, self._fired, self._at_will, torch.stack(found) if found else none)


def _mass(weight: Tensor, gone: _Gone) -> Tensor:
    """Share of the attention [G, q, N] that went to what was there, [C, q]."""
    g, q, _ = weight.shape
    start, stop = int(gone.position[0]), int(gone.position[-1]) + 1
    before = (gone.last < start).to(weight.dtype)  # [L, N]
    lost = (weight.view(g * q, -1) @ before.T).view(g, q, -1)  # [G, q, L]
    for setting in gone.changing(start, stop):
        last = gone.last[setting]
        entries = torch.nonzero((last >= start) & (last < stop - 1))[:, 0]
        after = gone.position[:, None] > gone.last[setting, entries]  # [q, s]
        lost[:, :, setting] += (weight[:, :, entries] * after).sum(dim=-1)
    others = [(weight.transpose(0, 1) @ (~there).unsqueeze(-1).to(weight.dtype))[..., 0].T for there in gone.there]
    parts = [lost.mean(dim=0).T, *(other.mean(dim=0, keepdim=True) for other in others)]
    return (1 - gone.in_order(parts)).clamp(0, 1)


def _hits(weight: Tensor, gone: _Gone, options: MeasureOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Hit rate, regrets and their mean delay, each [C, q]."""
    top = weight.topk(min(options.hits, weight.shape[-1]), dim=-1)  # [G, q, M]
    seen = top.values > 0  # the first queries have fewer entries than M
    index = top.indices
    last = gone.last[:, index]  # [L, G, q, M]
    query = torch.arange(weight.shape[1], device=weight.device)[:, None]
    found = torch.cat([last >= gone.position[:, None], *(there[query, index].unsqueeze(0) for there in gone.there)])
    hit_rate = (found & seen).sum(dim=-1) / seen.sum(dim=-1)
    lost = seen & (top.values >= options.regret_mass) & ~found
    regrets = lost.sum(dim=(1, 3)).to(weight.dtype)  # [C, q]
    good = len(gone.for_good)
    since = ((gone.position[:, None] - last) * lost[:good]).sum(dim=(1, 3)) / regrets[:good].clamp(min=1)
    delay = torch.full_like(regrets, float("nan"))
    delay[:good] = since.where(regrets[:good] > 0, float("nan"))
    return tuple(gone.in_order([part]) for part in (hit_rate.mean(dim=1), regrets, delay))  # type: ignore[return-value]


def _output_error(weight: Tensor, gone: _Gone, query: Tensor, value: Tensor) -> Tensor:
    """||o_kept - o_full|| / ||o_full|| where the softmax runs over what was kept, [C, q'], mean over query heads."""
    g, q, n = weight.shape
    tiny = torch.finfo(weight.dtype).tiny
    full = weight @ value  # [G, q', Dv]
    norm = full.norm(dim=-1).clamp(min=tiny)
    mask = gone.of(query)  # [C, q', N]
    errors = []
    for part in torch.split(mask, max(1, _BLOCK_BYTES // (4 * g * q * n))):
        there = weight * ~part[:, None]  # [c, G, q', N]
        kept = (there @ value) / there.sum(dim=-1, keepdim=True).clamp(min=tiny)
        error = ((kept - full).norm(dim=-1) / norm).mean(dim=1)
        # Where nothing is gone the two are one, and what differs is rounding.
        errors.append(error.where(part.any(dim=-1), 0))
    return gone.in_order(errors)
