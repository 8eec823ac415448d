"""What each of many settings would have kept of the attention, measured against the full attention of a trace.

1. For a head, the attention of a block of queries on all keys is computed once, for all settings, in one buffer: the
   product, its exponential, and the sums that make it attention.
2. An entry that a cache evicts stays evicted, so a setting is one number for each entry: the last position that still
   found it (:class:`~.kept.Lifetimes`). The entries that were gone before the block form a mask matrix [N, C], and one
   product of the attention, mean over the query heads, with it gives what all C settings lose.
3. The few entries that go within the block are added by hand. Blocks are cut where many settings compress, so that for
   most settings there are none.
4. The M most attended entries are looked for only in the M groups of entries that hold the largest weights, and these
   only in the M groups of groups that do.
5. The oracle and static masks take entries back; they have a mask for each query (:meth:`~.kept.Kept.found`).

What is kept is one less what is lost, so that a setting that loses nothing retains exactly 1.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from beaconscope.errors import UsageError
from beaconscope.replay.kept import NEVER, Kept, Lifetimes
from beaconscope.replay.layer import LayerData

_BLOCK_BYTES = 64 << 20
"""Attention weights at hand at a time."""
_MOST_QUERIES = 128
"""Queries in a block at most."""
_LEAST_QUERIES = 32
"""Queries that a block is not cut below; products of fewer rows are slow."""
_SAMPLED = 64
"""Queries whose output error is measured where nothing else is asked for."""
_GROUP = 4
"""Entries of a group of which only the largest weight is looked at first."""
_LEVELS = 5
"""Levels of the search for the largest weights: entries, groups of entries, groups of groups, and so on."""
_SAFE = 50.0
"""Where the largest logit of every query is within this of 0, exponentials and their sums keep their digits."""
_SPARSE = 0.25
"""Share of the entries below which the values of what a setting keeps are picked out, and not all of them masked."""
_FEW = 8
"""Masks that are so few that a mean over query heads costs more than it saves."""


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
    """Of one KV head and C settings, for each of Q decoding queries: means over its query heads.

    NaN stands for what was not measured: all of a query whose attention, or what was kept for it, is not known.
    """

    positions: npt.NDArray[np.int64]  # [Q]
    mass: npt.NDArray[np.float32]  # [C, Q], share of the query's attention that went to what was kept, 0 to 1
    hit_rate: npt.NDArray[np.float32]  # [C, Q], share of its M most attended positions that were kept, 0 to 1
    output_error: npt.NDArray[np.float32]  # [C, Q], ||o_kept - o_full|| / ||o_full||, 0 and up
    regrets: npt.NDArray[np.float32]  # [C, Q], evicted entries that the query gave at least ``regret_mass``
    regret_delay: npt.NDArray[np.float32]  # [C, Q], tokens between such an eviction and the query, mean; NaN where
    # what is gone may come back


def measure_head(
    data: LayerData,
    head: int,
    kept: Sequence[Kept],
    options: MeasureOptions,
    revisits: npt.NDArray[np.bool_],
    until: int | None = None,
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
    until
        The position from which on queries are not measured; None for that of the head's first vector that is not
        finite.
    """
    settings = _Settings(data, head, kept)
    first, length = data.prompt_length, data.length
    value = None if data.value is None else data.value[0, head]
    every = max(1, (length - first) // _SAMPLED) if options.output_every is None else options.output_every
    attention = _Attention(data, head)
    parts: list[tuple[Tensor, ...]] = []
    until = data.known_until(head) if until is None else min(until, data.known_until(head))
    for start, stop in _blocks(first, until, data.query.shape[2], kept):
        block = attention.block(start, stop)
        gone = settings.at(start, stop)
        hit_rate, regrets, delay = _hits(*block.top(options.hits), gone, options)
        error = torch.full((stop - start, len(kept)), float("nan"), device=block.weight.device)
        if value is not None:
            for query in _chosen(start, stop, first, revisits, every):
                error[query] = _output_error(block.of(query, start + query + 1), gone, query, value)
        parts.append((_mass(block, gone), hit_rate, error, regrets, delay))
    count = length - first
    found = np.full((5, len(kept), count), np.nan, np.float32)
    if parts:
        measured = [torch.cat(part).T.contiguous().cpu().numpy() for part in zip(*parts, strict=True)]
        found[:, :, : until - first] = measured
    return HeadMeasures(np.arange(first, length), *found)


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
        width = _whole_groups(stop)
        if len(self._buffer) < g * q * width:
            self._buffer = query.new_empty(g * q * width)
        rows = self._buffer[: g * q * width].view(g * q, width)
        weight = rows.view(g, q, width)
        torch.mm(query.reshape(g * q, d), self._key[:stop].T, out=rows[:, :stop])
        if self._softcap is not None:
            rows[:, :stop].div_(self._softcap).tanh_().mul_(self._softcap)
        later = torch.ones((q, width - start), dtype=torch.bool, device=weight.device).triu(1)
        weight[..., start:].masked_fill_(later, float("-inf"))
        if self._window is not None:
            position = torch.arange(start, stop, device=weight.device)[:, None]
            weight.masked_fill_(torch.arange(width, device=weight.device) <= position - self._window, float("-inf"))
        # Groups and maxima are those of the logits; the weights have the same order.
        levels = [rows]
        while len(levels) < _LEVELS:
            levels.append(_grouped(levels[-1]).amax(dim=1))
        most = levels[-1].amax(dim=1, keepdim=True)
        # Most attention can do without this pass.
        if float(most.abs().amax()) > _SAFE:
            rows.sub_(most)
        rows.exp_()
        # What a learned sink takes is no entry's share, so that it is left out of the sum.
        return _Block(weight, rows.sum(dim=1).view(g, q, 1), tuple(levels))


def _whole_groups(count: int) -> int:
    """The least number from ``count`` on that divides into groups, and these into groups, for all levels."""
    least: int = _GROUP ** (_LEVELS - 1)
    return -(-count // least) * least


def _grouped(rows: Tensor) -> Tensor:
    """Rows [R, N] by groups, [R, n, N / n]; a group is every so-many-th number, so that maxima are those of rows."""
    return rows.view(len(rows), _GROUP, -1)


@dataclass(frozen=True)
class _Block:
    """Attention of q queries of G query heads on N entries; the W - N columns after them hold 0."""

    weight: Tensor  # [G, q, W], not yet divided by their sum
    total: Tensor  # [G, q, 1], the sum
    levels: tuple[Tensor, ...]
    """The weights as [Gq, W]; the largest logit of each group of entries; of each group of these; and so on."""

    def of(self, query: int, entries: int) -> Tensor:
        """Attention of query number ``query`` on the first entries, [G, n]."""
        return self.weight[:, query, :entries] / self.total[:, query]

    def received(self, mask: Tensor) -> Tensor:
        """Attention that goes to the entries of C masks, 1 or 0 [C, W], mean over the query heads, [q, C]."""
        g, q, n = self.weight.shape
        share = 1 / (self.total * g)
        if len(mask) < _FEW:
            return ((self.weight.view(g * q, n) @ mask.T).view(g, q, -1) * share).sum(dim=0)
        mean = self.weight[0] * share[0]
        for weight, each in zip(self.weight[1:], share[1:], strict=True):
            mean.addcmul_(weight, each)
        return mean @ mask.T

    def top(self, count: int) -> tuple[Tensor, Tensor]:
        """The largest ``count`` weights of each query, or all, and their entries, [G, q, M] each."""
        g, q, _ = self.weight.shape
        within = torch.arange(_GROUP, device=self.weight.device)
        found = self.levels[-1].topk(min(count, self.levels[-1].shape[1]), dim=1, sorted=False)
        index = found.indices
        for groups, level in itertools.pairwise(reversed(self.levels)):
            # The M largest are in the M groups with the largest maxima.
            inside = (index[:, :, None] + groups.shape[1] * within).view(g * q, -1)
            found = level.gather(1, inside).topk(min(count, inside.shape[1]), dim=1, sorted=False)
            index = inside.gather(1, found.indices)
        return found.values.view(g, q, -1) / self.total, index.view(g, q, -1)


def _chosen(start: int, stop: int, first: int, revisits: npt.NDArray[np.bool_], every: int) -> list[int]:
    """Queries of a block whose output error is measured, indices into it."""
    if every == 0:
        return []
    position = np.arange(start, stop)
    return np.flatnonzero(((position - first) % every == 0) | revisits[start:stop]).tolist()


@dataclass(frozen=True)
class _Gone:
    """What C settings had evicted when the q queries of a block came. N entries, and W - N that never go."""

    position: Tensor  # float32 [q]
    for_good: Tensor  # int64 [L], the settings that evict for good
    last: Tensor  # float32 [L, W], the last position that finds each entry, of these
    by_entry: Tensor  # the same as [W, L], to look up entries for all settings at once
    fired: npt.NDArray[np.int64]  # when one of these compresses, ascending
    fires: npt.NDArray[np.int64]  # which of them it is
    at_will: Tensor  # int64 [C - L], the others
    there: Tensor  # bool [C - L, q, N], what they find

    def changing(self, start: int, stop: int) -> list[int]:
        """Those of the settings for good that compress after a query of the block which has others after it."""
        inside = slice(*np.searchsorted(self.fired, (start, stop - 1)))
        return sorted(set(self.fires[inside].tolist()))

    def before(self, position: int) -> Tensor:
        """What was gone when the query at ``position`` came, 1 or 0, float32 [L, W]."""
        # In place, into numbers: several times as fast as by way of truth values.
        return self.last.clone().lt_(position)

    def kept(self, query: int, entries: int) -> Tensor:
        """What query number ``query`` finds of the first entries, 1 or 0, float32 [C, n], settings for good first."""
        good = self.last[:, :entries].clone().ge_(self.position[query])
        return torch.cat([good, self.there[:, query, :entries].float()]) if len(self.there) else good

    def in_order(self, results: Tensor) -> Tensor:
        """Results [..., C], settings for good first, in the order of the settings."""
        if not len(self.at_will):
            return results
        return results[..., torch.cat([self.for_good, self.at_will]).argsort()]


class _Settings:
    """What C settings kept of one head, by how it can be asked for."""

    def __init__(self, data: LayerData, head: int, kept: Sequence[Kept]) -> None:
        self._head = head
        good = [(number, each) for number, each in enumerate(kept) if isinstance(each, Lifetimes)]
        others = [(number, each) for number, each in enumerate(kept) if not isinstance(each, Lifetimes)]
        self._device = data.query.device
        fires = sorted((fired, number) for number, (_, each) in enumerate(good) for fired in each.fired)
        self._fired, self._fires = np.array(fires, np.int64).reshape(-1, 2).T
        self._others = [each for _, each in others]
        self._for_good = torch.tensor([number for number, _ in good], dtype=torch.int64, device=self._device)
        self._at_will = torch.tensor([number for number, _ in others], dtype=torch.int64, device=self._device)
        # As numbers that are compared into the numbers of a product; no trace is as long as 2^24 tokens.
        self._last = torch.full((len(good), _whole_groups(data.length)), float("inf"), device=self._device)
        for row, (_, each) in zip(self._last, good, strict=True):
            row[: data.length] = each.last[head].float().where(each.last[head] != NEVER, float("inf"))
        self._by_entry = self._last.T.contiguous()

    def at(self, start: int, stop: int) -> _Gone:
        """For the queries at ``start`` to ``stop``."""
        found = [each.found(self._head, start, stop) for each in self._others]
        there = torch.stack(found) if found else self._last.new_zeros((0, stop - start, stop), dtype=torch.bool)
        position = torch.arange(start, stop, dtype=torch.float32, device=self._device)
        last = self._last[:, : _whole_groups(stop)]
        return _Gone(position, self._for_good, last, self._by_entry, self._fired, self._fires, self._at_will, there)


def _mass(block: _Block, gone: _Gone) -> Tensor:
    """Share of the attention that went to what was there, mean over the query heads, [q, C]."""
    start, stop = int(gone.position[0]), int(gone.position[-1]) + 1
    lost = block.received(gone.before(start))  # [q, L]
    for setting in gone.changing(start, stop):
        last = gone.last[setting]
        entries = torch.nonzero((last >= start) & (last < stop - 1))[:, 0]
        after = gone.position[:, None] > last[entries]  # [q, s]
        weight = (block.weight[..., entries] / block.total).mean(dim=0)  # [q, s]
        lost[:, setting] += (weight * after).sum(dim=-1)
    if len(gone.there):
        mean = (block.weight[..., :stop] / block.total).mean(dim=0)  # [q, N]
        lost = torch.cat([lost, torch.stack([(mean * ~there).sum(dim=-1) for there in gone.there], dim=1)], dim=1)
    return (1 - gone.in_order(lost)).clamp(0, 1)


def _hits(value: Tensor, index: Tensor, gone: _Gone, options: MeasureOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Hit rate, regrets and their mean delay, each [q, C], from the largest weights and their entries [G, q, M]."""
    g, q, m = value.shape
    good, settings = len(gone.for_good), len(gone.for_good) + len(gone.at_will)
    seen = value > 0  # the first queries have fewer entries than M
    # What a query does not see it cannot miss: no entry goes before position 0.
    position = gone.position[:, None].where(seen, 0)
    missed = gone.by_entry.index_select(0, index.flatten()).lt_(position.view(-1, 1)).view(g, q, m, good)
    if len(gone.at_will):
        query = torch.arange(q, device=value.device)[:, None]
        absent = ~gone.there[:, query, index.clamp(max=gone.there.shape[2] - 1)] & seen
        missed = torch.cat([missed, absent.permute(1, 2, 3, 0).float()], dim=3)
    hit_rate = 1 - (missed.sum(dim=2) / seen.sum(dim=2, keepdim=True)).mean(dim=0)
    # Few weights are large enough to be regretted.
    head, query, rank = torch.nonzero(value >= options.regret_mass, as_tuple=True)
    regretted = missed[head, query, rank]  # [p, C]
    regrets = value.new_zeros((q, settings)).index_add_(0, query, regretted)
    since = gone.position[query, None] - gone.by_entry[index[head, query, rank]]  # [p, L]
    total = value.new_zeros((q, good)).index_add_(0, query, since.where(regretted[:, :good] > 0, 0))
    delay = torch.full_like(regrets, float("nan"))
    delay[:, :good] = (total / regrets[:, :good]).where(regrets[:, :good] > 0, float("nan"))
    return gone.in_order(hit_rate), gone.in_order(regrets), gone.in_order(delay)


def _output_error(weight: Tensor, gone: _Gone, query: int, value: Tensor) -> Tensor:
    """||o_kept - o_full|| / ||o_full|| of one query, the softmax over what was kept; mean over the query heads, [C].

    ``weight`` is its attention [G, N], ``query`` its number in the block, ``value`` [T, Dv].
    """
    n = weight.shape[1]
    value = value[:n]
    tiny = torch.finfo(weight.dtype).tiny
    kept = gone.kept(query, n)
    parts = torch.split(kept, max(1, _BLOCK_BYTES // (4 * weight.numel())))
    output = torch.cat([_given(weight, part, value) for part in parts])
    output /= (kept @ weight.T).clamp(min=tiny).unsqueeze(-1)
    full = weight @ value  # [G, Dv]
    error = ((output - full).norm(dim=-1) / full.norm(dim=-1).clamp(min=tiny)).mean(dim=1)
    # Where nothing is gone the two are one, and what differs is rounding.
    return gone.in_order(error.where(kept.amin(dim=1) < 1, 0))


def _given(weight: Tensor, kept: Tensor, value: Tensor) -> Tensor:
    """Sums of values [n, Dv] that weights [G, n] give to what is kept, 1 or 0 [C, n]: [C, G, Dv]."""
    g, n = weight.shape
    few = kept.sum(dim=1) < _SPARSE * n
    output = weight.new_empty((len(kept), g, value.shape[1]))
    masked = kept[~few, None] * weight
    output[~few] = (masked.view(-1, n) @ value).view(len(masked), *output.shape[1:])
    # Of settings that keep little only that: a bag of entries for each of them, once for every query head.
    setting, entry = kept[few].nonzero(as_tuple=True)
    first = torch.searchsorted(setting, torch.arange(int(few.sum()), device=kept.device))
    head = len(entry) * torch.arange(g, device=kept.device)[:, None]
    share = weight.index_select(1, entry).flatten()
    sums = embedding_bag(entry.repeat(g), value, (head + first).flatten(), mode="sum", per_sample_weights=share)
    output[few] = sums.view(g, len(first), value.shape[1]).transpose(0, 1)
    return output
