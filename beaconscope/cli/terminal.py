"""What a person sees while a command works: notes and a progress bar on stderr, results on stdout."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from beaconscope.files import valid_unicode
from beaconscope.progress import Progress


@dataclass(frozen=True)
class Terminal:
    """Says things, unless told to be quiet. Errors are no business of it."""

    quiet: bool = False
    verbose: bool = False

    def note(self, text: str) -> None:
        """Say something on the way, on stderr."""
        if not self.quiet:
            typer.echo(harmless(text), err=True)

    def detail(self, text: str) -> None:
        """Say something on the way that only ``--verbose`` shows."""
        if self.verbose:
            self.note(text)

    def wrote(self, path: Path, *next_command: str) -> None:
        """Say, last of all, what was written and which command comes next."""
        if self.quiet:
            return
        typer.echo(f"Wrote {harmless(str(path))}")
        if next_command:
            typer.echo(f"Next: {harmless(shlex.join(next_command))}")

    def table(self, rows: Iterable[tuple[str, str]]) -> None:
        """Show names and values on stdout, one pair a line; on a terminal long values are wrapped beside their name."""
        if self.quiet:
            return
        rows = [(printable(name), harmless(value)) for name, value in rows]
        console = Console()
        if not console.is_terminal:
            for name, value in rows:
                typer.echo(f"{name:<14}{value}".rstrip())
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="bold")
        # A long word such as a path is folded, not cut.
        grid.add_column(overflow="fold")
        for name, value in rows:
            grid.add_row(Text(name), Text(value))
        console.print(grid)

    def progress(self, what: str, unit: str) -> AbstractContextManager[Progress]:
        """Show a bar with rate and time left on stderr while the block runs; nothing where stderr is no terminal."""
        # Here, because it costs --help a tenth of its time.
        from beaconscope.cli.progress import progress_bar

        return progress_bar(what, unit, shown=not self.quiet)


def harmless(text: str) -> str:
    """Put a space for whatever would steer the terminal or turn the direction of text; line breaks stay."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in valid_unicode(text))


def printable(text: str) -> str:
    """Put text on one line and leave out what would steer the terminal."""
    return " ".join(harmless(text).split())


def quieten_libraries(terminal: Terminal) -> None:
    """Keep transformers and the hub's library to errors unless ``--verbose``, and bars to terminals.

    Call before they are imported.
    """
    if not terminal.verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if terminal.quiet or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
