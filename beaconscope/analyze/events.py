"""Global queries: steps at which one query head turns to one distant place.

Of the attention that does not go to sinks, take what falls within 4 tokens of the most attended distant position: the
head's *aim*. A query of a head is global where its aim

1. is at least ``min_share``, with distant attention of at least ``min_mass``;
2. stands out from that head's own past, the last ``history`` steps: robust z of at least ``min_z`` against their
   median, and ``min_rise`` above their upper quartile (a head that takes aim at every third step is not revisiting
   then);
3. leaves no wide rest: half of the distant mass lies on at most ``focus`` positions, and within ``span`` tokens.

Not the distant share itself, because heads that fetch from afar often rest there too, spread over many fillers. Where
nothing is distant yet, an aim is missing, not zero: the past begins after ``window`` steps.

The first two come from the scan. Attention is computed once more for the few queries that pass them, for the third and
for the places they look at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from beaconscope.analyze.attention import HeadAttention
from beaconscope.analyze.options import MOST_TARGETS, AnalyzeOptions
from beaconscope.analyze.scan import HeadScan

_FEWEST_STEPS = 16
"""Past steps that a query is compared with, at least."""
_MAD_TO_SIGMA = 1.4826
"""Of a normal distribution: standard deviation by median absolute deviation."""
_QUARTILE = 0.75
_LEAST_SIGMA = 0.02
"""A head whose past is all alike would make a revisit of any rounding error."""


@dataclass(frozen=True)
class Events:
    """Global queries of the query heads of one KV head, in order of query head and step. N of them."""

    group: npt.NDArray[np.int64]  # [N], query head in its group
    step: npt.NDArray[np.int64]  # [N], position of the query
    share: npt.NDArray[np.float32]  # [N], aim
    mass: npt.NDArray[np.float32]  # [N], distant attention
    z: npt.NDArray[np.float32]  # [N]
    half: npt.NDArray[np.int64]  # [N], positions that hold half of the distant mass
    width: npt.NDArray[np.int64]  # [N], length of the shortest span that holds half of the distant mass
    center: npt.NDArray[np.int64]  # [N], where that span's mass lies: its weighted middle
    target: npt.NDArray[np.int64]  # [N, M], most attended distant positions by falling mass, -1 past the last
    target_mass: npt.NDArray[np.float32]  # [N, M]

    def __len__(self) -> int:
        return len(self.step)


def robust_z(share: npt.NDArray[np.float32], history: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Robust z of each step against the steps before it, and the upper quartile of those. Both [G, T].

    Median, quartile and median absolute deviation are trailing, over at most ``history`` steps and at least 16; before
    that both are nan. The deviation is at least 0.02.
    """
    series = pd.DataFrame(share.T.astype(np.float64))
    fewest = min(history, _FEWEST_STEPS)
    past = series.shift(1).rolling(history, min_periods=fewest)
    median = past.median()
    # The deviation of a past step is taken from the median as it was then; the first ones had none.
    deviation = (series - median.bfill()).abs()
    sigma = _MAD_TO_SIGMA * deviation.shift(1).rolling(history, min_periods=fewest).median()
    z = (series - median) / sigma.clip(lower=_LEAST_SIGMA)
    return z.to_numpy(np.float32).T, past.quantile(_QUARTILE).to_numpy(np.float32).T


