"""What a setting had kept of each head when a query came: three forms, one question.

A cache forgets for good, so one number says all of an entry: the last position that still found it
(:class:`Lifetimes`). The oracle takes entries back (:class:`Intervals`), and a static mask sees what it likes of
everything (:class:`Masks`). Positions are those of the whole sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.static_mask import StaticMask

NEVER = (1 << 31) - 1
"""Last position of an entry that is never evicted."""

_QUERIES_AT_ONCE = 512


class Kept(ABC):
    """What a setting kept of H KV heads over T positions."""

    fired: tuple[int, ...]
    """Newest position at each compression."""

    @abstractmethod
    def found(self, head: int, start: int, stop: int) -> Tensor:
        """What the queries at ``start`` to ``stop`` found of the positions before ``stop``, bool [q, stop].

        Positions after a query count as nothing: it does not attend to them.
        """

    @abstractmethod
    def sizes(self, head: int) -> npt.NDArray[np.int64]:
        """Entries that the query at each position found, its own included, [T]."""


@dataclass(frozen=True)
class Lifetimes(Kept):
    """What a policy kept that evicts for good."""

    last: Tensor  # int32 [H, T]: the last position whose query still found the entry; NEVER where it is not evicted
    fired: tuple[int, ...]

    def found(self, head: int, start: int, stop: int) -> Tensor:
        return self.last[head, None, :stop] >= torch.arange(start, stop, device=self.last.device)[:, None]

    def sizes(self, head: int) -> npt.NDArray[np.int64]:
        last = self.last[head].cpu().numpy()
        length = len(last)
        gone = np.bincount(last[last != NEVER], minlength=length)[:length].cumsum()
        return np.asarray(np.arange(1, length + 1) - np.concatenate([[0], gone[:-1]]), np.int64)

    def kept(self, head: int, position: int) -> Tensor:
        """Positions in the cache of a head after the step at ``position``, ascending."""
        return torch.nonzero(self.last[head, : position + 1] > position)[:, 0]

    def evicted(self, head: int) -> list[tuple[int, Tensor]]:
        """What each compression dropped from a head: its position, and the positions dropped, ascending."""
        return [(fired, torch.nonzero(self.last[head] == fired)[:, 0]) for fired in self.fired]


@dataclass(frozen=True)
class Intervals(Kept):
    """What was kept at each compression, chosen anew from everything."""

    length: int
    fired: tuple[int, ...]
    chosen: tuple[Tensor, ...]  # for each compression, int32 [H, B], the positions kept

    def found(self, head: int, start: int, stop: int) -> Tensor:
        device = self.chosen[0].device if self.chosen else None
        there = torch.ones((stop - start, stop), dtype=torch.bool, device=device)
        for number, fired in enumerate(self.fired):
            until = self.fired[number + 1] if number + 1 < len(self.fired) else self.length
            rows = slice(max(fired + 1 - start, 0), max(until + 1 - start, 0))
            if rows.start >= stop - start or rows.stop <= rows.start:
                continue
            there[rows, : fired + 1] = False
            there[rows, self.chosen[number][head].long()] = True
        return there

    def sizes(self, head: int) -> npt.NDArray[np.int64]:
        sizes = np.arange(1, self.length + 1)
        for fired, chosen in zip(self.fired, self.chosen, strict=True):
            sizes[fired + 1 :] = chosen.shape[1] + np.arange(1, self.length - fired)
        return sizes


@dataclass(frozen=True)
class Masks(Kept):
    """What a static mask lets each query see."""

    policy: StaticMask
    heads: HeadInfo
    length: int
    fired: tuple[int, ...] = ()

    def found(self, head: int, start: int, stop: int) -> Tensor:
        one = replace(self.heads, kv_heads=(self.heads.kv_heads[head],))
        queries, keys = (torch.arange(first, stop, device=self.heads.device) for first in (start, 0))
        return self.policy.mask(queries, keys, one)[0]

    def sizes(self, head: int) -> npt.NDArray[np.int64]:
        parts = [
            self.found(head, start, min(start + _QUERIES_AT_ONCE, self.length)).sum(dim=-1).cpu().numpy()
            for start in range(0, self.length, _QUERIES_AT_ONCE)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)
