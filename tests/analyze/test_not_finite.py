"""Traces whose queries and keys are not finite: what is not known is left out, and said to be."""

from __future__ import annotations

import json

import numpy as np
import pytest

from beaconscope import AnalyzeOptions, analyze, load_trace
from beaconscope.analyze import compare
from beaconscope.analyze.revisits import find_revisits
from tests.analyze.made import Plan, plant

FAST = AnalyzeOptions(cluster_heads=0, shifts=50)
PLAN = Plan(strength=18, rate=0.1)
SINCE = 300


def two_heads_break(query, key):
    """The first query heads of layer 1 are not finite from a position on, as when a model breaks down there."""
    query[SINCE:, 1, 0] = np.nan


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return analyze(load_trace(plant(tmp_path_factory.mktemp("t") / "whole.parquet", PLAN, 3).path), FAST)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    path = tmp_path_factory.mktemp("t") / "broken.parquet"
    return analyze(load_trace(plant(path, PLAN, 3, spoil=two_heads_break).path), FAST)


def test_steps_that_some_head_does_not_know_are_left_out_of_rates(whole, broken):
    gone = PLAN.length - SINCE
    assert broken.summary["missing_steps"] == gone
    assert broken.summary["steps"] == whole.summary["steps"] - gone
    late = broken.tokens["position"] >= SINCE
    assert broken.tokens.loc[late, ["p", "q"]].isna().all(axis=None)
    assert not broken.tokens.loc[late, "revisit"].any()
    flagged = int(broken.tokens["revisit"].sum())
    assert broken.summary["revisit_rate"] == pytest.approx(flagged / broken.summary["steps"])
    # What is known of them is that of the other heads.
    assert broken.tokens["distant_share"].notna().all()


def test_a_head_s_rates_are_those_of_the_steps_that_it_knows(whole, broken):
    key = ["layer", "kv_head", "query_head"]
    before, after = whole.heads.set_index(key), broken.heads.set_index(key)
    spoiled = [(1, 0, 0), (1, 0, 1)]
    rest = after.index.difference(spoiled)
    columns = ["steps", "events", "event_rate", "distant_share", "retrieval"]
    assert after.loc[rest, columns].equals(before.loc[rest, columns])
    steps = whole.summary["steps"]
    assert after.loc[spoiled, "steps"].tolist() == [steps - (PLAN.length - SINCE)] * 2
    assert (
        after.loc[spoiled, "event_rate"].tolist()
        == (after.loc[spoiled, "events"] / after.loc[spoiled, "steps"]).tolist()
    )


def test_what_is_missing_is_counted_by_head(broken, tmp_path):
    count = 2 * (PLAN.length - SINCE)
    assert broken.summary["missing"] == [{"layer": 1, "kv_head": 0, "queries": count, "keys": 0}]
    assert broken.summary["missing_vectors"] == count
    json.dumps(broken.to_dict(), allow_nan=False)


def test_known_steps_are_judged_as_if_they_were_all():
    # GIVEN four heads that fire together at step 50, of which every other step is known
    known = np.arange(100) % 2 == 0
    rows = [(h, 50, 100 * h) for h in range(4)] + [(0, 51, 5), (1, 51, 5)]
    head, step, center = (np.array(column) for column in zip(*rows, strict=True))
    found = find_revisits(head, step, center, np.zeros(len(head), bool), range(100), FAST, known)
    # THEN the p-value is twice that of four trials of one in the 50 steps that are known
    assert found.steps.tolist() == [50]
    assert found.p[50] == pytest.approx(2 * 0.02**4)
    assert np.isnan(found.p[~known]).all()
    assert np.isnan(found.q[~known]).all()
    assert found.heads[51] == 0
    # AND it is that of the known steps by themselves
    alone = find_revisits(head[:4], step[:4] // 2, center[:4], np.zeros(4, bool), range(50), FAST)
    for name in ("heads", "agree", "p", "q", "flagged", "reason"):
        assert getattr(found, name)[known].tolist() == getattr(alone, name).tolist()


def test_a_number_too_large_to_be_multiplied_is_missing(tmp_path, whole):
    def spoil(query, key):
        key[7, 0, 0, 3] = 1e30

    found = analyze(load_trace(plant(tmp_path / "t.parquet", PLAN, 3, spoil=spoil).path), FAST)
    assert found.summary["missing"] == [{"layer": 0, "kv_head": 0, "queries": 0, "keys": 1}]
    # A key is left out; its position is not attended to, and every step is known.
    assert found.summary["missing_steps"] == 0
    assert found.tokens["distant_share"].notna().all()


def test_a_comparison_is_over_what_both_know(tmp_path):
    def one_head_is_gone(query, key):
        query[:, 0, 0, 0] = np.inf

    made = [
        plant(tmp_path / f"{seed}.parquet", PLAN, seed, spoil=spoil)
        for seed, spoil in ((0, None), (1, one_head_is_gone))
    ]
    traces = [load_trace(each.path) for each in made]
    analyses = [analyze(trace, FAST) for trace in traces]
    found = compare(traces, analyses)
    # The rates of 7 heads can be compared.
    assert found.pairs[0]["rank_correlation"] is not None
    assert analyses[1].heads.set_index(["layer", "kv_head", "query_head"]).loc[(0, 0, 0), "kind"] == "unknown"
    # A head of which nothing is known takes no step from the others.
    assert found.traces[1]["missing_steps"] == 0
    assert [row["missing_vectors"] for row in found.traces] == [0, PLAN.length]


def test_the_terminal_says_what_is_missing(tmp_path, run):
    one = plant(tmp_path / "a.parquet", PLAN, 3, spoil=two_heads_break).path
    other = plant(tmp_path / "b.parquet", PLAN, 4).path
    options = ("--cluster-heads", "0")
    said = "200 queries or keys not finite and left out: layer 1 head 0 (200). "
    said += "100 steps left out, at which some head is not known."
    result = run("analyze", one, *options)
    assert result.exit_code == 0, result.output
    assert said in " ".join(result.stdout.split())
    both = run("analyze", one, other, *options)
    assert both.exit_code == 0, both.output
    assert f"a.parquet: {said}" in " ".join(both.stdout.split())
    assert "b.parquet:" not in both.stdout
