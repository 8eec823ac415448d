"""Beacon queries: a few representatives of all past queries of each query head (BeaconKV, arXiv 2609.04971).

1. Queries enter a bounded pool in the order of their positions, in pre-RoPE space unless told otherwise.
2. A full pool (``pool_high``) is thinned to ``pool_low`` by farthest-point sampling on cosine distance; what stays
   keeps its order.
3. At a compression, and at every thinning after the first compression, K beacons are chosen from the pool by the same
   sampling.
4. Between two changes of the beacons each query is assigned to the nearest one by cosine.

The controls: ``kmeans`` keeps K running centroids and ``random`` a reservoir of K past queries in place of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from beaconscope.kv.heads import HeadInfo

Selector = Literal["fps", "kmeans", "random", "none"]
QuerySpace = Literal["pre-rope", "post-rope"]
Rotation = Literal["current", "own"]

_TIE = 1e-5
"""Cosines closer than this are equal: the same token gives the first layer the same query each time, up to rounding."""


def _first_largest(cosine: Tensor) -> Tensor:
    """Index of the largest value in the last dimension, kept as one; the lowest index in a tie."""
    return (cosine >= cosine.amax(dim=-1, keepdim=True) - _TIE).to(torch.uint8).argmax(dim=-1, keepdim=True)


def farthest_points(points: Tensor, count: int) -> Tensor:
    """Choose points by farthest-point sampling on cosine distance, starting from the last one.

    Each next choice is the point whose nearest chosen point is farthest; ties go to the lowest index.

    Parameters
    ----------
    points
        float [..., P, D].
    count
        How many to choose, at most P.

    Returns
    -------
    Tensor
        int64 [..., count], indices in the order of choice.
    """
    unit = normalize(points, dim=-1)
    similarity = unit @ unit.transpose(-1, -2)  # [..., P, P]
    chosen = torch.full((*points.shape[:-2], 1), points.shape[-2] - 1, device=points.device)
    order = [chosen]
    distance = torch.full_like(points[..., 0], float("inf"))  # to the nearest chosen point, [..., P]
    for _ in range(count - 1):
        row = similarity.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, similarity.shape[-1])).squeeze(-2)
        distance = torch.minimum(distance, 1 - row).scatter_(-1, chosen, float("-inf"))
        chosen = _first_largest(distance)
        order.append(chosen)
    return torch.cat(order, dim=-1)


@dataclass(frozen=True)
class BeaconSettings:
    """How beacons are chosen; the fields are those of :class:`~beaconscope.kv.policies.BeaconKV`."""

    count: int
    """K, beacons per query head."""
    selector: Selector
    query_space: QuerySpace
    pool_low: int
    pool_high: int
    seed: int


class BeaconSet(NamedTuple):
    """The beacons of every query head at one time. K beacons each."""

    vector: Tensor  # [R, H, G, K, D], float32, in the settings' query space
    source: Tensor  # [R, H, G, K], int64, position each was taken from, -1 for a centroid


class BeaconChanged(NamedTuple):
    """The beacons were chosen anew: they count for the queries after ``position``."""

    position: int
    beacons: BeaconSet
    members: Tensor
    """Queries assigned to each beacon that this change replaced, int64 [R, H, G, K]; empty before the first."""


class Assignment(NamedTuple):
    """The nearest current beacon of T queries; -1 and nan before the first beacons."""

    beacon: Tensor  # [R, H, G, T], int64
    similarity: Tensor  # [R, H, G, T], float32, cosine


class BeaconTracker:
    """The beacons of the heads of one layer, kept up to date with every query."""

    def __init__(self, settings: BeaconSettings, heads: HeadInfo) -> None:
        self._settings = settings
        self._rotary = heads.rotary.to(heads.device)
        self._follow = heads.follow
        self._past: _Pool | _Centroids | _Reservoir | None = None
        if settings.count > 0 and settings.selector != "none":
            kinds: dict[str, type[_Pool | _Centroids | _Reservoir]] = {
                "fps": _Pool,
                "kmeans": _Centroids,
                "random": _Reservoir,
            }
            self._past = kinds[settings.selector](settings, heads)
        self.current: BeaconSet | None = None
        self._members: Tensor | None = None
        self.assignments: list[Assignment] = []
        """Assignments since they were last taken, in order; filled when the heads are followed."""
        self.changes: list[BeaconChanged] = []
        """Changes since they were last taken, in order; filled when the heads are followed."""

    def observe(self, query: Tensor, first_position: int) -> None:
        """See the queries of consecutive positions, post-RoPE [R, H, G, T, D]."""
        if self._past is None and not self._follow:
            return
        space = self.to_space(query, first_position)
        start, total = 0, query.shape[3]
        while start < total:
            count = total - start if self._past is None else min(total - start, self._past.room)
            part = space[:, :, :, start : start + count]
            if self._follow:
                self._assign(part)
            start += count
            if self._past is not None:
                thinned = self._past.add(part, first_position + start - count)
                # Nobody asks for these beacons but who follows the assignments.
                if thinned and self._follow and self.current is not None:
                    self.choose(first_position + start - 1)

    def to_space(self, query: Tensor, first_position: int) -> Tensor:
        """Post-RoPE queries [R, H, G, T, D] in the settings' query space, float32."""
        query = query.float()
        if self._settings.query_space == "post-rope":
            return query
        positions = torch.arange(first_position, first_position + query.shape[3], device=query.device)
        return self._rotary.unrotate(query, positions)

    def choose(self, position: int) -> BeaconSet | None:
        """Choose the beacons anew, as they stand after the query at ``position``; None where there are none."""
        if self._past is None:
            return None
        chosen = self._past.beacons()
        if self._follow:
            members = (
                self._members if self._members is not None else chosen.source.new_empty((*chosen.source.shape[:3], 0))
            )
            self.changes.append(BeaconChanged(position, chosen, members))
            self._members = torch.zeros_like(chosen.source)
        self.current = chosen
        return chosen

    def rotated(self, beacons: BeaconSet, position: int, rotation: Rotation) -> Tensor:
        """The beacons as post-RoPE queries [R, H, G, K, D]: as if asked at ``position``, or at their own positions."""
        if self._settings.query_space == "post-rope":
            return beacons.vector
        if rotation == "own":
            return self._rotary.rotate(beacons.vector, beacons.source)
        return self._rotary.rotate(beacons.vector, torch.full((1,), position, device=beacons.vector.device))

    def select_rows(self, rows: Tensor) -> None:
        """Keep the sequences ``rows``, int64 [R']."""
        if self._past is not None:
            self._past.select_rows(rows)
        if self.current is not None:
            self.current = BeaconSet(*(part.index_select(0, rows.to(part.device)) for part in self.current))
        if self._members is not None:
            self._members = self._members.index_select(0, rows.to(self._members.device))

    def _assign(self, query: Tensor) -> None:
        if self.current is None:
            shape = query.shape[:-1]
            none = torch.full(shape, -1, device=query.device)
            self.assignments.append(Assignment(none, torch.full(shape, float("nan"), device=query.device)))
            return
        cosine = normalize(query, dim=-1) @ normalize(self.current.vector, dim=-1).transpose(-1, -2)  # [R, H, G, T, K]
        nearest = _first_largest(cosine)
        beacon = nearest.squeeze(-1)
        self.assignments.append(Assignment(beacon, cosine.gather(-1, nearest).squeeze(-1)))
        assert self._members is not None
        self._members.scatter_add_(-1, beacon, torch.ones_like(beacon))


