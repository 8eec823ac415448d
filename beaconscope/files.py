"""Files that appear whole or not at all, locks, and what the system has against them in plain words."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from beaconscope.errors import BeaconScopeError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNDECODED = re.compile("[\udc80-\udcff]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path beside ``path`` to write to; once the block is done it is synced and renamed to ``path``.

    Raises
    ------
    BeaconScopeError
        Where the system refuses. Then, as after any other error, ``path`` is as it was.
    """
    # With the number of the process, so that two that write the same file do not write into each other's.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        replace_synced(partial, path)
    except OSError as error:
        raise BeaconScopeError(f"cannot write {path}: {os_reason(error)}; {remedy(error)}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def replace_synced(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, with what is in it safely on the disk before its name is."""
    _sync(source)
    os.replace(source, target)
    if sys.platform != "win32":  # where a folder cannot be opened
        _sync(target.parent)


def _sync(path: Path) -> None:
    """Have the system put a file, or the names in a folder, on the disk."""
    # Windows syncs only what may be written, and elsewhere a folder may only be read.
    handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def valid_unicode(text: str | os.PathLike[str], errors: Literal["replace", "strict"] = "replace") -> str:
    """The text without lone surrogates, so that any file or terminal in UTF-8 can hold it.

    Python decodes the bytes of file names and arguments by the locale, and keeps those that it cannot decode as
    surrogates. These bytes are read as UTF-8 here: in the C locale they nearly always are.

    Parameters
    ----------
    text
        Any text, or a path.
    errors
        Whether U+FFFD replaces what is not UTF-8 either, or an error is raised.

    Raises
    ------
    UnicodeError
        When ``errors`` is ``strict``.
    """
    text = os.fspath(text)
    if text.isascii():
        return text
    text = _UNDECODED.sub(lambda run: run[0].encode("ascii", "surrogateescape").decode("utf-8", errors), text)
    if errors == "strict":
        text.encode()
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def lock_now(handle: IO[bytes]) -> None:
    """Lock an open file for this process alone, or raise OSError at once."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(handle.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def os_reason(error: BaseException) -> str:
    """Say in a few words on one line why the system refused."""
    if isinstance(error, OSError) and error.errno:
        # Not what stands in the error: pyarrow puts its own call in front.
        return os.strerror(error.errno)
    return (str(error).splitlines() or [type(error).__name__])[0]


def remedy(error: BaseException) -> str:
    """Say what to do where the system refused to write."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL:
        return "make room"
    if number in _FORBIDDEN:
        return "see to it that this folder can be written"
    return "see to the disk"
