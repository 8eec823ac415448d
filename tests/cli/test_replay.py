"""``beaconscope replay`` and ``beaconscope policies``."""

from __future__ import annotations

import json

import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from beaconscope.kv.policies import POLICIES, Full
from tests.record.recording import record_tiny
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    record_tiny(tiny_model(), folder, policy=Full(), max_new_tokens=80)
    return (folder / "t.parquet").read_bytes()


@pytest.fixture
def trace(here, recorded):
    path = here / "t.parquet"
    path.write_bytes(recorded)
    return path


SMALL = ("--budget", "24,40", "--interval", "8", "--recent", "4", "--beacons", "0,4")


def test_a_replay_ranks_settings_and_answers(run, trace):
    result = run("replay", trace, *SMALL)
    assert result.exit_code == 0, result.output
    tables = ("Budget 24", "Budget 40", "Pareto front", "oracle:interval=8", "beacon:budget=40, interval=8")
    for words in (*tables, "teacher-forced", "random eviction"):
        assert words in result.stdout
    assert [path.name for path in trace.parent.iterdir() if path.suffix == ".parquet"] == ["t.parquet"]


def test_the_result_is_json_and_a_file(run, trace):
    result = run("replay", trace, *SMALL, "--no-trt", "--json", "-o", "r.parquet", "--per-token", "--heads", "1")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["schema"] == "beaconscope.replay"
    assert printed["teacher_forced"] is True
    assert printed["ranked_by"] == "mass"
    by_name = {row["setting"]: row for row in printed["settings"]}
    assert by_name["full"]["mass"] == 1
    assert by_name["full"]["pareto"] is True
    assert by_name["random:budget=24,interval=8"]["seeds"] == 5
    frame = pd.read_parquet("r.parquet")
    assert set(frame["kv_head"]) == {1}
    assert frame.groupby("setting")["mass"].mean()["full"] == 1
    tokens = pd.read_parquet("r.tokens.parquet")
    assert tokens.groupby(["layer", "setting", tokens["seed"].fillna(0)]).size().eq(80).all()
    assert not (trace.parent / "r.parquet.parts").exists()


def test_an_analysis_can_be_handed_over(run, trace):
    assert run("analyze", trace, "-o", "a.parquet", "-q", "--cluster-heads", "0").exit_code == 0
    revisits = int(pd.read_parquet("a.parquet")["revisit"].sum())
    result = run("replay", trace, *SMALL, "--analysis", "a.parquet", "-o", "r.parquet")
    assert result.exit_code == 0, result.output
    # The page is to be of the same analysis.
    next_line = f"Next: beaconscope report {trace} --analysis a.parquet --replay r.parquet"
    assert result.stdout.splitlines()[-1] == next_line
    assert (pd.read_parquet("r.parquet")["trts"] == revisits).all()
    again = run("replay", trace, *SMALL, "-o", "s.parquet", "-q")
    assert again.exit_code == 0
    assert (pd.read_parquet("s.parquet")["trts"] == revisits).all()
    # WHEN it is of another text of the same length, THEN it is not taken
    table = pq.read_table("a.parquet")
    place = table.column_names.index("token_id")
    pq.write_table(table.set_column(place, "token_id", pc.add(table["token_id"], 1)), "b.parquet")
    refused = run("replay", trace, *SMALL, "--analysis", "b.parquet")
    assert refused.exit_code == 1
    assert f"b.parquet is of another text than {trace}" in refused.stderr


def test_a_budget_no_larger_than_what_a_policy_protects_by_default(run, trace):
    result = run("replay", trace, "--policy", "snapkv:window=8", "--budget", "32", "--interval", "8", "--no-trt")
    assert result.exit_code == 0, result.output
    assert "snapkv:budget=32,interval=8,window=8 keeps" in " ".join(result.stdout.split()).replace(", ", ",")


def test_a_budget_that_never_fills_is_said(run, trace):
    result = run("replay", trace, "--budget", "24,500", "--interval", "8", "--recent", "4", "--no-controls", "--no-trt")
    assert result.exit_code == 0, result.output
    assert result.stderr == (
        "Within 112 tokens beacon:budget=500,interval=8,recent=4 never fills and keeps everything; "
        "give a smaller --budget or --interval.\n"
    )


def test_a_grid_is_a_file(run, trace):
    (trace.parent / "grid.toml").write_text(
        '[[sweep]]\npolicy = ["beacon", "knorm"]\nbudget = [30, 50]\ninterval = 8\nrecent = 4\n'
    )
    result = run("replay", trace, "--grid", "grid.toml", "--no-controls", "--no-trt", "--json")
    assert result.exit_code == 0, result.output
    settings = {(row["policy"], row["budget"]) for row in json.loads(result.stdout)["settings"]}
    assert settings == {("beacon", 30), ("beacon", 50), ("knorm", 30), ("knorm", 50)}


