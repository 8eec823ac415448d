"""An interrupted recording becomes a trace."""

from __future__ import annotations

from pathlib import Path

from beaconscope.errors import BeaconScopeError
from beaconscope.progress import Progress
from beaconscope.trace.finalize import Refused, scan, write_trace
from beaconscope.trace.folder import SUFFIX, JournalFolder, journal_path
from beaconscope.trace.journal import check_target
from beaconscope.trace.reader import load_trace


def recover(path: Path, *, output: Path | None = None, force: bool = False, progress: Progress | None = None) -> Path:
    """Make a trace of what an interrupted recording left behind.

    Kept is what the tokens and every layer have: a common stretch from the first position on. The trace is marked as
    cut, with the reason, unless the recording itself had ended and only its file was missing. The journal is removed
    once the file is safely in place; until then nothing of it is touched, so this may be run again after any failure.

    Parameters
    ----------
    path : Path
        The output of the recording, or its journal.
    output : Path, optional
        Where to write; by default what the recording was to become.
    force : bool
        Replace an ``output`` that is another trace.
    progress : callable, optional
        Told the rows written and the rows in all.

    Returns
    -------
    Path
        The trace. Where there was nothing left to do, the one that is there.

    Raises
    ------
    BeaconScopeError
        Where there is nothing to recover, the recording still runs, or the disk refuses.
    """
    path = Path(path)
    if _is_journal(path):
        journal, recorded = path, path.with_name(path.name.removesuffix(SUFFIX))
    else:
        journal, recorded = journal_path(path), path
    target = Path(output) if output is not None else recorded
    if not journal.is_dir():
        return _without_journal(recorded, target, journal)

    folder = JournalFolder.lock(journal)
    try:
        if not folder.holds_recording():
            if recorded.exists():
                # The file was in place, and its journal as good as gone.
                load_trace(recorded)
                folder.remove()
                return _without_journal(recorded, target, journal)
            raise BeaconScopeError(f"{journal} holds no recording; nothing can be recovered, remove it")
        metadata, layout, ended = folder.read_metadata()
        if _is_recording(target, str(metadata["recording_id"])):
            # The file was in place already; only the journal was not gone yet.
            folder.remove()
            return target
        check_target(target, force=force)
        found = scan(folder, layout)
        if found.length == 0:
            raise BeaconScopeError(
                f"{journal} holds no token that every layer has; nothing can be recovered, record again with --force"
            )
        if not ended or found.length < found.longest:
            dropped = found.longest - found.length
            reason = f"the recording was interrupted after {found.length} tokens"
            if dropped:
                reason += f"; {dropped} more were incomplete and are left out"
            metadata |= {"whole": False, "cut_reason": metadata.get("cut_reason") or reason}
        try:
            write_trace(found, target, layout, metadata, progress)
        except Refused as error:
            raise BeaconScopeError(
                f"{error.what}; {journal} is as it was: {error.remedy} and run this again, "
                "or give --output on another disk"
            ) from error
        folder.remove()
    finally:
        folder.release()
    return target


def _is_journal(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and path.name != SUFFIX and (path.is_dir() or not path.exists())


def _is_recording(path: Path, recording_id: str) -> bool:
    """Tell whether ``path`` is a trace of the recording of that id."""
    try:
        return load_trace(path).metadata.get("recording_id") == recording_id
    except BeaconScopeError:
        return False


def _without_journal(recorded: Path, target: Path, journal: Path) -> Path:
    """Answer where there is no journal: with the trace if it is there, since it needs no recovering."""
    for candidate in (target, recorded):
        if candidate.exists():
            load_trace(candidate)
            if candidate == target:
                return target
            raise BeaconScopeError(f"{recorded} is finished and has no journal; copy it to {target}")
    raise BeaconScopeError(f"neither {recorded} nor {journal} exists; give the output of an interrupted recording")
