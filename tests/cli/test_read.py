"""``beaconscope info`` and ``beaconscope recover``."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from beaconscope import load_trace
from beaconscope.cli.info import _timing
from tests.waiting import wait_for

PROMPT = "Plan: [bold]add\x1b[31m, then double."
# A byte is a token; the chat template adds who speaks, a line break and two marks.
PROMPT_TOKENS = len(PROMPT) + 4


@pytest.fixture(scope="module")
def recorded(run, tmp_path_factory, model_folder) -> bytes:
    """The bytes of a small trace."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "p.txt").write_text(PROMPT, encoding="utf-8")
    result = run(
        *("record", "--model", model_folder, "--prompt", folder / "p.txt", "--max-new-tokens", "12"),
        *("--budget", "16", "--interval", "8", "--recent", "4", "-o", folder / "t.parquet"),
    )
    assert result.exit_code == 0, result.output
    return (folder / "t.parquet").read_bytes()


@pytest.fixture
def trace(here, recorded) -> Path:
    path = Path("t.parquet")
    path.write_bytes(recorded)
    return path


def test_info_says_what_a_trace_holds(run, trace):
    result = run("info", trace)
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["trace"].startswith("t.parquet, ")
    assert "41,632 parameters" in lines["model"]
    assert lines["tokens"] == f"{PROMPT_TOKENS + 12} ({PROMPT_TOKENS} prompt, 12 answer)"
    assert lines["cache"].startswith("beacon: budget=16, interval=8")


def test_what_comes_from_a_trace_steers_no_terminal_and_is_no_markup(run, trace):
    out = run("info", trace).stdout
    assert "\x1b" not in out
    assert "[bold]add" in out


def test_info_as_json_is_the_whole_summary(run, trace):
    result = run("info", "--json", trace)
    summary = json.loads(result.stdout)
    assert summary["path"] == "t.parquet"
    assert summary["policy"]["params"]["budget"] == 16
    assert summary["whole"] is True


def test_info_says_more_when_verbose(run, trace):
    out = run("info", "-v", trace).stdout
    assert "max_new_tokens=12" in out
    assert "transformers" in out


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("decode_seconds", 7632.4, "decode 7,632 s"),
        ("prefill_seconds", 0.01234, "prefill 0.0123 s"),
        ("tokens_per_second", 999.7, "tokens per second 1,000"),
    ],
)
def test_timings_are_numbers_as_people_write_them(name, value, said):
    assert _timing(name, value) == said


def test_info_writes_nothing(run, trace, here):
    before = {path.name: path.stat().st_mtime_ns for path in here.iterdir()}
    run("info", trace)
    assert {path.name: path.stat().st_mtime_ns for path in here.iterdir()} == before


@pytest.mark.parametrize("cut", [0, 3, 1000])
def test_a_trace_cut_in_the_middle_is_one_line(run, trace, recorded, cut):
    trace.write_bytes(recorded[:cut])
    result = run("info", trace)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["info", "recover"])
def test_what_is_no_trace_is_one_line(run, here, command):
    Path("folder").mkdir()
    for path in ("none.parquet", "plan.txt", "folder", "."):
        result = run(command, path)
        assert result.exit_code in (1, 2), path
        assert result.stderr.startswith("error: ")
        assert len(result.stderr.splitlines()) == 1


def test_a_finished_trace_needs_no_recovering(run, trace):
    result = run("recover", trace)
    assert result.exit_code == 0
    assert "nothing to recover" in result.stderr
    assert result.stdout == ""


def test_a_killed_recording_is_recovered(run, start, here, model_folder):
    # GIVEN a recording that was killed
    process = start("record", "--model", model_folder, "--prompt", "plan.txt", "-n", "4000", cwd=here)
    journal = here / "plan.parquet.journal"
    wait_for(lambda: _recording(journal), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not Path("plan.parquet").exists()
    # WHEN it is read, THEN the command that makes it is named
    for command in ("info", "analyze", "replay", "report"):
        assert "run `beaconscope recover plan.parquet`" in run(command, "plan.parquet").stderr
    # WHEN it is recorded again without a thought, the journal is not lost
    again = run("record", "--model", model_folder, "--prompt", "plan.txt", "-n", "8")
    assert again.exit_code == 1
    assert "recover" in again.stderr
    # WHEN it is recovered
    result = run("recover", "plan.parquet")
    # THEN there is a readable trace, marked as cut
    assert result.exit_code == 0, result.output
    assert result.stdout == "Wrote plan.parquet\nNext: beaconscope info plan.parquet\n"
    assert "marked as cut" in result.stderr
    found = load_trace("plan.parquet")
    assert not found.whole
    assert found.length > found.prompt_length
    assert not journal.exists()
    assert "cut" in run("info", "plan.parquet").stdout


def _recording(journal: Path) -> bool:
    """Tell whether every layer has been written to, and more than once."""
    streams = list(journal.glob("layer-*.arrows"))
    return len(streams) == 2 and all(path.stat().st_size > 200_000 for path in streams)
