"""The options that every command has, or many do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

COMMON = "Common options"


def _print_version(wanted: bool) -> None:
    if wanted:
        from beaconscope import __version__

        typer.echo(f"beaconscope {__version__}")
        raise typer.Exit


Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="PATH", help="Where to write.", rich_help_panel=COMMON),
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite what is there.", rich_help_panel=COMMON)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.", rich_help_panel=COMMON)]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say more, and show the traceback of an error.", rich_help_panel=COMMON)
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=COMMON)]
Version = Annotated[
    bool,
    typer.Option(
        "--version",
        help="Print the version and exit.",
        callback=_print_version,
        is_eager=True,
        rich_help_panel=COMMON,
    ),
]
