"""``beaconscope analyze``: tables that fit, JSON, a file, a comparison, and errors in one line."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from rich.cells import cell_len

from beaconscope.analyze import SCHEMA_VERSION
from tests.analyze.made import Plan, plant

FAST = ("--cluster-heads", "0", "--shifts", "20")


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    plan = Plan(length=300, strength=18, rate=0.08)
    return [plant(folder / f"{seed}.parquet", plan, seed).path for seed in range(2)]


def test_tables_fit_80_columns_and_nothing_is_written(run, here, traces):
    result = run("analyze", traces[0], "--cluster-heads", "1", "--clusters", "2", "--cluster-queries", "20")
    assert result.exit_code == 0, result.output
    assert max(cell_len(line) for line in result.stdout.splitlines()) <= 80
    for title in ("Verdict", "Thought-revisiting tokens", "Most revisited sentences", "Heads", "Clusters of queries"):
        assert title in result.stdout
    assert [path.name for path in here.iterdir()] == ["plan.txt"]


def test_json_is_versioned_and_has_no_nan(run, traces):
    result = run("analyze", traces[0], *FAST, "--json")
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert (found["schema"], found["schema_version"]) == ("beaconscope.analysis", SCHEMA_VERSION)
    assert found["summary"]["revisits"] == len(found["revisits"]) > 0
    assert found["verdict"]["answer"] == "not asked"


def test_output_holds_one_row_per_token_and_is_not_overwritten(run, here, traces):
    assert run("analyze", traces[0], *FAST, "-q", "-o", "a.parquet").exit_code == 0
    frame = pd.read_parquet("a.parquet")
    assert len(frame) == 300
    assert {"position", "revisit", "q", "distant_share", "lost_share"} <= set(frame.columns)
    again = run("analyze", traces[0], *FAST, "-q", "-o", "a.parquet")
    assert again.exit_code == 1
    assert "--force" in again.stderr
    assert run("analyze", traces[0], *FAST, "-q", "-f", "-o", "a.parquet").exit_code == 0


def test_with_a_model_what_is_done_is_said_and_no_bar_of_a_library_is_shown(start, here, traces, model_folder):
    # The bars that the library shows of a GGUF file look at the environment when they are imported, and not again.
    script = (
        "import sys; from beaconscope.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "from tqdm.auto import tqdm; print(tqdm([1]).disable)"
    )
    process = start("analyze", traces[0], *FAST, "--causal", "--model", model_folder, script=script, cwd=here)
    out, err = process.communicate()
    assert err == (
        f"Loading {model_folder}.\nFeeding it the text again, each sentence blind to what is far back and not blind.\n"
    )
    assert "Does it matter?" in out
    assert out.splitlines()[-1] == "True"


def test_several_traces_are_compared(run, traces):
    result = run("analyze", *traces, *FAST)
    assert result.exit_code == 0, result.output
    assert "Same heads?" in result.stdout
    assert max(cell_len(line) for line in result.stdout.splitlines()) <= 80
    found = json.loads(run("analyze", *traces, *FAST, "--json").stdout)
    assert found["schema"] == "beaconscope.comparison"
    assert found["pairs"][0]["overlap"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["no.parquet"], 1, "does not exist"),
        (["{trace}", "--focus", "1000"], 2, "focus 1000"),
        (["{trace}", "--layers", "9"], 2, "layers"),
        (["{trace}", "{trace}", "-o", "x.parquet"], 2, "one trace"),
        (["{trace}", "-o", "{trace}", "-f"], 2, "the trace itself"),
    ],
)
def test_errors_are_one_line(run, here, traces, arguments, code, words):
    result = run("analyze", *[str(traces[0]) if word == "{trace}" else word for word in arguments])
    assert result.exit_code == code
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
