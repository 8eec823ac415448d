"""Which positions attend to which: the trace's hits in one list, and those that a full cache would have had.

The hits of a trace recorded with a compressing cache never go to what had been evicted. So attention over everything
recorded is computed anew from queries and keys, for every generating step where that is cheap and else for the
revisits: what is found there on evicted positions is what the cache lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from beaconscope.report.pack import Pack, smallest_unsigned
from beaconscope.trace import HeadTrace

if TYPE_CHECKING:
    from beaconscope.analyze.attention import HeadAttention

_MASS_STEPS = 255
"""Attention is kept in so many steps from 0 to 1."""
NEAR_WEIGHT = 0.25
"""What a hit on a sink or nearby counts against one far back when there is no room for all."""


@dataclass(frozen=True)
class Looks:
    """N hits, by position, then head, then falling mass."""

    step: npt.NDArray[np.int32]  # [N], position that attends
    head: npt.NDArray[np.int32]  # [N], number of the query head
    source: npt.NDArray[np.int32]  # [N], position attended to
    mass: npt.NDArray[np.float32]  # [N]

    def __len__(self) -> int:
        return len(self.step)

    def strongest(self, count: int, window: int, sinks: Sequence[int]) -> tuple[Looks, float]:
        """At most ``count`` hits, and the weight that all of them are above: their mass, a quarter of that where near.

        The weight is 0 where all are kept.
        """
        far = (self.step - self.source > window) & ~np.isin(self.source, np.asarray(sinks, np.int64))
        weight = self.mass * np.where(far, 1.0, NEAR_WEIGHT)
        # What rounds to nothing would be drawn as nothing.
        weight[self.mass < 0.5 / _MASS_STEPS] = 0.0
        # That of the heaviest hit for which there is no room; its equals go with it.
        beyond = len(weight) - count - 1
        least = float(np.partition(weight, beyond)[beyond]) if beyond >= 0 else 0.0
        keep = weight > least
        return Looks(self.step[keep], self.head[keep], self.source[keep], self.mass[keep]), least

    def add_to(self, pack: Pack, name: str, length: int, heads: int) -> None:
        """Put them into a pack: a count per position, then head, distance back and mass of each."""
        counts = np.bincount(self.step, minlength=length)
        pack.add(f"{name}.count", counts.astype(np.uint16 if counts.max(initial=0) < 1 << 16 else np.uint32))
        pack.add(f"{name}.head", self.head.astype(smallest_unsigned(heads)))
        pack.add(f"{name}.back", (self.step - self.source).astype(smallest_unsigned(length)))
        pack.add(f"{name}.mass", np.rint(np.clip(self.mass, 0, 1) * _MASS_STEPS).astype(np.uint8))


def gather(parts: Sequence[Looks]) -> Looks:
    """Put the hits of several heads in order."""
    if not parts:
        none = np.zeros(0, np.int32)
        return Looks(none, none, none, np.zeros(0, np.float32))
    step, head, source = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("step", "head", "source")
    )
    mass = np.concatenate([part.mass for part in parts])
    order = np.lexsort((-mass, head, step))
    return Looks(step[order], head[order], source[order], mass[order])


def recorded_looks(head: HeadTrace, first: int) -> Looks:
    """The hits of a KV head as recorded; its query heads are numbered from ``first`` on."""
    row, group, rank = np.nonzero((head.hit_position >= 0) & (head.hit_mass > 0))
    return Looks(
        row.astype(np.int32),
        (first + group).astype(np.int32),
        head.hit_position[row, group, rank],
        head.hit_mass[row, group, rank],
    )


def full_looks(attention: HeadAttention, first: int, steps: npt.NDArray[np.int64], hits: int) -> Looks:
    """The hits that a full cache would have had at ``steps``, at most ``hits`` each.

    ``attention`` is over everything; its query heads are numbered from ``first`` on.
    """
    parts = []
    for group in range(attention.groups):
        for positions, weight in attention.rows(group, steps):
            top = weight.nan_to_num(0.0).topk(min(hits, weight.shape[1]), dim=1)
            mass, source = top.values.numpy(), top.indices.numpy()
            row, rank = np.nonzero(mass > 0)
            parts.append(
                Looks(
                    positions[row].astype(np.int32),
                    np.full(len(row), first + group, np.int32),
                    source[row, rank].astype(np.int32),
                    mass[row, rank].astype(np.float32),
                )
            )
    return gather(parts)
