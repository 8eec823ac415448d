"""What simulated caches hold while they are driven: each by itself, and together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from beaconscope.replay.layer import LayerData

_NEARLY_ALL = 0.8
"""Share of all positions from which nothing is saved by leaving the others out."""


@dataclass
class Held:
    """What a simulated cache of H heads holds."""

    positions: Tensor  # int64 [1, H, N], ascending; -1 in the first columns of a head that holds fewer
    newest: int = -1
    """The last position that it took in; while caches advance together, where it is going to compress."""
    fresh: int = 0
    """Entries that it took in since it last compressed: the newest ones, all of them there."""

    @classmethod
    def nothing(cls, data: LayerData) -> Held:
        """An empty cache of the heads of a layer."""
        return cls(torch.zeros((1, len(data.kv_heads), 0), dtype=torch.int64, device=data.query.device))

    @property
    def size(self) -> int:
        """N, the entries of the head that holds most."""
        return self.positions.shape[2]

    def add(self, start: int, stop: int) -> None:
        """Take in the positions ``start`` to ``stop``."""
        self.newest = stop - 1
        self.fresh += stop - start
        new = torch.arange(start, stop, device=self.positions.device)
        self.positions = torch.cat([self.positions, new.expand(1, self.positions.shape[1], stop - start)], dim=2)

    def mark(self, last: Tensor, position: int) -> None:
        """Write ``position`` to what is held, in ``last`` [H, T + 1]."""
        index = self.positions[0]
        last.scatter_(1, index.where(index >= 0, last.shape[1] - 1), position)

    def keep(self, kept: Tensor, size: int) -> Tensor:
        """Keep ``size`` entries of every head; which, as a policy's state is told of it."""
        self.fresh = 0
        index = kept.nonzero()[:, 2].view(1, -1, size)
        self.positions = self.positions.gather(2, index)
        return index

    def keep_ragged(self, kept: Tensor) -> Tensor:
        """Keep of each head what ``kept`` says, in the last columns; which, -1 in the columns before."""
        self.fresh = 0
        width = int(kept.sum(dim=-1).max())
        order = kept.to(torch.uint8).argsort(dim=-1, stable=True)[..., self.size - width :]
        held = kept.gather(-1, order)
        self.positions = self.positions.gather(2, order).where(held, -1)
        return order.where(held, -1)


@dataclass(frozen=True)
class Union:
    """What at least one of several caches holds, at most U entries of a head."""

    positions: Tensor  # int64 [1, H, U], ascending; any position in the last columns of a head with fewer
    column: Tensor | None  # int64 [H, T], the column of a position that is held; None where columns are positions

    @property
    def size(self) -> int:
        """U."""
        return self.positions.shape[2]

    def columns(self, positions: Tensor) -> Tensor:
        """Columns of positions that one of the caches holds, both int64 [1, H, N]."""
        return positions if self.column is None else self.column.gather(1, positions[0]).unsqueeze(0)


def unite(caches: Sequence[Held], count: int) -> Union:
    """What caches whose heads hold equal numbers have of the first ``count`` positions, or all where that is most."""
    held = torch.cat([each.positions for each in caches], dim=2)[0]
    there = torch.zeros((len(held), count), dtype=torch.bool, device=held.device).scatter_(1, held, True)
    width = int(there.sum(dim=1).max())
    if width > _NEARLY_ALL * count:
        return Union(torch.arange(count, device=held.device).expand(1, len(held), count), None)
    column = there.cumsum(dim=1) - 1
    head, position = there.nonzero(as_tuple=True)
    positions = held.new_zeros((len(held), width))
    positions[head, column[head, position]] = position
    return Union(positions.unsqueeze(0), column)
