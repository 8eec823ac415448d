"""One pass over the attention of a KV head: everything that streams.

1. A sample of rows tells which positions are sinks of each query head.
2. Blocks of rows are computed once each. A block gives, per query head and step, the attention on sinks, on the last W
   tokens and on all that is farther back (sinks counted as sinks wherever they lie), the most attended position, and
   what went to positions that the recording's cache no longer held.
3. The same block adds to the vertical score of the sentences and to the profile over distances.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from beaconscope.analyze.attention import HeadAttention
from beaconscope.analyze.sentences import Sentences

_SAMPLED_ROWS = 256
"""Rows that tell sinks."""
_FEWEST_ROWS = 16
"""Rows that must see a position before it can be a sink."""
_MOST_SINKS = 16
"""Sinks of a query head."""
_AROUND = 4
"""Tokens on either side of a position that make a place with it."""
AFTER_SENTENCES = 4
"""A sentence's vertical score counts from so many sentences later on (Thought Anchors)."""


@dataclass(frozen=True)
class HeadScan:
    """What one pass over a KV head gives. G query heads, T positions, S sentences, E distance bins."""

    sinks: list[list[int]]  # of each query head
    sink: npt.NDArray[np.float32]  # [G, T], attention on sinks
    local: npt.NDArray[np.float32]  # [G, T], on the last W tokens, sinks left out
    distant: npt.NDArray[np.float32]  # [G, T], on everything farther back, sinks left out
    peak: npt.NDArray[np.float32]  # [G, T], the part of it within 4 tokens of the most attended position
    top: npt.NDArray[np.int64]  # [G, T], the most attended position that is no sink, -1 for a missing query
    lost: npt.NDArray[np.float32] | None  # [G, T], distant attention on evicted positions
    vertical: npt.NDArray[np.float64]  # [G, S], nan for the last sentences and over a cache that evicts
    distance: npt.NDArray[np.float64]  # [G, E], mean attention at 2^e to 2^(e+1) - 1 tokens back (bin 0: itself and 1)

    @property
    def share(self) -> npt.NDArray[np.float32]:
        """Distant share of what does not go to sinks, [G, T]; 0 where all goes to sinks, nan for a missing query."""
        return self._of_rest(self.distant)

    @property
    def peak_share(self) -> npt.NDArray[np.float32]:
        """Share of what does not go to sinks that goes to one distant place, [G, T]; else as `share`."""
        return self._of_rest(self.peak)

    def _of_rest(self, part: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        rest = self.local + self.distant
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(rest > 1e-6, part / rest, np.where(np.isnan(rest), np.nan, 0.0)).astype(np.float32)


def find_sinks(attention: HeadAttention, window: int, share: float) -> list[list[int]]:
    """Positions that draw attention whatever the content, for each query head.

    Of up to 256 rows spread over the trace, those more than ``window`` after a position count for it, if there are at
    least 16. A sink draws more than ``share`` on average, and more than half of ``share`` from at least half of them: a
    place that is revisited now and then is none.
    """
    last = attention.length - 1
    positions = np.unique(np.linspace(min(window + 1, last), last, _SAMPLED_ROWS).astype(np.int64))
    found: list[list[int]] = []
    for group in range(attention.groups):
        total = torch.zeros(attention.length, dtype=torch.float64)
        often = torch.zeros(attention.length)
        seen = torch.zeros(attention.length)
        for part, weight in attention.rows(group, positions):
            n = weight.shape[1]
            ok = ~weight[:, 0].isnan()
            weight, at = weight[ok], torch.from_numpy(part)[ok]
            far = torch.arange(n) < at[:, None] - window
            total[:n] += (weight * far).sum(dim=0)
            often[:n] += ((weight > share / 2) & far).sum(dim=0)
            seen[:n] += far.sum(dim=0)
        enough = seen >= _FEWEST_ROWS
        mean = torch.where(enough, total / seen.clamp(min=1), 0.0)
        sink = (mean > share) & (often >= seen / 2) & enough
        order = torch.argsort(mean * sink, descending=True, stable=True)[: min(_MOST_SINKS, int(sink.sum()))]
        found.append(sorted(order.tolist()))
    return found


def scan(
    attention: HeadAttention,
    sentences: Sentences,
    window: int,
    sinks: list[list[int]],
    evicted_at: npt.NDArray[np.int64] | None,
) -> HeadScan:
    """Pass over a KV head once.

    Parameters
    ----------
    attention
        The head.
    sentences
        Of the whole trace.
    window
        W: positions more than so many tokens back are distant.
    sinks
        Positions of each query head that count as sinks.
    evicted_at
        When each position left the recording's cache, None where nothing did.
    """
    g, length = attention.groups, attention.length
    out = {name: torch.zeros(g, length) for name in ("sink", "local", "distant", "peak", "lost")}
    top = torch.zeros(g, length, dtype=torch.int64)
    vertical = torch.zeros(g, len(sentences), dtype=torch.float64)
    distance = torch.zeros(g, length, dtype=torch.float64)
    sentence_of = torch.from_numpy(sentences.of)
    present = _present(attention, sentence_of, len(sentences))
    is_sink = torch.zeros(g, length, dtype=torch.bool)
    for group, positions in enumerate(sinks):
        is_sink[group, positions] = True
    fired = [] if evicted_at is None else sorted({int(at) for at in evicted_at if at < length})
    gone = None if evicted_at is None else torch.from_numpy(evicted_at)

    for start, stop in attention.blocks(256):
        weight = attention.block(start, stop)  # [G, b, n]
        position = torch.arange(start, stop)
        rows = slice(start, stop)
        total = attention.total(weight)
        missing = attention.missing_query[:, rows]
        clean = weight.nan_to_num(nan=0.0) if bool(missing.any()) else weight
        _add_vertical(vertical, clean, sentence_of[rows], sentences, *present)
        for group, positions in enumerate(sinks):
            here = [at for at in positions if at < stop]
            out["sink"][group, rows] = weight[group][:, here].sum(dim=-1)
            # The columns are zeroed so that nothing below sees sinks.
            weight[group][:, here] = 0.0
            clean[group][:, here] = 0.0
        first = max(0, start - window)
        near = torch.arange(first, stop) >= position[:, None] - window
        out["local"][:, rows] = (weight[:, :, first:] * near).sum(dim=-1)
        out["distant"][:, rows] = (total - out["sink"][:, rows] - out["local"][:, rows]).clamp(min=0)
        out["peak"][:, rows], most = _peak(clean, position, window)
        top[:, rows] = most.masked_fill(missing, -1)
        _add_distance(distance, clean, start)
        if gone is not None:
            _add_lost(out["lost"], clean, start, stop, window, gone, fired)

    counted = (
        (present[0] > 0).flip(-1).cumsum(dim=-1).flip(-1)[:, AFTER_SENTENCES:]
    )  # later sentences of each [G, S - 4]
    score = np.full((g, len(sentences)), np.nan)
    held = attention.all_held and counted.shape[1] > 0
    if held:
        score[:, : counted.shape[1]] = (vertical[:, : counted.shape[1]] / counted).numpy()
    return HeadScan(
        sinks=sinks,
        sink=out["sink"].numpy(),
        local=out["local"].numpy(),
        distant=out["distant"].numpy(),
        peak=out["peak"].numpy(),
        top=top.numpy(),
        lost=None if gone is None else out["lost"].numpy(),
        vertical=score,
        distance=_in_bins(distance.numpy(), (~attention.missing_query).sum(dim=1).numpy()),
    )


def _present(attention: HeadAttention, sentence_of: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Queries [G, S] and keys [S] of each sentence that are not missing."""
    queries = torch.zeros(attention.groups, count, dtype=torch.float64)
    queries.index_add_(1, sentence_of, (~attention.missing_query).double())
    keys = torch.zeros(count, dtype=torch.float64).index_add_(0, sentence_of, (~attention.missing_key).double())
    return queries, keys


def _add_vertical(
    vertical: Tensor, weight: Tensor, sentence_of: Tensor, sentences: Sentences, queries: Tensor, keys: Tensor
) -> None:
    """Add, for each sentence i of the rows, the means over its tokens x those of each sentence j up to i - 4."""
    first, last = int(sentence_of[0]), int(sentence_of[-1])
    if last < AFTER_SENTENCES:
        return
    stop = int(sentences.stop[last - AFTER_SENTENCES])
    member = torch.zeros(last - first + 1, len(sentence_of))
    member[sentence_of - first, torch.arange(len(sentence_of))] = 1.0
    # Rows that are missing are zero here, and not among the pairs that are counted.
    sums = (member @ weight[:, :, :stop]).numpy()  # [G, sentences of the rows, stop]
    by_sentence = np.add.reduceat(sums, sentences.start[: last - AFTER_SENTENCES + 1], axis=2, dtype=np.float64)
    pairs = queries[:, first : last + 1, None] * keys[: by_sentence.shape[2]]
    mean = torch.from_numpy(by_sentence) / pairs.clamp(min=1)
    earlier = torch.arange(mean.shape[2]) <= torch.arange(first, last + 1)[:, None] - AFTER_SENTENCES
    vertical[:, : mean.shape[2]] += (mean * earlier).sum(dim=1)


def _peak(weight: Tensor, position: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Attention within 4 tokens of the most attended distant position, and the most attended of all; both [G, b]."""
    g, b, n = weight.shape
    whole = max(0, int(position[0]) - window)  # columns that are distant for all the rows
    some = min(n, max(0, int(position[-1]) - window))  # for some of them
    best, at = weight.new_zeros(g, b), torch.zeros(g, b, dtype=torch.int64)
    if whole:
        best, at = weight[:, :, :whole].max(dim=-1)
    if some > whole:
        far = torch.arange(whole, some) < position[:, None] - window
        nearer, near_at = (weight[:, :, whole:some] * far).max(dim=-1)
        at = torch.where(nearer > best, near_at + whole, at)
        best = torch.maximum(nearer, best)
    local, local_at = weight[:, :, whole:].max(dim=-1)  # what it has of distant columns cannot beat the best of them
    top = torch.where(local > best, local_at + whole, at)
    place = at[:, :, None] + torch.arange(-_AROUND, _AROUND + 1)
    inside = (place >= 0) & (place < (position - window)[:, None])
    peak = weight.gather(-1, place.clamp(0, n - 1)) * inside
    return peak.sum(dim=-1), top


def _add_distance(distance: Tensor, weight: Tensor, start: int) -> None:
    """Add the sums over diagonals: attention at each distance."""
    g, b, n = weight.shape
    # Row i moved left by i columns: column c is start - c tokens back, for every row.
    skewed = weight.as_strided((g, b, n - b + 1), (b * n, n + 1, 1))
    distance[:, : start + 1] += skewed.sum(dim=1).flip(-1).double()
    # What is left, columns j < i of row i, is farther back than the block's first row can be: by i - j more.
    corner = weight.new_zeros(g, b, 2 * b)
    corner[:, :, :b] = weight[:, :, :b].tril(-1).flip(-1)
    distance[:, start + 1 : start + b] += corner.as_strided((g, b, b - 1), (2 * b * b, 2 * b - 1, 1), b).sum(dim=1)


def _add_lost(lost: Tensor, weight: Tensor, start: int, stop: int, window: int, gone: Tensor, fired: list[int]) -> None:
    """Set the distant attention of each row on what had been evicted before it."""
    cuts = [start, *(at + 1 for at in fired if start < at + 1 < stop), stop]
    for begin, end in itertools.pairwise(cuts):
        position = torch.arange(begin, end)
        evicted = gone[:stop] < begin
        rows = weight[:, begin - start : end - start]
        whole = max(0, begin - window)
        amount = rows[:, :, :whole] @ evicted[:whole].float()
        far = (torch.arange(whole, stop) < position[:, None] - window) & evicted[whole:]
        lost[:, begin:end] = amount + (rows[:, :, whole:] * far).sum(dim=-1)


def _in_bins(distance: npt.NDArray[np.float64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Sum attention by distance [G, T] in bins that double, as a mean over the rows [G] that are there."""
    edges = [0, *(1 << e for e in range(1, distance.shape[1].bit_length() + 1) if 1 << e < distance.shape[1])]
    binned: npt.NDArray[np.float64] = np.add.reduceat(distance, edges, axis=1) / np.maximum(1, rows)[:, None]
    return binned
