"""Notes, results and the progress bar."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from beaconscope.cli import progress as module
from beaconscope.cli.terminal import Terminal


def test_the_last_lines_say_what_was_written_and_what_comes_next(capsys):
    Terminal().wrote(Path("a b.parquet"), "beaconscope", "info", "a b.parquet")
    assert capsys.readouterr().out == "Wrote a b.parquet\nNext: beaconscope info 'a b.parquet'\n"


def test_quiet_says_nothing(capsys):
    terminal = Terminal(quiet=True, verbose=True)
    terminal.note("note")
    terminal.detail("detail")
    terminal.wrote(Path("x.parquet"), "beaconscope", "info", "x.parquet")
    with terminal.progress("Recording", "tokens") as report:
        report(1, 2)
    assert capsys.readouterr() == ("", "")


def test_notes_go_to_stderr_and_details_only_when_verbose(capsys):
    Terminal().note("note")
    Terminal().detail("hidden")
    Terminal(verbose=True).detail("shown")
    assert capsys.readouterr() == ("", "note\nshown\n")


def test_the_bar_is_silent_where_stderr_is_no_terminal(capsys):
    with Terminal().progress("Recording", "tokens") as report:
        report(1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("total", [200, None])
def test_on_a_terminal_the_bar_shows_rate_and_time_left(monkeypatch, total):
    screen = io.StringIO()
    monkeypatch.setattr(
        module, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=100, color_system=None)
    )
    with Terminal().progress("Recording", "tokens") as report:
        for done in range(0, 101, 10):
            report(done, total)
    shown = screen.getvalue()
    assert "Recording" in shown
    assert "tokens/s" in shown
    assert ("100/200" if total else "100/?") in shown