class _Pool:
    """Continual farthest-point sampling: a bounded pool of past queries."""

    def __init__(self, settings: BeaconSettings, heads: HeadInfo) -> None:
        self._low, self._high = settings.pool_low, settings.pool_high
        self._count = settings.count
        shape = (heads.rows, len(heads.kv_heads), heads.group_size, self._high)
        self._query = torch.zeros((*shape, heads.size), device=heads.device)
        self._source = torch.zeros(shape, dtype=torch.int64, device=heads.device)
        self._held = 0

    @property
    def room(self) -> int:
        """Queries that may be added at once."""
        return self._high - self._held

    def add(self, query: Tensor, first_position: int) -> bool:
        """Add queries [R, H, G, T, D], T at most ``room``; True where that filled the pool and it was thinned."""
        end = self._held + query.shape[3]
        self._query[:, :, :, self._held : end] = query
        self._source[:, :, :, self._held : end] = torch.arange(
            first_position, first_position + query.shape[3], device=query.device
        )
        self._held = end
        if end < self._high:
            return False
        kept = farthest_points(self._query, self._low).sort(dim=-1).values
        thinned = self._take(kept)
        self._query[:, :, :, : self._low] = thinned.vector
        self._source[:, :, :, : self._low] = thinned.source
        self._held = self._low
        return True

    def beacons(self) -> BeaconSet:
        """K of the pool by farthest-point sampling, all of it while it holds fewer."""
        pool = self._query[:, :, :, : self._held]
        return self._take(farthest_points(pool, min(self._count, self._held)))

    def _take(self, index: Tensor) -> BeaconSet:
        return BeaconSet(
            self._query.gather(3, index.unsqueeze(-1).expand(*index.shape, self._query.shape[-1])),
            self._source.gather(3, index),
        )

    def select_rows(self, rows: Tensor) -> None:
        self._query = self._query.index_select(0, rows.to(self._query.device))
        self._source = self._source.index_select(0, rows.to(self._source.device))


