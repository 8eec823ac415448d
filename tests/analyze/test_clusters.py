"""Planted clusters are found, noise is not called clustered, and gathering in few of them is told from chance."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import make_blobs
from sklearn.metrics import (
    adjusted_rand_score,
    calinski_harabasz_score,
    davies_bouldin_score,
    silhouette_score,
)
from sklearn.preprocessing import normalize

from beaconscope.analyze.beacons import _balance, _churn, _returns
from beaconscope.analyze.clusters import concentration, quick_checks, stability, sweep_clusters, tendency
from beaconscope.analyze.compare import matched_cosine
from beaconscope.analyze.verdict import judge


def planted(count: int, seed: int, size: int = 32, each: int = 25):
    points, labels = make_blobs([each] * count, size, cluster_std=1.0, random_state=seed)
    return normalize(points), labels


def noise(seed: int, count: int = 100, size: int = 16):
    return normalize(np.random.default_rng(seed).standard_normal((count, size)))


@pytest.mark.parametrize("count", [3, 5])
def test_planted_clusters_are_found(count):
    points, labels = planted(count, seed=count)
    found = sweep_clusters(points, tuple(range(2, 9)), 0)
    assert abs(found.counts[found.best] - count) <= 1
    assert adjusted_rand_score(labels, found.labels[found.best]) >= 0.9
    assert str(found.counts[found.best]) not in found.reason().split(";")[0]
    assert min(stability(points, count, 0)) >= 0.9


def test_the_metrics_are_scikit_learn_s():
    points, _ = planted(4, seed=1)
    found = sweep_clusters(points, (3, 4), 0)
    for index, labels in enumerate(found.labels):
        assert found.silhouette[index] == pytest.approx(silhouette_score(points, labels, metric="cosine"), abs=1e-6)
        assert found.davies_bouldin[index] == pytest.approx(davies_bouldin_score(points, labels), abs=1e-6)
        assert found.calinski_harabasz[index] == pytest.approx(calinski_harabasz_score(points, labels), rel=1e-6)


def test_planted_clusters_beat_the_null_and_noise_does_not():
    silhouette_p, hopkins, hopkins_p = tendency(planted(4, seed=2)[0], 0)
    assert silhouette_p <= 0.05 and hopkins_p <= 0.05 and hopkins > 0.6
    silhouette_p, hopkins, hopkins_p = tendency(noise(0), 0)
    assert silhouette_p > 0.05 or hopkins_p > 0.05
    assert 0.45 < hopkins < 0.55


def test_queries_that_are_all_alike_have_no_clusters():
    points = np.tile(noise(0)[:1], (30, 1))
    assert sweep_clusters(points, (2, 3), 0) is None
    assert all(np.isnan(value) for value in tendency(points, 0))


def test_concentration_tells_one_cluster_from_chance():
    random = np.random.default_rng(0)
    labels = np.arange(400) % 8
    one = concentration(labels, np.flatnonzero(labels == 3)[:20], 999, random)
    assert (one.entropy, one.purity, one.groups) == (0.0, 1.0, 1.0)
    assert one.p == 1 / 1000
    assert one.effect_sd > 3
    even = concentration(labels, np.arange(40), 999, random)
    assert even.entropy == pytest.approx(1.0)
    assert even.groups == pytest.approx(8.0)
    assert even.p > 0.5
    # Where all are chosen there is nothing to draw.
    everything = concentration(labels, np.arange(400), 99, random)
    assert (everything.p, everything.effect_sd) == (1.0, 0.0)


def clusters_frame(*rows):
    columns = ["space", "concentration_p", "groups", "effect", "clustered"]
    return pd.DataFrame(rows, columns=columns)


@pytest.mark.parametrize(
    ("rows", "revisits", "answer"),
    [
        ([("pre-rope", 0.001, 2.0, 0.5, True)] * 3, 40, "yes"),
        ([("pre-rope", 0.5, 7.0, 0.0, True)] * 3, 40, "no"),
        # Significant, but spread over nearly all clusters.
        ([("pre-rope", 0.001, 6.5, 0.1, True)] * 3, 40, "no"),
        ([("pre-rope", 0.001, 2.0, 0.5, True)] * 3, 5, "not enough"),
        ([("pre-rope", np.nan, np.nan, np.nan, False)], 40, "not enough"),
        ([], 40, "not enough"),
    ],
)
def test_the_verdict_can_say_no_and_that_it_cannot_tell(rows, revisits, answer):
    found = judge({"revisits": revisits, "steps": 500, "window": 64}, clusters_frame(*rows))
    assert found["answer"] == answer
    assert found["text"] and found["would_change"]


def test_without_clusters_the_verdict_does_not_speak_of_too_few_revisits():
    found = judge({"revisits": 24, "steps": 500, "window": 64}, clusters_frame(), asked=False)
    assert found["answer"] == "not asked"
    assert found["text"] == (
        "Not asked: 24 revisits found, and no query head's queries were to be clustered (cluster_heads is 0)."
    )
    assert found["would_change"] == "cluster_heads of 1 or more"


def test_churn_balance_and_returns_of_beacons():
    changes = pd.DataFrame({"position": [5, 5, 9, 9], "source": [1, 2, 2, 8]})
    assert _churn(changes) == 0.5
    assert _balance(np.array([-1, 4, 4, 7, 7])) == pytest.approx(1.0)
    identity = np.array([-1] * 5 + [3] * 5 + [4] * 10 + [3] * 10)
    # The look at step 25 is at the place of the one at step 6, and falls to its beacon; that of step 15 is elsewhere.
    returns, same, chance = _returns(np.array([6, 15, 25]), np.array([2, 90, 3]), identity, 8)
    assert (returns, same) == (1, 1.0)
    assert chance == pytest.approx(10 / 20)


def test_centroids_are_matched_whatever_their_order():
    centroids = noise(0, 5)
    assert matched_cosine(centroids, centroids[[3, 1, 4, 0, 2]]) == pytest.approx(1.0)


def test_isotropic_noise_is_not_called_clustered():
    # benchmarks/detection.py counts it over 100 seeds.
    with quick_checks():
        found = [tendency(noise(seed, 60, 16), seed) for seed in range(12)]
    assert sum(silhouette_p <= 0.05 and hopkins_p <= 0.05 for silhouette_p, _, hopkins_p in found) <= 1
