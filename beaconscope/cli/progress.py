"""The progress bar: how far, how fast, how long still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.text import Text

from beaconscope.cli.terminal import printable
from beaconscope.progress import Progress


@contextmanager
def progress_bar(what: str, unit: str, *, shown: bool) -> Iterator[Progress]:
    """Show a bar on stderr while the block runs; nothing where stderr is no terminal or it is not ``shown``."""
    console = Console(stderr=True)
    columns = (
        # The name of a file may look like markup.
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(unit),
        TimeRemainingColumn(),
    )
    with ProgressBar(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(printable(what), total=None)

        def report(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total)

        yield report


class _Rate(ProgressColumn):
    """Units per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        """Show the rate, or a question mark before there is one."""
        rate = task.finished_speed or task.speed
        return Text("?" if rate is None else f"{rate:.1f} {self._unit}/s", style="progress.data.speed")
