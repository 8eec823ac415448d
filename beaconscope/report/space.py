"""The queries of a head on a plane: UMAP for the heads that revisit most, PCA for the others.

Queries are scaled to length one and compared by cosine, as the clusters of the analysis are. UMAP is fitted with a
fixed seed on a sample that holds every revisit and every query that a beacon was taken from; the other shown queries
are placed by the fitted map. Centroids are placed by the same map, where the map is of the space that they live in.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.metrics.pairwise import cosine_distances

from beaconscope.report.compiled import load_umap

_NEIGHBOURS = 15


@dataclass(frozen=True)
class Plane:
    """Where queries and centroids lie."""

    method: str  # "UMAP" or "PCA"
    points: npt.NDArray[np.float32]  # [n, 2]
    centroids: npt.NDArray[np.float32]  # [c, 2]


def shown_positions(
    length: int, first: int, wanted: Sequence[npt.NDArray[np.int64]], count: int, seed: int
) -> npt.NDArray[np.int64]:
    """Positions of the queries to show, ascending, at most ``count``.

    Those of ``wanted`` come first, one array after the other, then others from position ``first`` on. Where an array
    does not fit as a whole it is sampled.
    """
    random = np.random.default_rng(seed)
    shown = np.zeros(0, np.int64)
    for each in (*wanted, np.arange(first, length)):
        more = np.setdiff1d(each, shown)
        room = count - len(shown)
        shown = np.union1d(shown, more if len(more) <= room else random.choice(more, room, replace=False))
    return shown.astype(np.int64)


def lay_out(
    queries: npt.NDArray[np.floating[Any]],
    must: npt.NDArray[np.bool_],
    centroids: npt.NDArray[np.floating[Any]],
    *,
    umap: bool,
    fit: int,
    seed: int,
) -> Plane:
    """Place queries [n, D] and centroids [c, D]; ``must`` [n] marks those that a fit has to include first."""
    points, centers = unit(queries), unit(centroids)
    distinct = len(np.unique(points.round(5), axis=0))
    if umap and distinct > _NEIGHBOURS + 5:
        return _umap(points, must, centers, fit, seed)
    return _pca(points, centers)


def compile_umap() -> None:
    """Have UMAP's code compiled and kept, so that whoever lays out queries next finds it."""
    queries = np.random.default_rng(0).normal(size=(2 * _NEIGHBOURS + 10, 4))
    lay_out(queries, np.zeros(len(queries), np.bool_), queries[:1], umap=True, fit=2 * _NEIGHBOURS, seed=0)


def unit(vectors: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float32]:
    """Scale to length one; what is not finite or zero becomes zero."""
    known = np.nan_to_num(np.asarray(vectors, np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    norm = np.linalg.norm(known, axis=-1, keepdims=True)
    return (known / np.where(norm > 0, norm, 1)).astype(np.float32, copy=False)


def _pca(points: npt.NDArray[np.float32], centers: npt.NDArray[np.float32]) -> Plane:
    mean = points.mean(axis=0) if len(points) else np.zeros(points.shape[1], np.float32)
    # The scatter matrix is [D, D], so that long traces cost no more memory than short ones.
    _, axes = np.linalg.eigh((points - mean).T @ (points - mean))
    axes = axes[:, ::-1][:, :2]
    if axes.shape[1] < 2:
        axes = np.pad(axes, ((0, 0), (0, 2 - axes.shape[1])))
    # An axis and its opposite are equally good; the sign is fixed so that the same trace gives the same picture.
    axes = axes * np.where(axes[np.abs(axes).argmax(axis=0), [0, 1]] < 0, -1.0, 1.0)
    return Plane(
        "PCA", ((points - mean) @ axes).astype(np.float32), ((centers - mean) @ axes).astype(np.float32).reshape(-1, 2)
    )


def _umap(
    points: npt.NDArray[np.float32], must: npt.NDArray[np.bool_], centers: npt.NDArray[np.float32], fit: int, seed: int
) -> Plane:
    umap = load_umap()
    random = np.random.default_rng(seed)
    chosen = np.flatnonzero(must)
    if len(chosen) > fit:
        chosen = random.choice(chosen, fit, replace=False)
    others = np.setdiff1d(np.arange(len(points)), chosen)
    room = max(0, min(len(others), fit - len(chosen)))
    chosen = np.sort(np.concatenate([chosen, random.choice(others, room, replace=False)])).astype(np.int64)
    fitted = points[chosen]
    # It starts from the principal components, with a little noise so that no two queries begin at one place.
    principal = _pca(fitted, centers[:0]).points
    noise = random.normal(scale=1e-4, size=principal.shape)
    start = (10 * principal / max(float(np.abs(principal).max()), 1e-12) + noise).astype(np.float32)
    with warnings.catch_warnings():
        # It says that a fixed seed means one thread, and that distances cannot be turned back into queries.
        warnings.simplefilter("ignore")
        # Distances are given: UMAP would ask a function for each, pair by pair, which takes longer than all the rest.
        mapping = umap.UMAP(
            n_neighbors=_NEIGHBOURS, min_dist=0.1, metric="precomputed", random_state=seed, n_jobs=1,
            init=start, n_epochs=200,
        )  # fmt: skip
        placed = np.zeros((len(points), 2), np.float32)
        placed[chosen] = mapping.fit_transform(cosine_distances(fitted))
        rest = np.setdiff1d(np.arange(len(points)), chosen)
        if len(rest):
            placed[rest] = mapping.transform(cosine_distances(points[rest], fitted))
        middle = np.zeros((0, 2), np.float32)
        if len(centers):
            middle = mapping.transform(cosine_distances(centers, fitted))
    return Plane("UMAP", placed, np.asarray(middle, np.float32))