def test_nothing_is_overwritten_and_a_stopped_sweep_is_not_lost(run, trace):
    (trace.parent / "r.parquet").write_text("mine")
    assert "--force" in run("replay", trace, *SMALL, "-o", "r.parquet").stderr
    assert (trace.parent / "r.parquet").read_text() == "mine"
    parts = trace.parent / "s.parquet.parts"
    parts.mkdir()
    result = run("replay", trace, *SMALL, "--no-trt", "-o", "s.parquet")
    assert result.exit_code == 1
    assert "--resume" in result.stderr
    assert run("replay", trace, *SMALL, "--no-trt", "-o", "s.parquet", "--resume", "-q").exit_code == 0
    assert not parts.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--policy", "beakon"), 2, "did you mean beacon"),
        (("--policy", "snapkv:windw=3"), 2, "did you mean window"),
        (("--budget", "10"), 2, "protects 16 (entries that always stay, as the most recent ones) and needs one more"),
        (("--budget", "x"), 2, "whole number"),
        (("--budget", ","), 2, "is empty"),
        (("--policy", "knorm", "--beacons", "4"), 2, "--beacons has no effect with knorm"),
        (("--grid", "none.toml"), 1, "does not exist"),
        (("--grid", "g.toml", "--budget", "30"), 2, "--grid holds all settings"),
        (("--layers", "7"), 2, "layers"),
        (("--resume",), 2, "--output"),
        (("--jobs", "0"), 2, "at least 1"),
        (("--address", "tcp://127.0.0.1:9"), 2, "--engine dask"),
        (("--policy", "oracle", "--live"), 2, "none of these settings works in a live cache"),
        (("--model", "tiny-reasoner"), 2, "--model goes with --live"),
        (("--engine", "dask", "--address", "127.0.0.1:9"), 1, "no Dask scheduler answers at 127.0.0.1:9"),
        (("--engine", "ray", "--address", "127.0.0.1:9"), 1, "no Ray cluster answers at 127.0.0.1:9"),
        (("--hits", "0"), 2, "at least 1"),
        (("--analysis", "t.parquet"), 1, "is no analysis"),
        (("-o", "nowhere/r.parquet"), 1, "does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(run, trace, arguments, code, words):
    trt = () if "--analysis" in arguments else ("--no-trt",)
    result = run("replay", "t.parquet", *arguments, *trt)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_output_errors_without_values_are_refused(run, here):
    record_tiny(tiny_model(), here, policy=Full(), max_new_tokens=20, values=False)
    result = run("replay", "t.parquet", *SMALL, "--no-trt", "--output-every", "4")
    assert result.exit_code == 2
    assert "needs values" in result.stderr
    assert run("replay", "t.parquet", *SMALL, "--no-trt", "-q").exit_code == 0


def test_the_best_settings_are_run_with_the_model(run, trace, model_folder):
    arguments = (
        "--policy",
        "beacon,streaming-llm",
        *SMALL[:4],
        "--no-controls",
        "--no-trt",
        "--live",
        "--model",
        model_folder,
    )
    result = run("replay", trace, *arguments, "--live-settings", "2", "-o", "r.parquet")
    assert result.exit_code == 0, result.output
    assert "Run with the model, against the full cache" in result.stdout
    printed = json.loads(run("replay", trace, *arguments, "--live-settings", "2", "--json").stdout)["live"]
    assert printed[0]["setting"] == "full"
    # The best of each budget.
    assert {each["setting"].partition(":")[2].partition(",")[0] for each in printed[1:]} == {"budget=24", "budget=40"}
    assert printed[0]["forced"]["kl"] == 0
    assert all(each["forced"]["kl"] > 0 for each in printed[1:])
    stored = json.loads(pq.read_schema("r.parquet").metadata[b"beaconscope.replay"])
    assert stored["live"] == printed


def test_a_setting_that_evicted_nothing_is_no_result(run, trace, model_folder):
    settings = ("--policy", "streaming-llm", "--budget", "24,500", "--no-controls", "--no-trt")
    result = run("replay", trace, *settings, "--live", "--model", model_folder)
    assert result.exit_code == 0, result.output
    (row,) = [line for line in result.stdout.splitlines() if line.endswith("-") and "budget=500" in line]
    assert row.split()[2:] == ["nothing", "evicted", "-", "-", "nothing", "evicted", "-"]
    assert "Nothing evicted: the text was too short" in result.stdout
    # THEN the answer is about what had to choose, though the other keeps everything
    assert "streaming-llm:budget=24 keeps" in result.stdout
    assert "streaming-llm:budget=500 keeps" not in result.stdout
    printed = json.loads(run("replay", trace, *settings, "--live", "--model", model_folder, "--json").stdout)
    assert [each["setting"] for each in printed["live"]] == [
        "full",
        "streaming-llm:budget=24",
        "streaming-llm:budget=500",
    ]
    assert [each["forced"]["evicted"] > 0 for each in printed["live"]] == [False, True, False]
    assert printed["live"][2]["forced"]["kl"] is printed["live"][2]["free"]["agreement"] is None
    assert printed["answer"]["best"] == "streaming-llm:budget=24"
    assert {row["setting"]: row["evicted"] > 0 for row in printed["settings"]} == {
        "streaming-llm:budget=24": True,
        "streaming-llm:budget=500": False,
    }


def test_where_nothing_evicts_anything_no_setting_wins(run, trace):
    result = run("replay", trace, "--policy", "beacon", "--budget", "500,600", "--no-trt", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)["answer"]
    assert answer["text"].startswith("None of these settings evicted anything, so all of them do what a full cache")
    assert (answer["best"], answer["beacon"], answer["differences"]) == (None, None, {})


@pytest.mark.parametrize(
    ("model", "words"), [("nowhere/model", "cannot load the model"), ("tiny-reasoner", "of another model")]
)
def test_a_model_that_cannot_be_run_is_said_before_the_sweep(run, trace, model, words, monkeypatch):
    monkeypatch.setattr("beaconscope.replay.sweep", None)
    result = run("replay", trace, *SMALL, "--no-trt", "--live", "--model", model)
    assert result.exit_code == 1
    assert words in result.stderr.splitlines()[-1]


def test_policies_are_listed_with_their_defaults(run):
    result = run("policies")
    assert result.exit_code == 0
    assert "snapkv: keeps a window" in result.stdout
    assert "window=32" in result.stdout
    listed = json.loads(run("policies", "--json").stdout)
    assert [policy["name"] for policy in listed] == list(POLICIES)
    assert next(policy for policy in listed if policy["name"] == "oracle")["live"] is False
