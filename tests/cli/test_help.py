"""The first thing a person tries: help, version, completion."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import beaconscope
from beaconscope.cli import app

COMMANDS = ("demo", "record", "analyze", "replay", "report", "figures", "info", "recover", "policies")
ALL_COMMANDS_HAVE = ("--quiet", "--verbose", "--version", "--help")


def test_help_lists_every_command(start):
    out, _ = start("--help").communicate()
    assert [command for command in COMMANDS if command not in out] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_neither_torch_nor_transformers_nor_pandas(command):
    script = (
        f"import sys; from beaconscope.cli import app; app(['{command}', '--help'], standalone_mode=False); "
        "print([name for name in ('torch', 'transformers', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_common_options(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    result = run(command, "--help")
    assert result.exit_code == 0
    assert [option for option in ALL_COMMANDS_HAVE if option not in result.stdout] == []


def test_the_options_of_record_are_grouped(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = run("record", "--help").stdout
    panels = ["Model", "Prompt", "Generation", "KV cache", "Trace", "Common options"]
    places = [out.index(f"─ {panel} ─") for panel in panels]
    assert places == sorted(places)


@pytest.mark.parametrize("arguments", [("--version",), ("record", "--version"), ("info", "--version")])
def test_version(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 0
    assert result.stdout == f"beaconscope {beaconscope.__version__}\n"


def test_no_command_shows_help_and_is_wrong_usage(run):
    result = run()
    assert result.exit_code == 2
    assert "Usage" in result.output


def test_an_unknown_option_is_wrong_usage(run):
    assert run("record", "--no-such-option").exit_code == 2


def test_no_color_is_honoured(start):
    out, _ = start("record", "--help", env={"NO_COLOR": "1", "FORCE_COLOR": "", "TERM": "xterm"}).communicate()
    assert "\x1b[3" not in out


def test_the_shell_completes_commands():
    result = CliRunner().invoke(
        app,
        [],
        prog_name="beaconscope",
        env={"_BEACONSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "beaconscope rec", "COMP_CWORD": "1"},
    )
    assert result.stdout.split() == ["record", "recover"]
