"""What several traces have in common: the same heads, the same clusters, and from which length on revisits come."""

from __future__ import annotations

import numpy as np
import pytest

from beaconscope import AnalyzeOptions, analyze, load_trace
from beaconscope.analyze import compare
from tests.analyze.made import Plan, plant

FAST = AnalyzeOptions(cluster_heads=0, shifts=20)
PLAN = Plan(length=300, strength=18, rate=0.1)


def compared(folder, *made):
    """Compare traces made from (plan, seed, spoil)."""
    traces = []
    folder.mkdir(exist_ok=True)
    for number, (plan, seed, spoil) in enumerate(made):
        traces.append(load_trace(plant(folder / f"{number}.parquet", plan, seed, spoil=spoil).path))
    return compare(traces, [analyze(trace, FAST) for trace in traces])


def in_four_groups(query, key):
    """Make the queries of all heads one of four directions each, with a little noise."""
    random = np.random.default_rng(0)
    centre = np.random.default_rng(1).standard_normal((4, query.shape[-1]))
    query[:] = 5 * centre[random.integers(0, 4, query.shape[:-1])] + 0.1 * random.standard_normal(query.shape)


def test_the_same_heads_and_clusters_are_found_to_be_the_same(tmp_path):
    found = compared(tmp_path, (PLAN, 0, None), (PLAN, 1, None))
    assert found.pairs[0]["both"] == found.pairs[0]["either"] == 3
    assert found.text.startswith("The same heads revisit: 100 %")
    grouped = compared(tmp_path / "grouped", (PLAN, 0, in_four_groups), (PLAN, 1, in_four_groups))
    # Six clusters are asked of four groups, so that two groups are cut in some way of each trace's own.
    assert grouped.pairs[0]["ami"] > 0.8
    assert "Clusters of queries are stable" in grouped.text
    strangers = compared(tmp_path / "strangers", (PLAN, 0, None), (PLAN, 1, in_four_groups))
    assert strangers.pairs[0]["ami"] < 0.5
    assert "Clusters of queries are not stable" in strangers.text


def test_other_heads_are_told_apart_and_none_is_no_answer(tmp_path):
    def last_for_first(query, key):
        query[:], key[:] = query[:, ::-1].copy(), key[:, ::-1].copy()

    found = compared(tmp_path, (PLAN, 0, None), (PLAN, 1, last_for_first), (Plan(length=300, revisiting=0), 2, None))
    with_other, with_none = found.pairs[0], found.pairs[1]
    # Heads 0.0.0, 0.0.1 and 0.1.0 against 1.0.0, 1.0.1 and 1.1.0.
    assert (with_other["both"], with_other["either"], with_other["overlap"]) == (0, 6, 0.0)
    assert with_none["overlap"] is None
    assert found.text.startswith("Not the same heads revisit: 0 %")


def test_rates_by_length_count_every_step_once(tmp_path):
    found = compared(tmp_path, (PLAN, 0, None), (Plan(length=500, strength=18, rate=0.1), 1, None))
    assert [(row["from"], row["to"]) for row in found.by_length] == [(0, 127), (128, 255), (256, 511)]
    assert sum(row["steps"] for row in found.by_length) == sum(row["steps"] for row in found.traces)
    assert sum(row["revisits"] for row in found.by_length) == sum(row["revisits"] for row in found.traces)
    for row in found.by_length:
        assert row["low"] <= row["rate"] == row["revisits"] / row["steps"] <= row["high"]
    surely = next(row["from"] for row in found.by_length if row["low"] > 0.05)
    assert (f"from {surely} generated tokens on" if surely else "from the first generated tokens on") in found.text


@pytest.mark.filterwarnings("error")
def test_a_trace_of_one_token_can_be_compared(tmp_path):
    short = Plan(length=1, prompt_length=0, targets=1, least=1)
    found = compared(tmp_path, (PLAN, 0, None), (short, 0, None))
    assert found.pairs[0]["ami"] is None
    assert found.to_dict()["pairs"][0]["rank_correlation"] is None
