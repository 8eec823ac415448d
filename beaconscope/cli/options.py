"""The options that every command has, or many do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from beaconscope import engines
from beaconscope.errors import UsageError
from beaconscope.files import valid_unicode

COMMON = "Common options"
HEADS = "Layers and heads"
WORKERS = "Workers"


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

TraceFile = Annotated[Path, typer.Argument(readable=False, metavar="TRACE", help="A trace.")]
Layers = Annotated[str, typer.Option(metavar="LIST", help="Layers: all, 0,8,16 or 0-8:2.", rich_help_panel=HEADS)]
Heads = Annotated[str, typer.Option(metavar="LIST", help="KV heads, likewise.", rich_help_panel=HEADS)]
Engine = Annotated[
    engines.Engine,
    typer.Option(help="Processes here, or workers of a Dask or Ray cluster.", rich_help_panel=WORKERS),
]
Address = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Of the cluster's scheduler.", rich_help_panel=WORKERS)
]


def unicode_option(flag: str, text: str) -> str:
    """The text of an option; bytes that the locale did not decode are read as UTF-8.

    Raises
    ------
    UsageError
        For bytes that are not UTF-8 either.
    """
    try:
        return valid_unicode(text, "strict")
    except UnicodeError:
        raise UsageError(f"{flag} is not UTF-8; give it in UTF-8") from None
