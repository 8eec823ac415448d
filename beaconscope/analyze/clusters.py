"""Clusters of a head's queries, and whether those of revisits gather in few of them.

Distances are those between directions: queries are scaled to length one, so that Euclidean k-means and cosine agree.
Everything is done before and after the rotary embedding, side by side. For the query heads that have a part in most
revisits:

1. k-means for K = 2 to ``clusters``, with silhouette (cosine), Davies-Bouldin and Calinski-Harabasz; the K with the
   best silhouette is recommended.
2. Are there clusters at all? Best silhouette and Hopkins statistic are compared with the same of draws from a null that
   has the mean and covariance of the queries and no clusters. Both must be beyond 95 % of the draws.
3. Are revisits in few clusters? The entropy of their labels against that of as many queries drawn from all
   generating steps. The clusters are fitted without knowing which queries are revisits.
4. Are the clusters stable? Adjusted Rand index over bootstraps and over seeds.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn import config_context
from sklearn.cluster import KMeans
from sklearn.metrics import (
    adjusted_rand_score,
    calinski_harabasz_score,
    davies_bouldin_score,
    silhouette_score,
)
from sklearn.metrics.pairwise import cosine_distances
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from beaconscope.analyze.attention import layer_rotary, pre_rope
from beaconscope.analyze.events import Events
from beaconscope.analyze.heads import busiest_heads
from beaconscope.analyze.options import AnalyzeOptions
from beaconscope.analyze.revisits import Revisits
from beaconscope.trace import HeadTrace, Trace

Array = npt.NDArray[np.floating[Any]]

_NULL_DRAWS = 19
"""Draws of the null: as few as a p-value of 5 % takes."""
_STABILITY_DRAWS = 5
"""Bootstraps, and other seeds."""
_NULL_COUNTS = (2, 4, 8)
"""Numbers of clusters at which data and null are compared."""
_FEWEST_QUERIES = 20
"""Queries of a head below which they are not clustered."""
_TENDENCY_QUERIES = 128
"""Queries of which it is asked whether they cluster at all."""
FEWEST_REVISITS = 8
"""Revisits of a head below which nothing is said about their clusters."""
GROUPS = 8
"""Clusters into which queries are cut to ask whether revisits gather in few of them."""

_CLUSTER_COLUMNS = [
    "layer", "kv_head", "query_head", "space", "queries", "recommended", "reason", "silhouette", "davies_bouldin",
    "calinski_harabasz", "silhouette_p", "hopkins", "hopkins_p", "clustered", "revisits", "groups", "entropy", "purity",
    "concentration_p", "effect", "effect_sd", "ari_bootstrap", "ari_seed",
]  # fmt: skip
_SWEEP_COLUMNS = [
    "layer", "kv_head", "query_head", "space", "clusters", "silhouette", "davies_bouldin", "calinski_harabasz",
]  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """Clusterings of n queries, one per number of clusters."""

    counts: tuple[int, ...]
    silhouette: tuple[float, ...]
    davies_bouldin: tuple[float, ...]
    calinski_harabasz: tuple[float, ...]
    labels: tuple[npt.NDArray[np.int32], ...]  # [n] each

    @property
    def best(self) -> int:
        """Index of the best silhouette, the smaller number of clusters in a tie."""
        return int(np.argmax(self.silhouette))

    def reason(self) -> str:
        """Why the recommended number is recommended."""
        best = self.best
        text = f"highest silhouette ({self.silhouette[best]:.2f})"
        others = [index for index in range(len(self.counts)) if index != best]
        if not others:
            return text
        second = max(others, key=lambda index: self.silhouette[index])
        return f"{text}; next is K = {self.counts[second]} ({self.silhouette[second]:.2f})"


def quick_checks() -> AbstractContextManager[None]:
    """Let scikit-learn check less of what it is given: here that is known, and its checks take as long as its work."""
    return config_context(assume_finite=True, skip_parameter_validation=True)  # type: ignore[no-any-return]


def distinct(points: Array) -> int:
    """How many of the points [n, D] differ by more than rounding."""
    return len(np.unique(np.round(points, 5), axis=0))


def sweep_clusters(points: Array, counts: tuple[int, ...], seed: int) -> Sweep | None:
    """Cluster unit vectors [n, D] into each number of clusters that makes sense; None where none does."""
    most = distinct(points)
    distance = cosine_distances(points)
    rows = []
    for count in counts:
        if not 2 <= count < most:
            continue
        labels = KMeans(count, n_init=3, random_state=seed).fit_predict(points)
        if len(np.unique(labels)) < 2:
            continue
        rows.append(
            (
                count,
                float(silhouette_score(distance, labels, metric="precomputed")),
                float(davies_bouldin_score(points, labels)),
                float(calinski_harabasz_score(points, labels)),
                labels.astype(np.int32),
            )
        )
    if not rows:
        return None
    return Sweep(*(tuple(column) for column in zip(*rows, strict=True)))


class MatchedNull:
    """Directions without clusters: a normal distribution with the mean and covariance of ``points`` [n, D]."""

    def __init__(self, points: Array) -> None:
        self._mean = points.mean(axis=0)
        _, scale, axes = np.linalg.svd(points - self._mean, full_matrices=False)
        self._axes = axes * (scale / np.sqrt(max(1, len(points) - 1)))[:, None]  # [r, D]

    def draw(self, count: int, random: np.random.Generator) -> Array:
        """Unit vectors [count, D]."""
        drawn = self._mean + random.standard_normal((count, len(self._axes))) @ self._axes
        return normalize(drawn)  # type: ignore[no-any-return]


def hopkins(points: Array, null: MatchedNull, random: np.random.Generator) -> float:
    """Hopkins statistic of unit vectors [n, D] against draws of a null in place of the usual uniform ones.

    w is the distance of a query to its nearest other one, u that of a null point to its nearest query, over all queries
    and as many null points: sum u / (sum u + sum w).

    Returns
    -------
    float
        About 0.5 where the queries are as even as the null, towards 1 where they clump; nan where all coincide.
    """
    neighbours = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(points)
    w = neighbours.kneighbors()[0].sum()
    u = neighbours.kneighbors(null.draw(len(points), random))[0].sum()
    return float(u / (u + w)) if u + w > 0 else float("nan")


def tendency(points: Array, seed: int) -> tuple[float, float, float]:
    """Whether unit vectors [n, D] cluster more than the matched null does; of at most 128 of them.

    Returns
    -------
    silhouette_p, hopkins, hopkins_p
        p-values by draws from the null: the share of draws (the data among them) that reach the data's value.
    """
    random = np.random.default_rng(seed)
    if len(points) > _TENDENCY_QUERIES:
        points = points[random.choice(len(points), _TENDENCY_QUERIES, replace=False)]
    counts = tuple(count for count in _NULL_COUNTS if count < distinct(points))
    if not counts:
        return float("nan"), float("nan"), float("nan")
    null = MatchedNull(points)
    found, statistic = _best_silhouette(points, counts, seed), hopkins(points, null, random)
    reached, above = 1, 1
    for draw in range(_NULL_DRAWS):
        drawn = null.draw(len(points), random)
        reached += _best_silhouette(drawn, counts, seed + draw) >= found
        above += hopkins(drawn, MatchedNull(drawn), random) >= statistic
    return reached / (_NULL_DRAWS + 1), statistic, above / (_NULL_DRAWS + 1)


def _best_silhouette(points: Array, counts: tuple[int, ...], seed: int) -> float:
    """The best silhouette over some numbers of clusters, with one start each."""
    distance = cosine_distances(points)
    best = -1.0
    for count in counts:
        labels = KMeans(count, n_init=1, random_state=seed).fit_predict(points)
        if len(np.unique(labels)) > 1:
            best = max(best, float(silhouette_score(distance, labels, metric="precomputed")))
    return best


@dataclass(frozen=True)
class Concentration:
    """How few clusters some queries lie in."""

    groups: float
    """Effective number of clusters: e to the entropy."""
    entropy: float
    """Normalised: 0 for one cluster, 1 for even shares."""
    purity: float
    """Share of the largest."""
    p: float
    effect: float
    """Mean normalised entropy of as many random queries, less the entropy."""
    effect_sd: float
    """The same in standard deviations."""


def concentration(
    labels: npt.NDArray[np.integer[Any]], chosen: npt.NDArray[np.int64], draws: int, random: np.random.Generator
) -> Concentration:
    """Ask whether the ``chosen`` of n labelled queries lie in fewer clusters than as many random ones.

    Parameters
    ----------
    labels
        Cluster of each query, [n], from 0.
    chosen
        Indices into ``labels``.
    draws
        Permutations.
    random
        Where they come from.
    """
    size = np.bincount(labels)
    seen = np.bincount(labels[chosen], minlength=len(size))
    drawn = random.multivariate_hypergeometric(size, len(chosen), size=draws)  # [draws, K]
    scale = np.log(len(size)) if len(size) > 1 else 1.0
    entropy = float(_entropy(seen[None])[0] / scale)
    of_null = _entropy(drawn) / scale
    spread = float(of_null.std())
    effect = float(of_null.mean()) - entropy
    return Concentration(
        groups=float(np.exp(entropy * scale)),
        entropy=entropy,
        purity=float(seen.max() / len(chosen)),
        p=float((1 + (of_null <= entropy + 1e-12).sum()) / (draws + 1)),
        effect=effect,
        effect_sd=effect / spread if spread > 0 else 0.0,
    )


def _entropy(count: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
    """Entropy of counts [N, K] in nats, [N]."""
    share = count / count.sum(axis=1, keepdims=True)
    entropy: npt.NDArray[np.float64] = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1)
    return entropy


def stability(points: Array, count: int, seed: int) -> tuple[float, float]:
    """Mean adjusted Rand index of k-means on ``points`` [n, D] with itself on bootstraps, and with other seeds."""
    base = KMeans(count, n_init=3, random_state=seed).fit_predict(points)
    random = np.random.default_rng(seed)
    over_bootstraps, over_seeds = [], []
    for draw in range(_STABILITY_DRAWS):
        resampled = points[random.integers(0, len(points), len(points))]
        if len(np.unique(resampled, axis=0)) >= count:
            fitted = KMeans(count, n_init=3, random_state=seed).fit(resampled)
            over_bootstraps.append(adjusted_rand_score(base, fitted.predict(points)))
        other = KMeans(count, n_init=3, random_state=seed + draw + 1).fit_predict(points)
        over_seeds.append(adjusted_rand_score(base, other))
    return float(np.mean(over_bootstraps)) if over_bootstraps else float("nan"), float(np.mean(over_seeds))


def spaces(trace: Trace, head: HeadTrace, group: int, positions: npt.NDArray[np.int64]) -> dict[str, Array]:
    """Directions [n, D] of the queries at ``positions``, by query space; one space where nothing is rotated."""
    query = np.asarray(head.query[positions, group], np.float32)
    rotary = layer_rotary(trace, head.layer)
    found = {"post-rope": query}
    if rotary is not None:
        found = {"pre-rope": pre_rope(query, rotary, positions), **found}
    # scikit-learn is faster in the precision that it computes distances in.
    return {space: normalize(np.asarray(points, np.float64)) for space, points in found.items()}


def cluster_rows(
    pool: ThreadPoolExecutor,
    trace: Trace,
    heads: pd.DataFrame,
    events: Events,
    head_of: npt.NDArray[np.int64],
    revisits: Revisits,
    first: int,
    options: AnalyzeOptions,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Cluster the queries of the busiest heads.

    Parameters
    ----------
    pool
        Threads for heads.
    trace
        Whose queries are clustered.
    heads
        One row per query head, with its ``revisits``.
    events, head_of
        The global queries of all heads, and the row of ``heads`` of each.
    revisits
        Of the trace.
    first
        Position of the first query that generates.
    options
        Numbers of heads, queries, clusters and draws, and the seed.

    Returns
    -------
    clusters, sweep
        One row per head and query space, and one per head, space and number of clusters tried.
    """

    def one(busy: tuple[int, tuple[int, int, int]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        number, name = busy
        looking = np.intersect1d(events.step[head_of == number], revisits.steps)
        return _of_head(trace, name, looking, first, options)

    chosen = busiest_heads(heads, options.cluster_heads)
    names = zip(chosen["layer"].tolist(), chosen["kv_head"].tolist(), chosen["query_head"].tolist(), strict=True)
    rows: list[dict[str, Any]] = []
    swept: list[dict[str, Any]] = []
    for of_head, of_counts in pool.map(one, zip(chosen.index.tolist(), names, strict=True)):
        rows += of_head
        swept += of_counts
    return pd.DataFrame(rows, columns=_CLUSTER_COLUMNS), pd.DataFrame(swept, columns=_SWEEP_COLUMNS)


def _of_head(
    trace: Trace, head: tuple[int, int, int], looking: npt.NDArray[np.int64], first: int, options: AnalyzeOptions
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of one query head, of whose steps those ``looking`` are its part in revisits."""
    layer, kv_head, group = head
    recorded = trace.head(layer, kv_head)
    positions = np.arange(first, trace.length)
    positions = positions[np.isfinite(recorded.query[first:, group]).all(axis=1)]
    rows: list[dict[str, Any]] = []
    swept: list[dict[str, Any]] = []
    if len(positions) < _FEWEST_QUERIES:
        return rows, swept
    revisiting = np.flatnonzero(np.isin(positions, looking))
    random = np.random.default_rng([options.seed, *head])
    sample = np.arange(len(positions))
    if len(sample) > options.cluster_queries:
        sample = np.sort(random.choice(len(sample), options.cluster_queries, replace=False))
    for space, points in spaces(trace, recorded, group, positions).items():
        name = {"layer": layer, "kv_head": kv_head, "query_head": group, "space": space}
        with quick_checks():
            row, of_counts = _clusters_of(points, sample, revisiting, random, options)
        rows.append(name | row)
        swept += [name | counted for counted in of_counts]
    return rows, swept


def _clusters_of(
    points: Array,
    sample: npt.NDArray[np.int64],
    revisiting: npt.NDArray[np.int64],
    random: np.random.Generator,
    options: AnalyzeOptions,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Row of unit vectors [n, D] and those of its sweep.

    Clusters are fitted on the ``sample`` of them, those of ``revisiting`` ones are asked of all; both are indices.
    """
    row: dict[str, Any] = dict.fromkeys(_CLUSTER_COLUMNS[4:], float("nan"))
    row |= {"queries": len(sample), "recommended": None, "revisits": len(revisiting), "clustered": False}
    swept = sweep_clusters(points[sample], tuple(range(2, options.clusters + 1)), options.seed)
    if swept is None:
        return row | {"reason": "the queries are all alike"}, []
    best = swept.best
    silhouette_p, statistic, hopkins_p = tendency(points[sample], options.seed)
    by_bootstrap, by_seed = stability(points[sample], swept.counts[best], options.seed)
    row |= {
        "recommended": swept.counts[best],
        "reason": swept.reason(),
        "silhouette": swept.silhouette[best],
        "davies_bouldin": swept.davies_bouldin[best],
        "calinski_harabasz": swept.calinski_harabasz[best],
        "silhouette_p": silhouette_p,
        "hopkins": statistic,
        "hopkins_p": hopkins_p,
        "clustered": bool(silhouette_p <= 0.05 and hopkins_p <= 0.05),
        "ari_bootstrap": by_bootstrap,
        "ari_seed": by_seed,
    }
    if len(revisiting) >= FEWEST_REVISITS:
        groups = min(GROUPS, max(swept.counts))
        labels = KMeans(groups, n_init=3, random_state=options.seed).fit(points[sample]).predict(points)
        found = concentration(labels, revisiting, options.permutations, random)
        row |= {
            "groups": found.groups,
            "entropy": found.entropy,
            "purity": found.purity,
            "concentration_p": found.p,
            "effect": found.effect,
            "effect_sd": found.effect_sd,
        }
    of_counts = [
        {"clusters": count, "silhouette": s, "davies_bouldin": d, "calinski_harabasz": c}
        for count, s, d, c in zip(
            swept.counts, swept.silhouette, swept.davies_bouldin, swept.calinski_harabasz, strict=True
        )
    ]
    return row, of_counts
