"""The commands `report` and `figures`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from beaconscope.analyze import analyze
from beaconscope.cli import app
from tests.report.made import QUICK, Page, made_trace

CLI = CliRunner()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trace and its analysis."""
    folder = tmp_path_factory.mktemp("cli")
    trace = made_trace(folder / "made.parquet")
    return trace.path, analyze(trace, QUICK).save(folder / "analysis.parquet")


def run(*arguments: Any) -> Any:
    return CLI.invoke(app, [str(argument) for argument in arguments])


def test_a_report_is_written_and_said(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, analysis = files
    page = tmp_path / "page.html"
    done = run("report", trace, "--analysis", analysis, "--umap-heads", 0, "--title", "<b>Mine</b>", "-o", page)
    assert done.exit_code == 0, done.output
    assert f"Wrote {page}" in done.stdout
    html = page.read_text(encoding="utf-8")
    assert "&lt;b&gt;Mine&lt;/b&gt;" in html
    assert Page(html).plain["trace"]["length"] == 90
    refused = run("report", trace, "--analysis", analysis, "-o", page)
    assert refused.exit_code == 1
    assert "--force" in refused.stderr


def test_it_is_opened_where_that_is_asked_for(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, analysis = files
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    page = tmp_path / "a page.html"
    for more in ([], ["--open", "--force"]):
        done = run("report", trace, "--analysis", analysis, "--umap-heads", 0, "-o", page, *more)
        assert done.exit_code == 0, done.output
    assert opened == [page.resolve().as_uri()]


def test_figures_are_written(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, analysis = files
    folder = tmp_path / "figures"
    done = run("figures", trace, "--analysis", analysis, "-o", folder)
    assert done.exit_code == 0, done.output
    assert {path.name for path in folder.iterdir()} >= {"overview.svg", "attention.svg", "heads.svg", "beacons.svg"}
    assert run("figures", trace, "--analysis", analysis, "-o", folder).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-size", "much"], "10MB"),
        (["--max-size", "10"], "4 MB"),
        (["--analysis", "ANALYSIS", "--analysis", "ANALYSIS"], "one for each"),
        (["-o", "TRACE"], "--output"),
        (["TRACE", "TRACE"], "one or two"),
    ],
)
def test_impossible_options_are_refused(files: tuple[Path, Path], arguments: list[str], said: str) -> None:
    trace, analysis = files
    given = [{"TRACE": str(trace), "ANALYSIS": str(analysis)}.get(each, each) for each in arguments]
    done = run("report", trace, *given)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_is_no_replay_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, analysis = files
    done = run("report", trace, "--analysis", analysis, "--replay", trace, "-o", tmp_path / "page.html")
    assert done.exit_code == 1
    assert "is no replay" in done.stderr


@pytest.mark.parametrize("command", ["report", "figures"])
def test_help_loads_nothing_heavy(command: str) -> None:
    script = (
        f"import sys; from beaconscope.cli import app; app(['{command}', '--help'], standalone_mode=False); "
        "print([name for name in ('torch', 'transformers', 'pandas', 'jinja2', 'plotly') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
