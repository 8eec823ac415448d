"""Compare traces: whether the same heads revisit, and whether their queries form the same clusters.

1. The query heads that have a part in revisits: how many two traces share, against either.
2. Clusters of the same head in both: k-means on each trace's queries, centroids paired by the Hungarian method on
   cosine. The queries of both, labelled once by either's centroids, give the adjusted mutual information (0: unrelated,
   1: the same clusters); the cosine of the pairs is held against that of pairs from another head's centroids.
3. The rate of revisits against how far the generation has come, over all traces, with Wilson's interval at 95 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment
from scipy.stats import binomtest, spearmanr
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_mutual_info_score
from sklearn.preprocessing import normalize

from beaconscope.analyze.analysis import SCHEMA_VERSION, Analysis, plain
from beaconscope.analyze.clusters import Array, distinct, spaces
from beaconscope.analyze.heads import busiest_heads, head_name
from beaconscope.trace import Trace

_MATCHED_HEADS = 4
"""Query heads of two traces whose clusters are matched."""
_QUERIES = 200
"""Queries of a head that are clustered, at most."""
_CLUSTERS = 6
"""Clusters into which they are cut, at most."""
_STABLE = 0.5
"""Adjusted mutual information from which on clusters are called the same."""
_FALSE_ALARMS = 0.05
"""Rate of revisits above which they are more than noise."""

Head = tuple[int, int, int]
"""Layer, KV head and query head in its group."""


@dataclass(frozen=True)
class Comparison:
    """What several traces have in common. Traces are numbered from 0 in the order given."""

    traces: list[dict[str, Any]]
    """Of each trace: its length, revisits, their rate, heads with a part in them, verdict, what is not finite."""
    pairs: list[dict[str, Any]]
    """Of each two traces: shared heads and clusters."""
    matches: list[dict[str, Any]]
    """Of each two traces, head and query space: how well clusters match."""
    by_length: list[dict[str, Any]]
    """Rate of revisits by tokens generated so far."""
    text: str
    """The verdict in words."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``--json`` prints them."""
        return {
            "schema": "beaconscope.comparison",
            "schema_version": SCHEMA_VERSION,
            "traces": plain(self.traces),
            "pairs": plain(self.pairs),
            "matches": plain(self.matches),
            "by_length": plain(self.by_length),
            "text": self.text,
        }


def compare(traces: Sequence[Trace], analyses: Sequence[Analysis]) -> Comparison:
    """Compare analyzed traces, two at a time.

    Heads are the same if layer, KV head and query head are; clusters are compared where the sizes of the queries agree
    too.
    """
    listed, pairs, matches = [], [], []
    for analysis in analyses:
        heads = analysis.heads
        listed.append(
            {
                "trace": analysis.summary["trace"],
                "model": analysis.summary["model"],
                "length": analysis.summary["length"],
                "steps": analysis.summary["steps"],
                "missing_steps": analysis.summary["missing_steps"],
                "missing_vectors": analysis.summary["missing_vectors"],
                "missing": analysis.summary["missing"],
                "revisits": analysis.summary["revisits"],
                "revisit_rate": analysis.summary["revisit_rate"],
                "revisiting_heads": int((heads["kind"] == "revisiting").sum()),
                "answer": analysis.verdict["answer"],
            }
        )
    queries = _Queries(traces, analyses)
    for first, second in itertools.combinations(range(len(traces)), 2):
        both = _matches(queries, analyses, first, second)
        matches += both
        pairs.append(_pair(analyses, first, second, both))
    by_length = _by_length(analyses)
    return Comparison(listed, pairs, matches, by_length, _verdict(pairs, by_length))


def _head_table(analysis: Analysis) -> pd.DataFrame:
    return analysis.heads.set_index(["layer", "kv_head", "query_head"])


