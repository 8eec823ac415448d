"""The beacons of a query head over time: what the page's Gantt chart, slider and cluster curves are drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.metrics import silhouette_score

from beaconscope.report.pack import Pack, smallest_unsigned
from beaconscope.report.space import unit

_MOST_CHANGES = 64
"""Changes at which clusters are measured, spread over the trace."""
_SAMPLE = 300
"""Last queries whose clusters are measured."""


@dataclass(frozen=True)
class BeaconTrack:
    """The changes of one query head's beacons. C changes with E beacons in all, T positions."""

    step: npt.NDArray[np.int64]  # [C], position of each change
    count: npt.NDArray[np.int64]  # [C], beacons from then on
    source: npt.NDArray[np.int64]  # [E], position of the query it was taken from, -1 for a centroid
    members: npt.NDArray[np.int64]  # [E], queries assigned to the former beacon of this number since the last change
    centroid: npt.NDArray[np.float32]  # [c, D], vectors of the entries without a source, in order
    nearest: npt.NDArray[np.int16]  # [T], -1 for none
    similarity: npt.NDArray[np.float32]  # [T], nan for none

    def __len__(self) -> int:
        return len(self.source)

    @property
    def sources(self) -> npt.NDArray[np.int64]:
        """Positions that any beacon was taken from, ascending."""
        return np.unique(self.source[self.source >= 0])

    def add_to(self, pack: Pack, name: str, length: int) -> None:
        """Put it into a pack; a source is kept plus one, 0 for a centroid."""
        small = smallest_unsigned(length + 1)
        pack.add(f"{name}.step", self.step.astype(np.uint32))
        pack.add(f"{name}.count", self.count.astype(np.uint16))
        pack.add(f"{name}.source", (self.source + 1).astype(small))
        pack.add(f"{name}.members", self.members.astype(smallest_unsigned(int(self.members.max(initial=0)))))
        pack.add(f"{name}.nearest", np.where(self.nearest < 0, 0xFFFF, self.nearest).astype(np.uint16))
        pack.add_numbers(f"{name}.similarity", self.similarity, bits=8)


def beacon_track(
    changes: pd.DataFrame, group: int, nearest: npt.NDArray[np.int16], similarity: npt.NDArray[np.float32]
) -> BeaconTrack | None:
    """The track of one query head of a KV head's ``changes``; None where it never had beacons."""
    mine = changes[changes["query_head"] == group]
    if mine.empty:
        return None
    step, count = np.unique(mine["position"].to_numpy(np.int64), return_counts=True)
    source = mine["source"].to_numpy(np.int64)
    vectors = [vector for vector, at in zip(mine["vector"], source, strict=True) if at < 0]
    centroid = np.stack(vectors).astype(np.float32) if vectors else np.zeros((0, 0), np.float32)
    return BeaconTrack(step, count, source, mine["members"].to_numpy(np.int64), centroid, nearest, similarity)


def cluster_curves(track: BeaconTrack, queries: npt.NDArray[np.floating[Any]]) -> dict[str, list[float | None]]:
    """Coverage, churn and silhouette at each change of beacons.

    Parameters
    ----------
    track
        Of the query head.
    queries
        [T, D], in the space that the beacons live in.

    Returns
    -------
    dict
        Lists of equal length: ``step`` of the change; ``coverage``, mean cosine of the queries until the next change
        with their nearest beacon; ``churn``, share of beacons whose query was none of a beacon before (for centroids
        the mean cosine distance that they moved); ``silhouette`` (cosine) of the last 300 queries before the change,
        labelled by the nearest of the new beacons. None where there is nothing to measure.
    """
    ends = np.cumsum(track.count)
    all_centroids = np.cumsum(track.source < 0) - 1
    chosen = np.unique(np.linspace(0, len(track.step) - 1, min(_MOST_CHANGES, len(track.step))).astype(np.int64))
    curves: dict[str, list[float | None]] = {"step": [], "coverage": [], "churn": [], "silhouette": []}
    points = unit(queries)
    finite = np.isfinite(queries).all(axis=1)
    before: npt.NDArray[np.float32] | None = None
    for number in chosen.tolist():
        entry = np.arange(ends[number] - track.count[number], ends[number])
        source = track.source[entry]
        vectors = np.zeros((len(entry), points.shape[1]), np.float32)
        there = source >= 0
        vectors[there] = points[source[there]]
        if (~there).any():
            vectors[~there] = unit(track.centroid[all_centroids[entry[~there]]])
        step = int(track.step[number])
        until = int(track.step[number + 1]) if number + 1 < len(track.step) else len(points) - 1
        similar = track.similarity[step + 1 : until + 1]
        similar = similar[np.isfinite(similar)]
        churn: float | None = None
        if number:
            old = track.source[ends[number - 1] - track.count[number - 1] : ends[number - 1]]
            if there.all():
                churn = float(1 - np.isin(source, old).mean())
            elif before is not None and before.shape == vectors.shape and number - 1 in chosen:
                churn = float(1 - (before * vectors).sum(axis=1).mean())
        before = vectors
        curves["step"].append(step)
        curves["coverage"].append(float(similar.mean()) if len(similar) else None)
        curves["churn"].append(churn)
        last = np.arange(max(0, step + 1 - _SAMPLE), step + 1)
        curves["silhouette"].append(_silhouette(points[last[finite[last]]], vectors))
    return curves


def _silhouette(points: npt.NDArray[np.float32], beacons: npt.NDArray[np.float32]) -> float | None:
    labels = (points @ beacons.T).argmax(axis=1)
    groups = len(np.unique(labels))
    if not 2 <= groups < len(points):
        return None
    return float(silhouette_score(points, labels, metric="cosine"))
