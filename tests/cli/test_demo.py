"""The demo: the bundled model under four caches, from one command."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import beaconscope
from beaconscope.cli import app


@pytest.mark.slow
def test_the_demo_records_and_says_what_was_lost(tmp_path: Path) -> None:
    # WHEN the demo runs
    folder = tmp_path / "demo"
    result = CliRunner().invoke(app, ["demo", "--size", "250", "--output", str(folder)])
    assert result.exit_code == 0, result.output
    # THEN the model is right with everything at hand, and had everything that it needed
    assert "100% of the" in next(line for line in result.stdout.splitlines() if line.startswith("full"))
    assert "right" in next(line for line in result.stdout.splitlines() if line.startswith("full"))
    # and every trace it names is whole
    for name in ("full", "beacon", "random", "streaming-llm"):
        assert beaconscope.load_trace(folder / f"{name}.parquet").whole
    # AND a second one does not overwrite it
    again = CliRunner().invoke(app, ["demo", "--size", "250", "--output", str(folder)])
    assert again.exit_code == 1
    assert "--force" in again.stderr
