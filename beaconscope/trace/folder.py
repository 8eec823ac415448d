"""The folder of a journal: its files, its lock, and what it says of the recording.

::

    OUTPUT.journal/
        lock               held by the process that records or recovers
        metadata.json      as known when the recording began
        final.json         as known when it ended; there only once it has
        tokens.arrows      Arrow IPC stream
        layer-00012.arrows Arrow IPC stream, one per layer
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from beaconscope.errors import BeaconScopeError
from beaconscope.files import lock_now, os_reason
from beaconscope.trace.metadata import dump_metadata, parse_metadata
from beaconscope.trace.schema import TraceLayout

SUFFIX = ".journal"
_OURS = re.compile(
    r"lock|metadata\.json|final\.json|(metadata|final)\.json\.partial|tokens\.arrows|layer-\d{5}\.arrows"
)


def journal_path(output: Path) -> Path:
    """Where the journal of a recording to ``output`` lies: beside it."""
    return output.with_name(output.name + SUFFIX)


class JournalFolder:
    """A journal on disk, locked by this process until `release` or `remove`."""

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock: IO[bytes] | None = lock

    @classmethod
    def lock(cls, path: Path) -> JournalFolder:
        """Lock the folder ``path``, which exists.

        Raises
        ------
        BeaconScopeError
            Where another process holds it or it cannot be written.
        """
        lock_path = path / "lock"
        try:
            handle = open(lock_path, "ab")  # noqa: SIM115 - held as long as the journal is
        except OSError as error:
            raise BeaconScopeError(f"cannot write in {path}: {os_reason(error)}; check its permissions") from error
        try:
            lock_now(handle)
            # Whoever held the lock may have removed the folder between our opening and locking the file.
            if not os.path.samestat(os.fstat(handle.fileno()), lock_path.stat()):
                raise OSError
        except OSError as error:
            handle.close()
            raise BeaconScopeError(
                f"{path} is in use by another process that records or recovers; wait for it, or give another output"
            ) from error
        return cls(path, handle)

    @property
    def tokens_path(self) -> Path:
        """The stream of tokens."""
        return self.path / "tokens.arrows"

    def layer_path(self, layer: int) -> Path:
        """Name the stream of one layer."""
        return self.path / f"layer-{layer:05d}.arrows"

    def holds_recording(self) -> bool:
        """Tell whether a recording was begun here; without one there is nothing that could be lost."""
        return (self.path / "metadata.json").exists()

    def write_metadata(self, metadata: Mapping[str, Any], *, final: bool = False) -> None:
        """Write what is known of the recording, as a whole or not at all."""
        target = self.path / ("final.json" if final else "metadata.json")
        partial = target.with_name(target.name + ".partial")
        partial.write_bytes(dump_metadata(metadata))
        os.replace(partial, target)

    def read_metadata(self) -> tuple[dict[str, Any], TraceLayout, bool]:
        """Read the metadata, the layout, and whether the recording had come to its own end.

        Raises
        ------
        BeaconScopeError
            Where they are missing or make no sense.
        """
        final = self.path / "final.json"
        ended = final.exists()
        source = final if ended else self.path / "metadata.json"
        try:
            data = source.read_bytes()
        except OSError as error:
            raise BeaconScopeError(f"{self.path} is no journal of a recording: {os_reason(error)}") from error
        metadata, layout = parse_metadata(data, self.path)
        return metadata, layout, ended

    def clear(self) -> None:
        """Remove everything but the lock.

        Raises
        ------
        BeaconScopeError
            Where the folder holds files that are not a journal's; then nothing is removed.
        """
        names = [entry.name for entry in self.path.iterdir()]
        for name in names:
            if not _OURS.fullmatch(name):
                raise BeaconScopeError(f"{self.path} holds {name}, which is no part of a journal; move it away first")
        # The metadata go last: without them the streams would be taken for nothing.
        for name in sorted(names, key=lambda name: (name.endswith(".json"), name == "metadata.json")):
            if name != "lock":
                (self.path / name).unlink()

    def remove(self) -> None:
        """Remove the journal and give up the lock."""
        self.clear()
        if sys.platform == "win32":  # an open file cannot be removed there
            self.release()
        (self.path / "lock").unlink()
        self.release()
        # Someone else may be opening the lock file in the folder this very moment; then it is theirs.
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def release(self) -> None:
        """Give up the lock and leave the journal."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