class _Centroids:
    """Online spherical k-means: the first K queries seed the centroids, each next one moves its nearest."""

    room = 1 << 62

    def __init__(self, settings: BeaconSettings, heads: HeadInfo) -> None:
        self._count = settings.count
        shape = (heads.rows, len(heads.kv_heads), heads.group_size, settings.count)
        self._unit = torch.zeros((*shape, heads.size), device=heads.device)
        self._norm = torch.zeros(shape, device=heads.device)  # mean norm of the members
        self._members = torch.zeros(shape, device=heads.device)
        self._held = 0

    def add(self, query: Tensor, first_position: int) -> bool:
        """Move the centroids by queries [R, H, G, T, D], one after another."""
        norm = query.norm(dim=-1)  # [R, H, G, T]
        unit = normalize(query, dim=-1)
        for t in range(query.shape[3]):
            if self._held < self._count:
                self._unit[:, :, :, self._held] = unit[:, :, :, t]
                self._norm[:, :, :, self._held] = norm[:, :, :, t]
                self._members[:, :, :, self._held] = 1
                self._held += 1
                continue
            x = unit[:, :, :, t].unsqueeze(-1)  # [R, H, G, D, 1]
            nearest = _first_largest((self._unit @ x).squeeze(-1))  # [R, H, G, 1]
            members = self._members.gather(-1, nearest) + 1
            at = nearest.unsqueeze(-1).expand(*nearest.shape, self._unit.shape[-1])
            centroid = self._unit.gather(3, at)
            moved = normalize(centroid + (x.transpose(-1, -2) - centroid) / members.unsqueeze(-1), dim=-1)
            mean = self._norm.gather(-1, nearest)
            self._unit.scatter_(3, at, moved)
            self._norm.scatter_(-1, nearest, mean + (norm[:, :, :, t : t + 1] - mean) / members)
            self._members.scatter_(-1, nearest, members)
        return False

    def beacons(self) -> BeaconSet:
        """The centroids, at the mean norm of their members."""
        unit, norm = self._unit[:, :, :, : self._held], self._norm[:, :, :, : self._held]
        source = torch.full(norm.shape, -1, device=norm.device)
        return BeaconSet(unit * norm.unsqueeze(-1), source)

    def select_rows(self, rows: Tensor) -> None:
        index = rows.to(self._unit.device)
        self._unit, self._norm = self._unit.index_select(0, index), self._norm.index_select(0, index)
        self._members = self._members.index_select(0, index)


class _Reservoir:
    """A uniform sample of K past queries (Vitter's algorithm R), with one stream of random numbers for each head."""

    room = 1 << 62

    def __init__(self, settings: BeaconSettings, heads: HeadInfo) -> None:
        self._count = settings.count
        self._group = heads.group_size
        shape = (heads.rows, len(heads.kv_heads), heads.group_size, settings.count)
        self._query = torch.zeros((*shape, heads.size), device=heads.device)
        self._source = torch.zeros(shape, dtype=torch.int64, device=heads.device)
        self._streams = [np.random.default_rng([settings.seed, heads.layer, head]) for head in heads.kv_heads]
        self._seen = 0

    def add(self, query: Tensor, first_position: int) -> bool:
        """Offer queries [R, H, G, T, D]; the n-th ever takes a random slot with probability K / n."""
        total = query.shape[3]
        seen = self._seen + np.arange(total)
        drawn = np.stack([stream.random((total, self._group)) for stream in self._streams])  # [H, T, G]
        slot = np.floor(drawn * (seen + 1)[None, :, None]).astype(np.int64)
        slot = np.where(seen[None, :, None] < self._count, seen[None, :, None], slot)
        # The query that a slot takes, -1 for none.
        newest = np.full((len(self._streams), self._group, self._count), -1)  # [H, G, K]
        head, token, member = np.nonzero(slot < self._count)
        # In the order of the tokens, so that the last to take a slot has it.
        in_order = np.argsort(token, kind="stable")
        head, token, member = head[in_order], token[in_order], member[in_order]
        newest[head, member, slot[head, token, member]] = token
        takes = torch.from_numpy(newest).to(query.device).expand(self._source.shape)
        index = takes.clamp(min=0)
        taken = query.gather(3, index.unsqueeze(-1).expand(*index.shape, query.shape[-1]))
        self._query = torch.where(takes.unsqueeze(-1) >= 0, taken, self._query)
        self._source = torch.where(takes >= 0, first_position + index, self._source)
        self._seen += total
        return False

    def beacons(self) -> BeaconSet:
        """The sample, which is everything while fewer than K queries were seen."""
        held = min(self._count, self._seen)
        return BeaconSet(self._query[:, :, :, :held], self._source[:, :, :, :held])

    def select_rows(self, rows: Tensor) -> None:
        self._query = self._query.index_select(0, rows.to(self._query.device))
        self._source = self._source.index_select(0, rows.to(self._source.device))
