"""What a person sees of an error, whichever command raises it."""

import errno
from typing import Annotated, Literal

import pytest
import typer
from typer.testing import CliRunner

from beaconscope.cli.errors import Command
from beaconscope.cli.options import Verbose, Version
from beaconscope.errors import BeaconScopeError, UsageError


def run(error: BaseException, *arguments: str):
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command(cls=Command)
    def work(verbose: Verbose = False, version: Version = False) -> None:
        raise error

    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("error", "code"), [(BeaconScopeError("no such file; check it"), 1), (UsageError("bad; do"), 2)]
)
def test_one_line_on_stderr_and_an_exit_code(error, code):
    result = run(error)
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr == f"error: {error}\n"


def test_an_error_text_of_many_lines_still_is_one_line():
    assert run(BeaconScopeError("one\n  two\n")).stderr == "error: one two\n"


def test_verbose_adds_the_traceback_before_the_line():
    result = run(BeaconScopeError("no such file"), "-v")
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1] == "error: no such file"


def test_a_problem_of_the_system_names_the_file():
    result = run(OSError(errno.ENOSPC, "No space left on device", "trace.parquet"))
    assert result.exit_code == 1
    assert result.stderr == "error: trace.parquet: No space left on device; make room\n"


@pytest.mark.parametrize(
    ("interrupt", "says"),
    [(KeyboardInterrupt(), "stopped before it was done"), (KeyboardInterrupt("stopped; go on"), "stopped; go on")],
)
def test_ctrl_c_is_one_line_too(interrupt, says):
    result = run(interrupt)
    assert result.exit_code == 130
    assert result.stderr == f"error: {says}\n"


def test_a_value_that_is_none_of_the_choices_is_said_plainly():
    app = typer.Typer()

    @app.command(cls=Command)
    def work(size: Annotated[Literal["small", "large"], typer.Option()] = "small") -> None: ...

    result = CliRunner().invoke(app, ["--size", "300"])
    assert result.exit_code == 2
    assert "'300' is not one of 'small', 'large'" in " ".join(result.stderr.replace("│", " ").split())
    assert "Value error" not in result.stderr


def test_a_fault_of_the_program_keeps_its_traceback():
    result = run(ZeroDivisionError("bug"))
    assert isinstance(result.exception, ZeroDivisionError)


def test_every_command_says_the_version():
    result = run(AssertionError("not run"), "--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("beaconscope ")