def _pair(analyses: Sequence[Analysis], first: int, second: int, matches: list[dict[str, Any]]) -> dict[str, Any]:
    a, b = _head_table(analyses[first]), _head_table(analyses[second])
    shared = a.index.intersection(b.index)
    mine, other = a.loc[shared, "kind"] == "revisiting", b.loc[shared, "kind"] == "revisiting"
    either = int((mine | other).sum())
    comparable = bool(mine.any() and other.any())
    rates = np.stack([table.loc[shared, "event_rate"].to_numpy() for table in (a, b)])
    # Of a head whose queries are not finite no rate is known.
    rates = rates[:, np.isfinite(rates).all(axis=0)]
    varied = rates.shape[1] > 2 and bool((np.ptp(rates, axis=1) > 0).all())
    # Before the rotary embedding where there is one: after it, positions decide.
    space = "pre-rope" if any(match["space"] == "pre-rope" for match in matches) else "post-rope"
    rows = [match for match in matches if match["space"] == space]
    return {
        "first": first,
        "second": second,
        "shared_heads": len(shared),
        "both": int((mine & other).sum()),
        "either": either,
        "overlap": int((mine & other).sum()) / either if comparable else None,
        "rank_correlation": float(spearmanr(*rates).statistic) if varied else None,
        "ami": float(np.mean([row["ami"] for row in rows])) if rows else None,
        "centroid_cosine": float(np.mean([row["centroid_cosine"] for row in rows])) if rows else None,
    }


class _Queries:
    """Queries of the heads of some traces, and their clusters, each computed once."""

    def __init__(self, traces: Sequence[Trace], analyses: Sequence[Analysis]) -> None:
        self._traces, self._analyses = traces, analyses
        self._spaces: dict[tuple[int, Head], dict[str, Array]] = {}
        self._fits: dict[tuple[int, Head, str, int], KMeans] = {}

    def of(self, trace: int, head: Head) -> dict[str, Array]:
        """Directions [n, D] of up to 200 generating queries by space; nothing where there are too few."""
        if (trace, head) not in self._spaces:
            self._spaces[trace, head] = _sampled_queries(self._traces[trace], self._analyses[trace], head)
        return self._spaces[trace, head]

    def clusters(self, trace: int, head: Head, space: str, count: int) -> KMeans:
        """Their k-means."""
        key = (trace, head, space, count)
        if key not in self._fits:
            seed = self._analyses[trace].options.seed
            self._fits[key] = KMeans(count, n_init=3, random_state=seed).fit(self.of(trace, head)[space])
        return self._fits[key]


def _matches(queries: _Queries, analyses: Sequence[Analysis], first: int, second: int) -> list[dict[str, Any]]:
    a, b = _head_table(analyses[first]), _head_table(analyses[second])
    shared = a.index.intersection(b.index)
    if not len(shared):
        return []
    busy = ["revisits", "events", "distant_share"]
    together = (a.loc[shared, busy] + b.loc[shared, busy]).reset_index()
    chosen = [
        (int(row["layer"]), int(row["kv_head"]), int(row["query_head"]))
        for _, row in busiest_heads(together, _MATCHED_HEADS).iterrows()
    ]
    alike: list[Head] = []
    for head in chosen:
        mine, other = queries.of(first, head), queries.of(second, head)
        if mine and other and mine["post-rope"].shape[1] == other["post-rope"].shape[1]:
            alike.append(head)
    rows = []
    for number, head in enumerate(alike):
        mine, other = queries.of(first, head), queries.of(second, head)
        for space in sorted(mine.keys() & other.keys(), reverse=True):  # pre-rope first
            count = min(_CLUSTERS, distinct(mine[space]) - 1, distinct(other[space]) - 1)
            if count < 2:
                continue
            one, two = queries.clusters(first, head, space, count), queries.clusters(second, head, space, count)
            pooled = np.concatenate([mine[space], other[space]])
            stranger = alike[number - 1]
            strange = queries.of(second, stranger).get(space, pooled[:0])
            chance = None
            if stranger != head and strange.shape[1] == pooled.shape[1] and distinct(strange) > count:
                centroids = queries.clusters(second, stranger, space, count).cluster_centers_
                chance = matched_cosine(one.cluster_centers_, centroids)
            rows.append(
                {
                    "first": first,
                    "second": second,
                    "head": head_name(*head),
                    "space": space,
                    "clusters": count,
                    "ami": float(adjusted_mutual_info_score(one.predict(pooled), two.predict(pooled))),
                    "centroid_cosine": matched_cosine(one.cluster_centers_, two.cluster_centers_),
                    "centroid_cosine_by_chance": chance,
                }
            )
    return rows


