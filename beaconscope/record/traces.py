"""Where the traces of many prompts go, which of them are there, and which prompts run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from beaconscope.errors import BeaconScopeError, UsageError
from beaconscope.progress import Note
from beaconscope.record.prompts import Prompt, names_a_file
from beaconscope.trace import journal_path, load_trace


def find_unfinished(
    prompts: Sequence[Prompt], folder: Path, *, force: bool, note: Note | None
) -> tuple[dict[str, Path], list[Prompt]]:
    """Where the trace of each prompt goes, by its id, and the prompts that have no whole trace there, or all by force.

    Raises
    ------
    UsageError
        For an id that cannot name a file, or two that name the same.
    BeaconScopeError
        When a file in a trace's place is none.
    """
    paths = _trace_paths(prompts, folder)
    unfinished = [prompt for prompt in prompts if force or not _is_finished(paths[prompt.id])]
    if note is not None and len(unfinished) < len(prompts):
        note(f"{len(prompts) - len(unfinished)} of {len(prompts)} prompts are recorded already and are skipped.")
    started = [
        prompt.id for prompt in unfinished if paths[prompt.id].exists() or journal_path(paths[prompt.id]).exists()
    ]
    if note is not None and started:
        note(f"Recorded anew, over what is there of them: {', '.join(started)}.")
    return paths, unfinished


def _trace_paths(prompts: Sequence[Prompt], folder: Path) -> dict[str, Path]:
    """Where the trace of each prompt goes, by its id."""
    paths: dict[str, Path] = {}
    taken: set[str] = set()
    for prompt in prompts:
        if not names_a_file(prompt.id):
            raise UsageError(
                f"the prompt id {prompt.id!r} cannot name a file; use letters, digits, dots, dashes and underscores"
            )
        # Two ids that differ in case alone would be one file on some disks.
        if prompt.id.casefold() in taken:
            raise UsageError(f"two prompts have the id {prompt.id!r}; give every prompt its own")
        taken.add(prompt.id.casefold())
        paths[prompt.id] = folder / f"{prompt.id}.parquet"
    return paths


def _is_finished(path: Path) -> bool:
    """Whether a whole trace is there; an interrupted one is not, and neither is a journal."""
    if not path.exists():
        return False
    try:
        return load_trace(path).whole
    except BeaconScopeError as error:
        raise BeaconScopeError(f"{error}; or give --force to replace what is there") from error


@contextmanager
def traces_folder(path: Path) -> Iterator[None]:
    """Make a folder; where it was not there before, leave none behind that holds nothing."""
    made = not path.exists()
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise BeaconScopeError(f"cannot make the folder {path} ({error.strerror}); give another output") from error
    try:
        yield
    finally:
        if made:
            with suppress(OSError):
                path.rmdir()


def prompt_batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Prompts that run together: ``size`` of them at most, and one with a completion of its own alone."""
    together: list[Prompt] = []
    for prompt in prompts:
        if prompt.completion is not None:
            yield [prompt]
            continue
        together.append(prompt)
        if len(together) == size:
            yield together
            together = []
    if together:
        yield together
