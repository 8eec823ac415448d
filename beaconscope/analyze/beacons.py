"""How well the recorded beacons stand for the queries."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from beaconscope.analyze.events import Events
from beaconscope.analyze.heads import busiest_heads
from beaconscope.analyze.options import AnalyzeOptions
from beaconscope.trace import Trace

_COLUMNS = [
    "layer", "kv_head", "query_head", "changes", "mean_distance", "largest_distance", "mean_over_time",
    "largest_over_time", "churn", "load_balance", "returns", "same_beacon", "same_beacon_by_chance",
]  # fmt: skip
_TIMES = 8
"""Parts of the trace over which coverage is given."""
_APART = 8
"""Steps between two looks at a place that make the second a return."""


def beacon_rows(
    trace: Trace, heads: pd.DataFrame, events: Events, head_of: npt.NDArray[np.int64], options: AnalyzeOptions
) -> pd.DataFrame:
    """Coverage, churn, load and foresight of the beacons of the busiest heads; one row per query head that has any.

    ``events`` are the global queries of all heads, and ``head_of`` the row of ``heads`` of each.
    """
    rows: list[dict[str, Any]] = []
    for number, info in busiest_heads(heads, options.cluster_heads).iterrows():
        layer, kv_head, group = int(info["layer"]), int(info["kv_head"]), int(info["query_head"])
        changes = trace.beacons(layer, kv_head)
        changes = changes[changes["query_head"] == group]
        if changes.empty:
            continue
        head = trace.head(layer, kv_head)
        distance = 1.0 - head.beacon_similarity[:, group].astype(np.float64)
        known = np.flatnonzero(~np.isnan(distance))
        parts = [part for part in np.array_split(known, _TIMES) if len(part)]
        identity = _identities(changes, head.beacon[:, group], trace.length)
        mine = np.flatnonzero(head_of == number)
        returns, same, chance = _returns(events.step[mine], events.center[mine], identity, options.agree_within)
        rows.append(
            {
                "layer": layer,
                "kv_head": kv_head,
                "query_head": group,
                "changes": int(changes["position"].nunique()),
                "mean_distance": float(distance[known].mean()) if len(known) else np.nan,
                "largest_distance": float(distance[known].max()) if len(known) else np.nan,
                "mean_over_time": [float(distance[part].mean()) for part in parts],
                "largest_over_time": [float(distance[part].max()) for part in parts],
                "churn": _churn(changes),
                "load_balance": _balance(identity),
                "returns": returns,
                "same_beacon": same,
                "same_beacon_by_chance": chance,
            }
        )
    return pd.DataFrame(rows, columns=_COLUMNS)


def _identities(changes: pd.DataFrame, beacon: npt.NDArray[np.int16], length: int) -> npt.NDArray[np.int64]:
    """Which beacon each query fell to, [T]: its source, or -2 - index for a centroid; -1 for none."""
    identity = np.full(length, -1, np.int64)
    at = changes["position"].unique().tolist()
    for position, end in zip(at, [*at[1:], length - 1], strict=True):
        source = changes.loc[changes["position"] == position, "source"].to_numpy(np.int64)
        names = np.where(source >= 0, source, -2 - np.arange(len(source)))
        rows = slice(position + 1, end + 1)
        index = beacon[rows].astype(np.int64)
        ok = (index >= 0) & (index < len(names))
        identity[rows] = np.where(ok, names[np.where(ok, index, 0)], -1)
    return identity


def _churn(changes: pd.DataFrame) -> float:
    """Mean share of beacons that a change replaced by others; nan with fewer than two changes or for centroids."""
    sets = [set(part["source"]) for _, part in changes.groupby("position", sort=True)]
    new = [len(after - before) / len(after) for before, after in itertools.pairwise(sets) if -1 not in after]
    return float(np.mean(new)) if new else float("nan")


def _balance(identity: npt.NDArray[np.int64]) -> float:
    """Normalised entropy of how many queries fall to each beacon: 1 where all get as many."""
    count = np.unique(identity[identity != -1], return_counts=True)[1]
    if len(count) < 2:
        return float("nan")
    share = count / count.sum()
    return float(-(share * np.log(share)).sum() / np.log(len(count)))


def _returns(
    step: npt.NDArray[np.int64], center: npt.NDArray[np.int64], identity: npt.NDArray[np.int64], within: int
) -> tuple[int, float, float]:
    """Whether a look back at a place seen before falls to the beacon of the earlier looks.

    Returns
    -------
    returns, same, chance
        Looks at a place that an earlier event (at least eight steps before) looked at; the share of them whose beacon
        is the one most of those fell to; and the mean share of all earlier queries that fell to that beacon.
    """
    same, chance = [], []
    for at, place in zip(step.tolist(), center.tolist(), strict=True):
        if identity[at] == -1:
            continue
        before = step[(step <= at - _APART) & (np.abs(center - place) <= within)]
        known = [int(identity[s]) for s in before if identity[s] != -1]
        if not known:
            continue
        usual = Counter(known).most_common(1)[0][0]
        same.append(identity[at] == usual)
        earlier = identity[:at]
        chance.append(float((earlier == usual).sum() / max(1, (earlier != -1).sum())))
    if not same:
        return 0, float("nan"), float("nan")
    return len(same), float(np.mean(same)), float(np.mean(chance))
