"""The demo: record, analyze, replay and report on the bundled model, from one command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import beaconscope


@pytest.mark.slow
def test_the_demo_goes_the_whole_way_and_says_what_it_found(run, tmp_path: Path) -> None:
    # WHEN the demo runs
    folder = tmp_path / "the demo"
    result = run("demo", "--size", "250", "--output", folder)
    assert result.exit_code == 0, result.output
    # THEN the model is right with everything at hand
    found = {line.split("  ")[0]: line for line in result.stdout.splitlines() if not line.startswith(" ")}
    assert "right" in found["full cache"]
    # and nothing of what the task looks for escapes the analysis
    words = found["revisits"].split()
    seen, looks = (int(words[words.index("found:") + number]) for number in (1, 4))
    assert looks > 10
    assert seen >= 0.95 * looks
    # and the report is there, and both traces are whole
    assert (folder / "report.html").stat().st_size > 100_000
    for name in ("full", "beacon"):
        assert beaconscope.load_trace(folder / f"{name}.parquet").whole
    # and the commands it names are commands that a user can run
    shown = result.stderr.replace("\\\n", " ")
    commands = [shlex.split(line[2:]) for line in shown.splitlines() if line.startswith("$ ")]
    assert [command[1] for command in commands] == ["record", "record", "analyze", "replay", "report"]
    again = run(*commands[2][1:], "--force")
    assert again.exit_code == 0, again.output
    # AND a second demo does not overwrite it
    second = run("demo", "--size", "250", "--output", folder)
    assert second.exit_code == 1
    assert "--force" in second.stderr


def test_a_command_that_fails_ends_the_demo_with_its_words(run, tmp_path: Path) -> None:
    # GIVEN a folder in which the name of a recording is taken by a folder
    folder = tmp_path / "demo"
    (folder / "full.parquet").mkdir(parents=True)
    # WHEN the demo runs
    result = run("demo", "--size", "250", "--output", folder, "--force", "--quiet")
    # THEN it says so, in one line
    assert result.exit_code != 0
    assert result.stderr.startswith("error: ")
    assert "full.parquet" in result.stderr
