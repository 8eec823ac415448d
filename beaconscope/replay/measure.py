"""What each of many settings would have kept of the attention, measured against the full attention of a trace.

1. For a head, the attention of a block of queries on all keys is computed once, for all settings, in one buffer: the
   product, its exponential, and the sums that make it attention.
2. An entry that a cache evicts stays evicted, so a setting is one number for each entry: the last position that still
   found it (:class:`~.kept.Lifetimes`). The entries that were gone before the block form a mask matrix [N, C], and one
   product of the attention, mean over the query heads, with it gives what all C settings lose.
3. The few entries that go within the block are added by hand. Blocks are cut where many settings compress, so that for
   most settings there are none.
4. The M most attended entries are looked for only in the M groups of entries that hold the largest weights.
5. The oracle and static masks take entries back; they have a mask for each query (:meth:`~.kept.Kept.found`).

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
_LEAST_QUERIES = 32
"""Queries that a block is not cut below; products of fewer rows are slow."""
_SAMPLED = 64
"""Queries whose output error is measured where nothing else is asked for."""
_GROUP = 32
"""Entries of a group of which only the largest weight is looked at first."""


@dataclass(frozen=True)
class MeasureOptions:
    """How settings are measured."""

    hits: int = 8
    """M, the most attended positions of a query that count as its hits."""
    regret_mass: float = 0.05
    """A query that gives an evicted entry at least this much regrets it."""
    output_every: int | None = None
    """Measure the output error of every so many queries, and of every TRT; it costs more than the rest. None: of about
    64 queries, evenly spaced. 0: never."""

    def __post_init__(self) -> None:
        if self.hits < 1:
            raise UsageError(f"hits is {self.hits}; give at least 1")
        if not 0 < self.regret_mass <= 1:
            raise UsageError(f"regret-mass is {self.regret_mass}; give more than 0 and at most 1")
        if self.output_every is not None and self.output_every < 0:
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
    settings = _Settings(head, kept)
    first, length = data.prompt_length, data.length
    value = None if data.value is None else data.value[0, head]
    every = max(1, (length - first) // _SAMPLED) if options.output_every is None else options.output_every
    attention = _Attention(data, head)
    parts: list[tuple[Tensor, ...]] = []
    for start, stop in _blocks(first, length, data.query.shape[2], kept):
        block = attention.block(start, stop)
        gone = settings.at(start, stop)
        hit_rate, regrets, delay = _hits(*block.top(options.hits), gone, options)
        error = torch.full((len(kept), stop - start), float("nan"), device=block.weight.device)
        chosen = _chosen(start, stop, first, revisits, every).to(block.weight.device)
        if value is not None and len(chosen):
            error[:, chosen] = _output_error(block.rows(chosen), gone, chosen, value[:stop])
        parts.append((_mass(block.mean(), gone), hit_rate, error, regrets, delay))
    if not parts:
        empty = np.zeros((len(kept), 0), np.float32)
        return HeadMeasures(np.zeros(0, np.int64), empty, empty, empty, empty, empty)
    joined = [torch.cat(part, dim=1).cpu().numpy().astype(np.float32) for part in zip(*parts, strict=True)]
    return HeadMeasures(np.arange(first, length), *joined)


def _blocks(first: int, length: int, group: int, kept: Sequence[Kept]) -> Iterator[tuple[int, int]]:
    """Blocks of decoding queries, each ending where many settings compress, if it can."""
    most = max(1, min(_MOST_QUERIES, _BLOCK_BYTES // (4 * group * max(length, 1))))
    ends = Counter(fired + 1 for each in kept for fired in each.fired)
    many = max(2, len(kept) // 8)
    start = first
    while start < length:
        stop = min(start + most, length)
        if stop < length:
            inside = range(min(start + _LEAST_QUERIES, stop), stop + 1)
            stop = next((end for end in inside if ends[end] >= many), None) or max(inside, key=lambda n: (ends[n], n))
        yield start, stop
        start = stop


class _Attention:
    """The attention of blocks of queries of one head on everything, in one buffer."""

    def __init__(self, data: LayerData, head: int) -> None:
        # Scaled here, so that no pass over the products is spent on it.
        self._query = data.query[0, head] * data.scaling  # [G, T, D]
        self._key = data.key[0, head]  # [T, D]
        self._softcap = data.softcap
        self._window = data.window
        self._buffer = self._query.new_empty(0)

    def block(self, start: int, stop: int) -> _Block:
        """Of the queries ``start`` to ``stop``; it lasts until the next one is asked for."""
        query = self._query[:, start:stop]
        g, q, d = query.shape
        if len(self._buffer) < g * q * stop:
            self._buffer = query.new_empty(g * q * stop)
        weight = self._buffer[: g * q * stop].view(g * q, stop)
        torch.mm(query.reshape(g * q, d), self._key[:stop].T, out=weight)
        if self._softcap is not None:
            weight.div_(self._softcap).tanh_().mul_(self._softcap)
        later = torch.ones((q, q), dtype=torch.bool, device=weight.device).triu(1)
        weight.view(g, q, stop)[..., start:].masked_fill_(later, float("-inf"))
        if self._window is not None:
            position = torch.arange(start, stop, device=weight.device)[:, None]
            far = torch.arange(stop, device=weight.device) <= position - self._window
            weight.view(g, q, stop).masked_fill_(far, float("-inf"))
        # A group is every so manieth entry: its largest is then a maximum of whole rows of numbers.
        groups = stop // _GROUP
        largest = weight[:, : groups * _GROUP].view(g * q, _GROUP, groups).amax(dim=1)  # [Gq, groups]
        rest = weight[:, groups * _GROUP :]
        most = torch.cat([largest, rest], dim=1).amax(dim=1, keepdim=True)
        weight.sub_(most).exp_()
        # What a learned sink takes is no entry's share, so that it is left out of the sum.
        return _Block(weight.view(g, q, stop), weight.sum(dim=1).view(g, q, 1), largest)


@dataclass(frozen=True)
class _Block:
    """Attention of q queries of G query heads on N entries."""

    weight: Tensor  # [G, q, N], not yet divided by their sum
    total: Tensor  # [G, q, 1], the sum
    largest: Tensor  # [Gq, N // _GROUP], logits, the largest of each group of entries

    def mean(self) -> Tensor:
        """Attention, mean over the query heads, [q, N]."""
        share = 1 / (self.total * len(self.weight))
        mean = self.weight[0] * share[0]
        for weight, each in zip(self.weight[1:], share[1:], strict=True):
            mean.addcmul_(weight, each)
        return mean

    def rows(self, query: Tensor) -> Tensor:
        """Attention of the queries ``query``, indices into the block, [G, q', N]."""
        return self.weight[:, query] / self.total[:, query]

    def top(self, count: int) -> tuple[Tensor, Tensor]:
        """The largest ``count`` weights of each query, and their entries, [G, q, M] each."""
        g, q, n = self.weight.shape
        rows = self.weight.view(g * q, n)
        groups = self.largest.shape[1]
        # The M largest are in the M groups with the largest maxima, or among the entries that no group holds.
        group = self.largest.topk(min(count, groups), dim=1, sorted=False).indices  # [Gq, M]
        inside = group[:, :, None] + groups * torch.arange(_GROUP, device=rows.device)
        rest = torch.arange(groups * _GROUP, n, device=rows.device).expand(g * q, -1)
        entry = torch.cat([inside.view(g * q, -1), rest], dim=1)
        top = rows.gather(1, entry).topk(min(count, n), dim=1)
        shape = (g, q, -1)
        return top.values.view(shape) / self.total, entry.gather(1, top.indices).view(shape)


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
    """Share of the attention [q, N] that went to what was there, [C, q]."""
    start, stop = int(gone.position[0]), int(gone.position[-1]) + 1
    lost = weight @ (gone.last < start).to(weight.dtype).T  # [q, L]
    for setting in gone.changing(start, stop):
        last = gone.last[setting]
        entries = torch.nonzero((last >= start) & (last < stop - 1))[:, 0]
        after = gone.position[:, None] > last[entries]  # [q, s]
        lost[:, setting] += (weight[:, entries] * after).sum(dim=-1)
    others = [(weight * ~there).sum(dim=-1)[None] for there in gone.there]
    return (1 - gone.in_order([lost.T, *others])).clamp(0, 1)


def _hits(value: Tensor, index: Tensor, gone: _Gone, options: MeasureOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Hit rate, regrets and their mean delay, each [C, q], from the largest weights and their entries [G, q, M]."""
    seen = value > 0  # the first queries have fewer entries than M
    last = gone.last[:, index]  # [L, G, q, M]
    query = torch.arange(value.shape[1], device=value.device)[:, None]
    found = torch.cat([last >= gone.position[:, None], *(there[query, index].unsqueeze(0) for there in gone.there)])
    hit_rate = (found & seen).sum(dim=-1) / seen.sum(dim=-1)
    lost = (seen & (value >= options.regret_mass)) & ~found
    regrets = lost.sum(dim=(1, 3)).to(value.dtype)  # [C, q]
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
