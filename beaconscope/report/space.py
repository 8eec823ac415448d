"""The queries of a head on a plane: UMAP for the heads that revisit most, PCA for the others.

Queries are scaled to length one and compared by cosine, as the clusters of the analysis are. UMAP is fitted with a fixed
seed on a sample that holds every revisit and every query that a beacon was taken from; the other shown queries are
placed by the fitted map. Centroids are placed by the same map, where the map is of the space that they live in.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_NEIGHBOURS = 15


@dataclass(frozen=True)
class Plane:
    """Where queries and centroids lie."""

    method: str  # "UMAP" or "PCA"
    points: npt.NDArray[np.float32]  # [n, 2]
    centroids: npt.NDArray[np.float32]  # [c, 2]


def shown_positions(
    length: int, first: int, wanted: npt.NDArray[np.int64], count: int, seed: int
) -> npt.NDArray[np.int64]:
    """Positions of the queries to show, ascending: all ``wanted`` ones, then others of the generation, then the prompt.

    Where even the wanted ones are more than ``count``, they are sampled.
    """
    random = np.random.default_rng(seed)
    wanted = np.unique(wanted)
    if len(wanted) > count:
        return np.sort(random.choice(wanted, count, replace=False))
    rest = np.setdiff1d(np.arange(first, length), wanted)
    room = count - len(wanted)
    if len(rest) > room:
        rest = random.choice(rest, room, replace=False)
    return np.union1d(wanted, rest).astype(np.int64)


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
    points, centers = _directions(queries), _directions(centroids)
    distinct = len(np.unique(points.round(5), axis=0))
    if umap and distinct > _NEIGHBOURS + 5:
        return _umap(points, must, centers, fit, seed)
    return _pca(points, centers)


def _directions(vectors: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float32]:
    """Scale to length one; what is not finite or zero becomes zero."""
    vectors = np.nan_to_num(np.asarray(vectors, np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    norm = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: npt.NDArray[np.float32] = vectors / np.where(norm > 0, norm, 1)
    return scaled


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
    import umap

    random = np.random.default_rng(seed)
    chosen = np.flatnonzero(must)
    if len(chosen) > fit:
        chosen = random.choice(chosen, fit, replace=False)
    others = np.setdiff1d(np.arange(len(points)), chosen)
    room = min(len(others), fit - len(chosen))
    chosen = np.sort(np.concatenate([chosen, random.choice(others, room, replace=False)])).astype(np.int64)
    with warnings.catch_warnings():
        # It says that a fixed seed means one thread.
        warnings.simplefilter("ignore")
        mapping = umap.UMAP(
            n_neighbors=_NEIGHBOURS, min_dist=0.1, metric="cosine", random_state=seed, n_jobs=1, init="pca",
            n_epochs=200,
        )  # fmt: skip
        placed = np.zeros((len(points), 2), np.float32)
        placed[chosen] = mapping.fit_transform(points[chosen])
        rest = np.setdiff1d(np.arange(len(points)), chosen)
        if len(rest):
            placed[rest] = mapping.transform(points[rest])
        middle = mapping.transform(centers) if len(centers) else np.zeros((0, 2), np.float32)
    return Plane("UMAP", placed, np.asarray(middle, np.float32))
