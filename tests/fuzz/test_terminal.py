"""Nothing that stands in a trace, a file's name or a model's text steers the terminal or is taken for markup."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from beaconscope.cli import app, main
from beaconscope.cli import progress as progress_module
from beaconscope.cli.errors import Command
from beaconscope.cli.terminal import Terminal
from beaconscope.errors import BeaconScopeError
from tests.report.made import HOSTILE, hostile_trace, made_trace

EVIL = "a\x1b[2J\x1b]0;title\x07 b\rc\x08\x9b31m \u202ed\u2066 [/bold][red]e[/]\x00\ud800"
NAME = "no" + EVIL.replace("\0", "").replace("\ud800", "\udc9b")
"""As the name of a file, of which the last byte is no UTF-8."""
STYLE = re.compile(r"\x1b\[[0-9;]*m")
"""What rich itself writes on a terminal."""


def assert_harmless(text: str) -> None:
    bare = STYLE.sub("", text)
    assert [letter for letter in bare if not letter.isprintable() and letter != "\n"] == []


def run(*arguments: str | Path, **environment: str) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of hostile tokens, prompt and metadata, of a hostile name."""
    path = tmp_path_factory.mktemp("evil") / "a[" / "bold]\x1b[2J\u202e.parquet"
    path.parent.mkdir()
    hostile_trace(path)
    return path


ON_A_TERMINAL = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "79"}
anywhere = pytest.mark.parametrize("environment", [{}, ON_A_TERMINAL], ids=["piped", "terminal"])


@anywhere
@pytest.mark.parametrize(
    "command",
    [("info",), ("info", "-v"), ("analyze", "--cluster-heads", "0", "--shifts", "20"), ("recover",)],
    ids=lambda command: " ".join(command[:2]),
)
def test_of_a_trace(trace: Path, command: tuple[str, ...], environment: dict[str, str]) -> None:
    result = run(command[0], trace, *command[1:], **environment)
    assert result.exit_code == 0, result.output
    assert_harmless(result.stdout)
    if environment:  # where a bar moves about
        assert [evil for evil in ("\x1b[2J", "\x1b]", "\x07", "\u202e", "\u2066") if evil in result.stderr] == []
    else:
        assert_harmless(result.stderr)


@pytest.mark.parametrize("command", [("info",), ("analyze", "--cluster-heads", "0", "--shifts", "20")])
def test_json_is_json(trace: Path, command: tuple[str, ...]) -> None:
    result = run(command[0], trace, *command[1:], "--json")
    assert result.exit_code == 0, result.output
    result.stdout.encode("ascii")
    json.loads(result.stdout, parse_constant=lambda name: pytest.fail(name))


def test_of_a_name_that_is_markup_in_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        progress_module,
        "Console",
        lambda stderr: Console(file=screen, force_terminal=True, width=120, color_system=None),
    )
    with Terminal().progress("Analyzing [/bold] \x1b]0;x\x07\u202e.parquet", "heads") as report:
        report(1, 2)
    assert "Analyzing [/bold]" in screen.getvalue()
    assert not {"\x07", "\u202e"} & set(screen.getvalue())


def test_of_notes_tables_and_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(verbose=True)
    terminal.note(f"first\n{EVIL}")
    terminal.detail(EVIL)
    terminal.table([(EVIL, EVIL)])
    terminal.wrote(Path(EVIL.replace("\0", "")), "beaconscope", EVIL)
    out, err = capsys.readouterr()
    assert_harmless(out)
    assert_harmless(err)
    assert "first\n" in err
    assert "[/bold][red]e[/]" in out


@pytest.mark.parametrize("error", [BeaconScopeError(EVIL), OSError(2, "x", EVIL)])
def test_of_errors(error: Exception) -> None:
    inner = typer.Typer(pretty_exceptions_enable=False)

    @inner.command(cls=Command)
    def work() -> None:
        raise error

    result = CliRunner().invoke(inner, [])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert_harmless(result.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ("record", "--model", "x", "--prompt", NAME),
        ("record", "--model", "x", "--prompts", "LINES"),
        ("record", "-q", "--model", f"./{NAME}", "--prompt", "LINES"),
        ("record", "--model", "x", "--prompt", "LINES", "--cache", NAME),
        ("replay", "TRACE", "--grid", "LINES"),
        ("replay", "TRACE", "--policy", "no\x1b[2J"),
        ("info", "LINES"),
    ],
)
def test_of_what_is_refused(trace: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    lines = tmp_path / "lines\x1b[2J"
    lines.write_text(json.dumps({"id": EVIL, "prompt": "x"}))
    names = {"LINES": str(lines), "TRACE": str(trace)}
    result = run(*(names.get(argument, argument) for argument in arguments))
    assert result.exit_code in (1, 2)
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert_harmless(result.stderr)
    assert result.stdout == ""


def test_a_terminal_that_cannot_show_a_letter_shows_a_question_mark(tmp_path, monkeypatch) -> None:
    trace = made_trace(tmp_path / "t.parquet", prompt="how many ☃?")
    screen = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.argv", ["beaconscope", "info", str(trace.path)])
    with pytest.raises(SystemExit) as end:
        main()
    screen.flush()
    assert end.value.code == 0
    assert b"how many ??" in screen.buffer.getvalue()


def test_the_hostile_tokens_are_hostile() -> None:
    texts = [token.decode("utf-8", "replace") for token in HOSTILE]
    assert any(not letter.isprintable() for text in texts for letter in text)
