"""Drive a policy through a recorded layer: the objects that the live cache drives, on recorded queries and keys.

A replay is teacher-forced: the queries are those of the recording, whatever its own cache had evicted by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from beaconscope.kv.policies import CacheView, Policy, QueryBlock
from beaconscope.replay.layer import LayerData

NEVER = 1 << 30
"""Last position of an entry that is never evicted."""


@dataclass(frozen=True)
class Lifetimes:
    """What a policy kept of each head, and how long. H KV heads, T positions."""

    last: Tensor  # int64 [H, T]: the last position whose query still found the entry; NEVER where it is not evicted
    fired: tuple[int, ...]
    """Newest position at each compression."""
    stored: Tensor  # int64 [T]: entries per head after the step at each position, the most of any head

    def kept(self, head: int, position: int) -> Tensor:
        """Positions in the cache of a head after the step at ``position``, ascending."""
        return torch.nonzero(self.last[head, : position + 1] > position)[:, 0]

    def evicted(self, head: int) -> list[tuple[int, Tensor]]:
        """What each compression dropped from a head: its position, and the positions dropped, ascending."""
        return [(fired, torch.nonzero(self.last[head] == fired)[:, 0]) for fired in self.fired]


def simulate(policy: Policy, data: LayerData) -> Lifetimes:
    """What ``policy`` would have kept of a layer.

    Raises
    ------
    BeaconScopeError
        As the policy does.
    """
    heads, length, device = len(data.kv_heads), data.length, data.query.device
    last = torch.full((heads, length), NEVER, dtype=torch.int64, device=device)
    stored = torch.zeros(length, dtype=torch.int64)
    state = policy.start(data.heads())
    held = torch.zeros((1, heads, 0), dtype=torch.int64, device=device)
    fired: list[int] = []
    passes = list(data.passes)
    start = 0
    while start < length:
        together = bool(passes)
        if together:
            count = passes.pop(0)
        elif policy.needs_attention:
            count = 1
        else:
            count = length - start
            if policy.capacity is not None:
                count = min(count, max(1, policy.capacity - held.shape[2]))
        stop = start + count
        stored[start:stop] = held.shape[2] + torch.arange(1, count + 1)
        held = torch.cat([held, torch.arange(start, stop, device=device).expand(1, heads, count)], dim=2)
        if policy.needs_attention:
            state.attend(data.step(start, stop, held))
        if policy.needs_queries:
            state.observe(QueryBlock(data.query[:, :, :, start:stop], start, together=together))
        if policy.capacity is not None and held.shape[2] >= policy.capacity:
            value = data.key if data.value is None else data.value
            view = CacheView(data.entries(data.key, held), data.entries(value, held), held, newest=stop - 1)
            kept = state.keep(view)
            last.scatter_(1, held[0], torch.where(kept[0], NEVER, stop - 1))
            index = kept.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
            index = index[..., : min(policy.budget, held.shape[2])]
            held = held.gather(2, index)
            state.evicted(index)
            fired.append(stop - 1)
            stored[stop - 1] = held.shape[2]
        start = stop
    return Lifetimes(last, tuple(fired), stored)
