"""Planted revisits are found where they are, and nothing is found where there is none."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest

from beaconscope import AnalyzeOptions, BeaconScopeError, UsageError, analyze, load_trace
from beaconscope.analyze.options import MOST_TARGETS
from beaconscope.analyze.places import spans
from beaconscope.analyze.revisits import find_revisits
from beaconscope.analyze.verdict import FEWEST
from tests.analyze.made import Plan, plant

FAST = AnalyzeOptions(cluster_heads=0, shifts=50)
STRONG = Plan(strength=18, rate=0.06)


def analysis_of(folder, plan=STRONG, seed=3, options=FAST, **how):
    made = plant(folder / "trace.parquet", plan, seed, **how)
    return made, analyze(load_trace(made.path), options)


def test_revisits_targets_heads_and_anchors_are_those_planted(tmp_path):
    made, found = analysis_of(tmp_path)
    first = found.summary["length"] - found.summary["steps"]
    wanted = {step for step, place in made.revisits.items() if step >= first and step - place > found.summary["window"]}
    assert wanted
    assert set(found.revisits["position"]) == wanted
    for row in found.revisits.itertuples():
        assert row.target_start <= made.revisits[row.position] < row.target_stop
        assert row.distance == row.position - (row.target_stop - 1)
        assert {"0.0.0", "0.0.1", "0.1.0"} >= set(row.heads)
    kinds = found.heads.set_index(["layer", "kv_head", "query_head"])["kind"]
    assert kinds[0, 0, 0] == kinds[0, 0, 1] == kinds[0, 1, 0] == "revisiting"
    assert (kinds.drop([(0, 0, 0), (0, 0, 1), (0, 1, 0)]) == "local").all()
    places = {int(found.anchors["start"].iloc[0]), *found.anchors["start"]}
    assert all(any(start <= place for start in places) for place in made.revisits.values())
    assert found.anchors["visits"].is_monotonic_decreasing
    assert [sink["position"] for sink in found.summary["sinks"]] == [0]


def test_a_sink_after_the_looks_back_changes_nothing_about_them(tmp_path, monkeypatch):
    made, alone = analysis_of(tmp_path)
    late = alone.summary["length"] - 1
    run = importlib.import_module("beaconscope.analyze.run")
    monkeypatch.setattr(run, "find_sinks", lambda attention, *_: [[0, late]] * attention.groups)
    again = analyze(load_trace(made.path), FAST)
    assert again.summary["sinks"][-1]["position"] == late
    assert list(again.revisits["position"]) == list(alone.revisits["position"])


@pytest.mark.parametrize("revisiting", [1, 2])
def test_one_head_that_does_all_the_looking_back_is_found(tmp_path, revisiting):
    made, found = analysis_of(tmp_path, Plan(strength=20, rate=0.08, revisiting=revisiting))
    first = found.summary["length"] - found.summary["steps"]
    wanted = {step for step, place in made.revisits.items() if step >= first and step - place > found.summary["window"]}
    got = set(found.revisits["position"])
    assert got <= wanted
    assert len(got) >= 0.9 * len(wanted)


@pytest.mark.parametrize("how", [{"plan": Plan(revisiting=0)}, {"plan": STRONG, "shuffled": True}])
@pytest.mark.parametrize("seed", range(2))
def test_a_trace_without_revisits_has_few(tmp_path, how, seed):
    _, found = analysis_of(tmp_path, seed=seed, **how)
    assert found.summary["revisit_rate"] <= 0.05
    assert found.summary["revisits"] < FEWEST


def test_the_same_seed_gives_the_same_bytes_whatever_runs_side_by_side(tmp_path):
    options = AnalyzeOptions(cluster_heads=2, cluster_queries=30, clusters=2, shifts=20, permutations=19)
    made = plant(tmp_path / "trace.parquet", STRONG)
    files = [
        analyze(load_trace(made.path), options, jobs=jobs).save(tmp_path / f"{jobs}.parquet").read_bytes()
        for jobs in (1, 3)
    ]
    assert files[0] == files[1]


def test_evicted_positions_are_reported_as_lost_and_missing_when_held(tmp_path):
    # GIVEN a cache that drops every target before most revisits
    gone = np.arange(8, 134, dtype=np.int32)
    made, found = analysis_of(tmp_path, evictions={150: gone})
    late = [step for step in found.revisits["position"] if step > 150]
    assert late
    # THEN attention is over everything by default, and says what was gone
    assert found.cache["evicts"]
    assert set(found.lost["position"]) == set(late)
    assert (found.lost["lost_share"] > 0.5).all()
    assert "full cache" in found.summary["attention"]
    # AND over what was held nobody looks at what was gone, nor is there a vertical score over missing positions
    held = analyze(load_trace(made.path), AnalyzeOptions(cluster_heads=0, over="held"))
    after = held.targets[held.targets["position"] > 150]
    assert not ((after["start"] >= 8) & (after["start"] < 134)).any()
    assert held.cache["revisit_lost"] in (0.0, None)
    assert "held" in held.summary["attention"]
    assert held.heads["kurtosis"].isna().all()


def test_the_shape_of_the_tables_is_the_same_for_traces_with_nothing(tmp_path):
    for length, prompt in ((1, 0), (1, 1), (40, 40), (3, 1)):
        plan = Plan(length=length, prompt_length=prompt, targets=1, least=1)
        path = tmp_path / f"{length}-{prompt}.parquet"
        plant(path, plan)
        found = analyze(load_trace(path), AnalyzeOptions())
        assert len(found.tokens) == length
        assert found.revisits.empty
        assert found.verdict["answer"] == "not enough"
        json.dumps(found.to_dict(), allow_nan=False)


def test_one_head_and_constant_queries(tmp_path):
    def constant(query, key):
        query[:] = 0.1

    _, found = analysis_of(tmp_path, Plan(layers=1, kv_heads=1, group=1), spoil=constant, options=AnalyzeOptions())
    assert found.revisits.empty
    assert found.clusters["reason"].tolist() == ["the queries are all alike"]
    json.dumps(found.to_dict(), allow_nan=False)


def test_what_is_not_finite_is_missing_and_counted(tmp_path):
    def spoil(query, key):
        query[250, 0, 0, 1] = np.nan
        key[5, 0, 0] = np.inf

    _, found = analysis_of(tmp_path, spoil=spoil)
    assert found.summary["missing_vectors"] == 2
    whole = analysis_of_unspoiled(tmp_path)
    assert len(set(found.revisits["position"]) ^ set(whole.revisits["position"])) <= 1
    assert np.isfinite(found.tokens["distant_share"]).all()


def test_a_trace_of_nothing_but_missing_queries_has_no_heads_of_any_kind(tmp_path):
    def spoil(query, key):
        query[:] = np.nan

    _, found = analysis_of(tmp_path, Plan(length=150), spoil=spoil, options=AnalyzeOptions())
    assert found.revisits.empty
    assert (found.heads["kind"] == "unknown").all()
    assert not found.heads["retrieves"].any()
    # Nothing is said of steps of which nothing is known.
    assert (found.summary["steps"], found.summary["revisit_rate"]) == (0, None)
    assert found.summary["missing_steps"] > 0
    assert found.verdict["text"].startswith("Not enough to tell: no step is known of all heads")
    names = ["p", "q", "distant_share", "distant_share_max"]
    assert found.tokens[names].isna().all(axis=None)
    assert found.heads[["event_rate", "distant_share", "retrieval"]].isna().all(axis=None)
    json.dumps(found.to_dict(), allow_nan=False)


def test_most_steps_are_revisits_if_the_options_say_so(tmp_path):
    open_to_all = AnalyzeOptions(
        cluster_heads=1, cluster_queries=20, clusters=2, min_z=0, min_rise=0, lone_share=0.3, lone_rate=1.0
    )
    _, found = analysis_of(tmp_path, Plan(strength=20, rate=1.0, revisiting=8), options=open_to_all)
    assert found.summary["revisit_rate"] > 0.5
    json.dumps(found.to_dict(), allow_nan=False)


def analysis_of_unspoiled(folder):
    made = plant(folder / "whole.parquet", STRONG, 3)
    return analyze(load_trace(made.path), FAST)


def test_heads_that_all_look_back_at_every_step_are_no_revisits(tmp_path):
    _, found = analysis_of(tmp_path, Plan(strength=18, rate=1.0, revisiting=8))
    assert found.summary["revisit_rate"] <= 0.05
    assert (found.heads["distant_share"] > 0.5).all()
    assert (found.heads["kind"] == "long-range").all()


def test_layers_and_heads_can_be_chosen(tmp_path):
    made, found = analysis_of(tmp_path, options=AnalyzeOptions(layers="1", heads="0", cluster_heads=0))
    assert found.heads[["layer", "kv_head"]].drop_duplicates().to_numpy().tolist() == [[1, 0]]
    with pytest.raises(UsageError, match="layers '3'"):
        analyze(load_trace(made.path), AnalyzeOptions(layers="3"))


@pytest.mark.parametrize(
    "wrong", [{"min_share": 0.0}, {"window": 0}, {"focus": MOST_TARGETS + 1}, {"over": "all"}, {"fdr": 1.5}]
)
def test_impossible_options_are_refused(wrong):
    with pytest.raises(BeaconScopeError):
        AnalyzeOptions(**wrong)


def test_fewer_than_one_job_is_refused(tmp_path):
    made = plant(tmp_path / "t.parquet", Plan(length=100))
    with pytest.raises(UsageError, match="jobs is 0"):
        analyze(load_trace(made.path), FAST, jobs=0)


def events(*rows):
    head, step, center = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return head, step, center, np.zeros(len(head), np.bool_)


def test_heads_that_fire_together_more_than_by_chance_make_a_revisit():
    # GIVEN four heads that fire once in 100 steps, all at step 50, and far apart
    found = find_revisits(*events(*[(h, 50, 100 * h) for h in range(4)]), range(0, 100), FAST)
    assert found.steps.tolist() == [50]
    assert found.reason[50] == "together"
    # THEN the p-value is twice that of four trials of 1 % each
    assert found.p[50] == pytest.approx(2 * 0.01**4)


def test_heads_that_fire_often_and_apart_are_noise():
    rows = [(h, s, 37 * (h + s)) for h in range(4) for s in range(h, 100, 4)]
    assert not find_revisits(*events(*rows), range(0, 100), FAST).flagged.any()


def test_spans_hold_what_they_promise():
    position, mass = np.array([3, 4, 5, 40, 90]), np.array([0.3, 0.2, 0.3, 0.15, 0.05])
    assert spans(position, mass, 1.0, 0.8) == [(3, 6, pytest.approx(0.8))]
    assert spans(position, mass, 1.0, 0.9) == [(3, 6, pytest.approx(0.8)), (40, 41, pytest.approx(0.15))]