def matched_cosine(first: Array, second: Array) -> float:
    """Mean cosine of centroids [K, D] paired one to one so that it is highest."""
    cosine = normalize(first) @ normalize(second).T
    rows, columns = linear_sum_assignment(-cosine)
    return float(cosine[rows, columns].mean())


def _sampled_queries(trace: Trace, analysis: Analysis, head: Head) -> dict[str, Array]:
    """Directions of up to 200 generating queries of a head by space; nothing where there are too few."""
    layer, kv_head, group = head
    recorded = trace.head(layer, kv_head)
    positions = np.arange(max(0, trace.prompt_length - 1), trace.length)
    positions = positions[np.isfinite(recorded.query[positions, group]).all(axis=1)]
    if len(positions) > _QUERIES:
        random = np.random.default_rng([analysis.options.seed, *head])
        positions = np.sort(random.choice(positions, _QUERIES, replace=False))
    return spaces(trace, recorded, group, positions) if len(positions) > 2 else {}


def _by_length(analyses: Sequence[Analysis]) -> list[dict[str, Any]]:
    """Rate of revisits by tokens generated so far, in bins that double."""
    generated, flagged = [], []
    for analysis in analyses:
        steps = analysis.tokens[analysis.tokens["p"].notna()]
        generated.append(steps["position"].to_numpy() - analysis.summary["prompt_length"] + 1)
        flagged.append(steps["revisit"].to_numpy(np.bool_))
    so_far, revisit = np.concatenate(generated), np.concatenate(flagged)
    rows = []
    start, stop = 0, 128
    while len(so_far) and start <= so_far.max():
        inside = (so_far >= start) & (so_far < stop)
        if inside.any():
            count, revisits = int(inside.sum()), int(revisit[inside].sum())
            interval = binomtest(revisits, count).proportion_ci(method="wilson")
            rows.append(
                {
                    "from": start,
                    "to": stop - 1,
                    "steps": count,
                    "revisits": revisits,
                    "rate": revisits / count,
                    "low": float(interval.low),
                    "high": float(interval.high),
                }
            )
        start, stop = stop, 2 * stop
    return rows


def _verdict(pairs: list[dict[str, Any]], by_length: list[dict[str, Any]]) -> str:
    overlap = [pair["overlap"] for pair in pairs if pair["overlap"] is not None]
    ami = [pair["ami"] for pair in pairs if pair["ami"] is not None]
    same_heads = (
        "No two traces have revisiting heads to compare."
        if not overlap
        else f"{'The same' if np.mean(overlap) >= _STABLE else 'Not the same'} heads revisit: "
        f"{100 * np.mean(overlap):.0f} % of those of either trace are shared on average."
    )
    same_clusters = (
        "No head has enough queries of one size in two traces to compare their clusters."
        if not ami
        else f"Clusters of queries are {'' if np.mean(ami) >= _STABLE else 'not '}stable over traces: adjusted mutual "
        f"information {np.mean(ami):.2f} on average, where 1 is the same and 0 unrelated."
    )
    often = [row["from"] for row in by_length if row["low"] > _FALSE_ALARMS]
    since = (
        "At no length are revisits surely more than noise (one step in twenty)."
        if not often
        else f"Revisits are surely more than noise (one step in twenty) from "
        f"{f'{often[0]:,} generated tokens on' if often[0] else 'the first generated tokens on'}."
    )
    return f"{same_heads} {same_clusters} {since}"