def find_events(
    attention: HeadAttention, scanned: HeadScan, first_step: int, window: int, options: AnalyzeOptions
) -> Events:
    """Find the global queries of a KV head.

    Parameters
    ----------
    attention, scanned
        The head, and what the pass over it gave.
    first_step
        The first position that is asked.
    window
        W: positions more than so many tokens back are distant.
    options
        Thresholds.
    """
    share = scanned.peak_share
    share[:, : window + 1] = np.nan
    z, usual = robust_z(share, options.history)
    with np.errstate(invalid="ignore"):
        candidate = (share >= options.min_share) & (scanned.distant >= options.min_mass)
        candidate &= (z >= options.min_z) & (share - usual >= options.min_rise)
    candidate[:, :first_step] = False
    parts = []
    for group in range(attention.groups):
        steps = np.flatnonzero(candidate[group])
        for at, weight in attention.rows(group, steps):
            far = torch.arange(weight.shape[1]) < torch.from_numpy(at)[:, None] - window
            # A sink may lie after these steps.
            far[:, [sink for sink in scanned.sinks[group] if sink < far.shape[1]]] = False
            distant = weight * far
            top = distant.topk(min(MOST_TARGETS, distant.shape[1]), dim=-1)
            # Among equals topk promises no order, and nothing below asks for one.
            held = top.values.double().cumsum(dim=-1)
            total = distant.double().sum(dim=-1, keepdim=True)
            half = (held < total / 2).sum(dim=-1) + 1
            target = np.full((len(at), MOST_TARGETS), -1, np.int64)
            target_mass = np.zeros((len(at), MOST_TARGETS), np.float32)
            target[:, : top.indices.shape[1]] = np.where(top.values > 0, top.indices, -1)
            target_mass[:, : top.values.shape[1]] = top.values
            width, center = _span(target, target_mass, total.numpy()[:, 0])
            ok = (half.numpy() <= options.focus) & (width <= options.span)
            chosen = at[ok]
            parts.append(
                Events(
                    group=np.full(len(chosen), group),
                    step=chosen,
                    share=share[group, chosen],
                    mass=scanned.distant[group, chosen],
                    z=z[group, chosen],
                    half=half.numpy()[ok],
                    width=width[ok],
                    center=center[ok],
                    target=target[ok],
                    target_mass=target_mass[ok],
                )
            )
    return join(parts)


def join(parts: list[Events]) -> Events:
    """Put events one after the other."""
    if not parts:
        none, nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)
        return Events(
            none, none, nothing, nothing, nothing, none, none, none,
            np.zeros((0, MOST_TARGETS), np.int64), np.zeros((0, MOST_TARGETS), np.float32),
        )  # fmt: skip
    names = Events.__dataclass_fields__
    return Events(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _span(
    target: npt.NDArray[np.int64], mass: npt.NDArray[np.float32], total: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Length and weighted middle of the shortest span that holds half of each row's distant mass.

    Where the kept positions hold no half, the length is that of a span over all of them.

    Parameters
    ----------
    target, mass
        The most attended distant positions of each row, -1 past the last, and the attention on them, [N, M].
    total
        Distant mass of each row, [N].

    Returns
    -------
    width, center
        In tokens, and as a position; [N] both.
    """
    count, kept = target.shape
    if not count:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    # Positions that are not there go to the end of the order, without mass.
    place = np.where(target < 0, np.iinfo(np.int64).max >> 1, target)
    order = np.argsort(place, axis=1, kind="stable")
    place = np.take_along_axis(place, order, axis=1)
    weight = np.take_along_axis(mass.astype(np.float64), order, axis=1)
    held = np.concatenate([np.zeros((count, 1)), np.cumsum(weight, axis=1)], axis=1)  # [N, M + 1]
    width = np.full(count, np.iinfo(np.int64).max)
    begin, end = np.zeros(count, np.int64), np.full(count, kept)
    rows = np.arange(count)
    for first in range(kept):
        # First index whose cumulative mass reaches half from here.
        reach = held >= (held[:, first] + total / 2 - 1e-9)[:, None]
        last = np.where(reach.any(axis=1), reach.argmax(axis=1), kept + 1)
        ok = (last <= kept) & (last > first)
        length = place[rows, np.clip(last - 1, 0, kept - 1)] - place[:, first] + 1
        better = ok & (length < width)
        width[better], begin[better], end[better] = length[better], first, last[better]
    whole = width == np.iinfo(np.int64).max
    width[whole] = (target[whole].max(axis=1) - place[whole, 0]) + 1
    inside = (np.arange(kept) >= begin[:, None]) & (np.arange(kept) < end[:, None]) & (weight > 0)
    inside_weight = np.where(inside, weight, 0.0)
    center = (np.where(inside, place, 0) * inside_weight).sum(axis=1) / np.maximum(inside_weight.sum(axis=1), 1e-30)
    return width, np.round(center).astype(np.int64)
