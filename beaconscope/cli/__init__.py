"""The command line: one module per command, options in, one call, words out."""

from __future__ import annotations

import io
import sys

import typer

from beaconscope.cli.analyze import analyze
from beaconscope.cli.demo import demo
from beaconscope.cli.errors import Command
from beaconscope.cli.figures import figures
from beaconscope.cli.info import info
from beaconscope.cli.options import Version
from beaconscope.cli.policies import policies
from beaconscope.cli.record import record
from beaconscope.cli.recover import recover
from beaconscope.cli.replay import replay
from beaconscope.cli.report import report

app = typer.Typer(
    name="beaconscope",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _top(version: Version = False) -> None:
    """Show where a chain of thought goes back to, and what a KV cache must keep for it."""


for _command in (demo, record, analyze, replay, report, figures, info, recover, policies):
    app.command(cls=Command)(_command)


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a letter of a trace shows a question mark for it.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()
