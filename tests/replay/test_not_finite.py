"""Traces whose queries, keys or values are not finite: what cannot be measured is missing, and said to be."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from beaconscope import BeaconKV, BeaconScopeError, Full, RandomEviction, StreamingLLM
from beaconscope.kv.policies import H2O, RPC, TOVA, ExpectedAttention, FastGen, Knorm, Longformer, Oracle, SnapKV
from beaconscope.replay import answer, by_setting, make_jobs, sweep, to_dict
from beaconscope.report import load_replay
from tests.record.recording import at_position, record_tiny, spoiled
from tests.tiny import tiny_model

PROMPT = 32
LENGTH = PROMPT + 40
AT = 50
"""Position of the first number that is not finite."""
ALONE = [
    Full(),
    StreamingLLM(budget=20),
    BeaconKV(budget=20, interval=6, beacons=3, recent=4),
    H2O(budget=20),
    SnapKV(budget=20, interval=6, window=4),
    Knorm(budget=20, interval=6),
    ExpectedAttention(budget=20, interval=6),
    Longformer(budget=20, global_tokens=2),
    RandomEviction(budget=20, interval=6, recent=2),
    FastGen(interval=6),
]
ORACLE = Oracle(budget=20, interval=6)
MEASURES = ["mass", "hit_rate", "output_error", "regrets", "regret_delay"]
PLACE = ["layer", "kv_head", "setting", "position"]


@pytest.fixture(scope="module")
def make_trace(tmp_path_factory):
    model = tiny_model()

    def make(*spoils):
        def spoil(block):
            for each in spoils:
                each(block)

        with spoiled(spoil):
            folder = tmp_path_factory.mktemp("t")
            return record_tiny(model, folder, policy=Full(), max_new_tokens=LENGTH - PROMPT)

    return make


@pytest.fixture(scope="module")
def whole(make_trace):
    return make_trace()


def replayed(trace, settings):
    return sweep(make_jobs(trace, settings, per_token=True))


CASES = {
    "a query": at_position("query", float("nan"), 0, AT, 1, 0, 3),
    "an infinite key": at_position("key", float("-inf"), 0, AT, 1, 2),
    "a value": at_position("value", float("nan"), 0, AT, 1, 0),
    "a key too large to be multiplied": at_position("key", 1e30, 0, AT, 1, 2),
}


@pytest.mark.parametrize("spoil", CASES.values(), ids=CASES)
def test_from_the_first_such_number_on_a_head_is_not_measured(spoil, whole, make_trace):
    settings = [*ALONE, ORACLE]
    expected, found = (replayed(trace, settings) for trace in (whole, make_trace(spoil)))
    before, after = (each.tokens.set_index(PLACE) for each in (expected, found))
    of_head = (after.index.get_level_values("layer") == 0) & (after.index.get_level_values("kv_head") == 1)
    late = after.index.get_level_values("position") >= AT
    # THEN nothing of the head is known from there on, whatever the setting
    assert after.loc[of_head & late, MEASURES].isna().all(axis=None)
    # AND everything else is what it is in the recording without that number
    rest = ~(of_head & late) & (after.index.get_level_values("setting") != "oracle:budget=20,interval=6")
    pd.testing.assert_frame_equal(after.loc[rest, MEASURES], before.loc[rest, MEASURES])
    rows = found.settings.set_index(["setting", "layer", "kv_head"])
    counted = found.settings.groupby(["layer", "kv_head"])[["queries", "missing"]].agg(set)
    assert counted.loc[(0, 1)].tolist() == [{AT - PROMPT}, {LENGTH - AT}]
    assert counted.drop(index=(0, 1))["missing"].tolist() == [{0}] * 3
    means = after[of_head & ~late].groupby("setting")[["mass", "regrets"]].mean()
    for setting, row in means.iterrows():
        np.testing.assert_allclose(rows.loc[(setting, 0, 1), ["mass", "regrets"]].astype(float), row, rtol=1e-5)


def test_the_oracle_stays_the_upper_bound_of_what_is_measured(make_trace):
    same = [BeaconKV(budget=20, interval=6, beacons=3, recent=4), Knorm(budget=20, interval=6), ORACLE]
    trace = make_trace(CASES["a query"])
    rows = replayed(trace, same).settings.set_index(["layer", "kv_head", "setting"])["mass"].unstack()
    assert (rows["oracle:budget=20,interval=6"] >= rows.drop(columns="oracle:budget=20,interval=6").max(axis=1)).all()


@pytest.mark.parametrize("policy", [TOVA(budget=20), RPC(period=8, recent=4)], ids=lambda policy: policy.name)
def test_where_heads_decide_together_all_heads_of_the_layer_are_missing(policy, whole, make_trace):
    settings = [policy, StreamingLLM(budget=20)]
    expected, found = (replayed(trace, settings) for trace in (whole, make_trace(CASES["a query"])))
    rows = found.settings
    # All settings are measured on the same queries.
    assert (rows.loc[rows["layer"] == 0, "queries"] == AT - PROMPT).all()
    assert (rows.loc[rows["layer"] == 1, "missing"] == 0).all()
    early = found.tokens["mass"].notna()
    pd.testing.assert_frame_equal(found.tokens.loc[early, MEASURES], expected.tokens.loc[early, MEASURES])


def test_a_head_that_is_never_finite_counts_for_nothing_and_is_named(make_trace, tmp_path):
    trace = make_trace(at_position("key", float("nan"), 1, 3, 0))
    settings = [Full(), StreamingLLM(budget=20), BeaconKV(budget=20, interval=6, beacons=3, recent=4), FastGen()]
    found = replayed(trace, settings)
    table = by_setting(found.settings).set_index("setting")
    rows = found.settings.set_index(["setting", "layer", "kv_head"])
    assert rows.loc[(slice(None), 1, 0), [*MEASURES]].isna().all(axis=None)
    # THEN means are over the three heads that are there, and no regrets are made of what is not known
    for name in ("streaming-llm:budget=20", "full"):
        there = [rows.loc[(name, *head), "mass"] for head in ((0, 0), (0, 1), (1, 1))]
        assert table.loc[name, "mass"] == pytest.approx(np.mean(there))
        assert (table.loc[name, "queries"], table.loc[name, "missing"]) == (3 * 40, 40)
        # What it holds does not depend on what the head looks for.
        assert table.loc[name, "kv_bytes"] == 4 * rows.loc[(name, 0, 0), "kv_bytes"]
    # AND what FastGen would have held of it is not known
    assert np.isnan(table.loc["fastgen", "kv_bytes"])
    assert not table.loc["fastgen", "pareto"]
    said = answer(found.settings, settings[1:])
    assert "Measured on 3 KV heads" in said.text
    assert said.text.endswith(
        "Left out, because recorded queries, keys or values are not finite from there on, in 1 of 4 KV heads: layer 1 "
        "head 0 (40 of 40 queries)."
    )
    plain = json.loads(json.dumps(to_dict(by_setting(found.settings), said), allow_nan=False))
    assert plain["missing"] == [
        {"trace": str(trace.path), "layer": 1, "kv_head": 0, "queries": 0, "missing": 40},
    ]


def test_nothing_to_measure_is_an_error(make_trace, tmp_path):
    trace = make_trace(*(at_position("query", float("nan"), layer, 0) for layer in (0, 1)))
    with pytest.raises(BeaconScopeError, match=r"no decoding query can be measured.*--dtype bfloat16"):
        sweep(make_jobs(trace, [StreamingLLM(budget=20)]), parts=tmp_path / "parts")
    assert not (tmp_path / "parts").exists()
    # One head of one layer is enough of a reason where no other was chosen.
    one = make_trace(at_position("query", float("nan"), 1, PROMPT, 1))
    with pytest.raises(BeaconScopeError, match="no decoding query can be measured"):
        sweep(make_jobs(one, [StreamingLLM(budget=20)], heads=[(1, 1)]))


def test_the_command_the_file_and_the_figure_say_what_is_missing(make_trace, run, here):
    trace = make_trace(CASES["a query"], at_position("hit_mass", float("nan"), 1, 40, 0, 0, 0))
    small = ("--budget", "20", "--interval", "6", "--recent", "4", "--beacons", "3", "--policy", "beacon,fastgen")
    result = run("replay", trace.path, *small, "-o", "r.parquet", "--per-token")
    assert result.exit_code == 0, result.output
    said = "1 of 4 KV heads: layer 0 head 1 (22 of 40 queries)."
    assert said in " ".join(result.stdout.split())
    replay = load_replay(here / "r.parquet")
    assert replay["missing"][0]["missing"] == LENGTH - AT
    assert said in replay["answer"]["text"]
    assert pd.read_parquet("r.tokens.parquet")["mass"].isna().any()
    figures = run("figures", trace.path, "--replay", "r.parquet", "-o", "figures")
    assert figures.exit_code == 0, figures.output
    assert "Queries of 1 KV heads are left out" in (here / "figures" / "tradeoff.svg").read_text()
