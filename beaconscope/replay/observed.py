"""What the observation queries of many settings give to the keys, worked out once where the settings compress together.

1. Settings that compress at one position observe with the most recent queries and with beacons. The recent ones of each
   are the last of the longest such list; beacons that are chosen alike are the first of the longest such list.
2. Exponentials of the products of these lists with all keys so far are computed once.
3. The attention of a setting is what its own queries have there for the entries it holds, divided by the sum. What
   scores it gives by that, and what it protects, its own rule says.
4. All this is rounded otherwise than where a setting computes alone, as a live cache does. So it decides only where the
   lowest score that stays and the highest that goes are farther apart than rounding can bring them; elsewhere the
   setting decides alone. What a setting keeps is therefore the same whatever stands beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from beaconscope.kv.policies import BeaconKV, CacheView, Policy
from beaconscope.kv.policies.recent import ObservingState
from beaconscope.replay.beacon_history import chosen_alike
from beaconscope.replay.layer import LayerData

_RECENT = "recent"
_WORTH = 1
"""Queries times entries of the settings, over those of the shared attention, from which sharing costs less."""
_SMALL = 1e-20
"""Scores below this, and shares of the attention below its root, may have lost digits."""


@dataclass(frozen=True)
class Asking:
    """A setting that compresses now."""

    policy: Policy
    state: ObservingState
    view: CacheView

    def queries(self) -> dict[Hashable, Tensor]:
        """Its lists of observation queries, [H, G, Q, D] each, by what two settings' lists have in common."""
        names: list[Hashable] = [_RECENT]
        if isinstance(self.policy, BeaconKV):
            names.append(chosen_alike(self.policy))
        lists = self.state.queries(self.view.newest)
        return {name: part[0] for name, part in zip(names, lists, strict=False) if part.shape[3]}


def choose_together(data: LayerData, asking: Sequence[Asking]) -> list[Tensor | None]:
    """What settings that compress at one position keep.

    Parameters
    ----------
    data
        The layer.
    asking
        The settings; their views have the same newest position.

    Returns
    -------
    list of Tensor or None
        For each bool [1, H, N]; None where it has to decide alone.
    """
    count = asking[0].view.newest + 1
    queries = [each.queries() for each in asking]
    longest: dict[Hashable, Tensor] = {}
    for name, part in itertools.chain.from_iterable(own.items() for own in queries):
        longest[name] = max(longest.get(name, part), part, key=lambda each: each.shape[2])
    alone = sum(each.view.size * _count(own) for each, own in zip(asking, queries, strict=True))
    if alone < _WORTH * count * _count(longest):
        return [None] * len(asking)
    key = data.key[0, :, :count]  # [H, P, D]
    given = {name: _exponentials(part, key, data.scaling) for name, part in longest.items()}
    rounding = _rounding(list(longest.values()), key, data.scaling)
    return [
        _choose(each, _weight(each, given, own), rounding, data.shared)
        for each, own in zip(asking, queries, strict=True)
    ]


def _count(lists: dict[Hashable, Tensor]) -> int:
    """Queries of each query head in some lists."""
    return sum(part.shape[2] for part in lists.values())


def _exponentials(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Exponentials of the products of queries [H, G, Q, D] with keys [H, P, D], the largest of each query 1.

    [H, Q, G, P], so that the first and the last queries lie together.
    """
    h, g, q, d = query.shape
    logits = (query.transpose(1, 2).reshape(h, q * g, d) * scaling) @ key.transpose(1, 2)
    return logits.sub_(logits.amax(dim=2, keepdim=True)).exp_().view(h, q, g, -1)


def _weight(asking: Asking, given: dict[Hashable, Tensor], queries: dict[Hashable, Tensor]) -> Tensor:
    """What a setting's observation queries give to what it holds, exponentials [H, Q, G, N]."""
    parts = []
    for name, query in queries.items():
        count = query.shape[2]
        part = given[name][:, -count:] if name == _RECENT else given[name][:, :count]
        held = asking.view.positions[0, :, None, None]
        parts.append(part.gather(3, held.expand(*part.shape[:3], -1)))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _rounding(queries: Sequence[Tensor], key: Tensor, scaling: float) -> Tensor:
    """How far apart two ways to compute a score may be, as a share of it, [H].

    A sum of n numbers comes out up to about sqrt(n) roundings apart in another order. A logit sums D products, and is
    off by that many roundings of the largest product of two vectors; the exponential makes of that a share. What
    divides it sums up to P weights. The most that was seen, on logits of up to 200, is a twentieth of this.
    """
    longest = torch.stack([each.norm(dim=-1).amax(dim=(1, 2)) for each in queries]).amax(dim=0)
    size = key.norm(dim=-1).amax(dim=1) * longest * scaling
    roundings = key.shape[2] ** 0.5 * size + key.shape[1] ** 0.5
    found: Tensor = roundings * (torch.finfo(torch.float32).eps / 2)
    return found


def _choose(asking: Asking, weight: Tensor, rounding: Tensor, shared: bool) -> Tensor | None:
    """What a setting keeps, bool [1, H, N], by its exponentials [H, Q, G, N]; None where rounding could matter."""
    state = asking.state
    if state.causal:
        # The newest entry is that of the last query, and so on.
        count = weight.shape[1]
        later = torch.ones((count, count), dtype=torch.bool, device=weight.device).triu(1)
        weight[..., -count:].masked_fill_(later[:, None], 0)
    total = weight.sum(dim=-1, keepdim=True)
    weight *= 1 / total
    scores = state.scores(weight.transpose(1, 2)[None])
    protected = state.protected(asking.view)
    kept = state.choose(scores, protected)
    if shared:
        scores = scores.amax(dim=1, keepdim=True).expand_as(scores)
    stays = scores.masked_fill(protected | ~kept, float("inf")).amin(dim=-1)  # [1, H]
    goes = scores.masked_fill(kept, float("-inf")).amax(dim=-1)
    clear = (goes < stays * (1 - rounding)) & (stays > _SMALL)
    return kept if bool(clear.all() & (total.amin() > _SMALL**0.5)) else None
