"""Files of the commands: their names by default, whether they may be overwritten, and can be written or read at all.

All checks come before the work, so that an hour of recording does not end in a refusal.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from beaconscope.errors import BeaconScopeError

TRACE_SUFFIX = ".parquet"


def trace_path(output: Path | None, prompt: str, *, force: bool) -> Path:
    """Where the trace of a prompt goes: ``output``, else the prompt file's name with another ending, in this folder.

    Parameters
    ----------
    output
        What the user asked for, if anything.
    prompt
        The prompt file, ``-`` for stdin.
    force
        Allow the file to exist.

    Raises
    ------
    BeaconScopeError
        If it exists and ``force`` is not given, or cannot be written.
    """
    if output is None:
        output = Path(("trace" if prompt == "-" else Path(prompt).stem) + TRACE_SUFFIX)
    return writable_file(output, force=force)


def traces_folder(output: Path | None, prompts: str) -> Path:
    """Where the traces of many prompts go: ``output``, else a folder named after the prompts file. It may exist.

    Raises
    ------
    BeaconScopeError
        If it is a file, or cannot be made or written to.
    """
    folder = Path(("prompts" if prompts == "-" else Path(prompts).stem) + "-traces") if output is None else output
    if folder.exists():
        if not folder.is_dir():
            raise BeaconScopeError(f"{folder} is a file, and many prompts need a folder; give another --output")
        _check_can_write(folder)
    else:
        _check_folder(folder.parent)
    return folder


def writable_file(path: Path, *, force: bool) -> Path:
    """``path``, checked to be a file that may be written.

    Raises
    ------
    BeaconScopeError
        If it exists and ``force`` is not given, or cannot be written.
    """
    if path.is_dir():
        raise BeaconScopeError(f"{path} is a folder; give --output the name of a file")
    if path.exists():
        if not path.is_file():
            raise BeaconScopeError(f"{path} is a device or a pipe, in whose place no file is put; give --output a file")
        if not force:
            raise BeaconScopeError(f"{path} exists; give --force to overwrite it, or --output for another name")
        if not os.access(path, os.W_OK):
            raise BeaconScopeError(f"{path} is write-protected; give --output for another name")
    _check_folder(path.parent)
    return path


def writable_folder(folder: Path) -> Path:
    """``folder``, checked to be one in which files may be written, or that can be made.

    Raises
    ------
    BeaconScopeError
        If it is a file, or cannot be made or written to.
    """
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise BeaconScopeError(f"{there} is a file, not a folder; give another --output")
    _check_can_write(there)
    return folder


def input_file(path: Path) -> Path:
    """``path``, checked to be a file that can be read.

    Raises
    ------
    BeaconScopeError
        If it is not.
    """
    if not path.exists():
        if path.name and (journal := _journal_of(path)).is_dir():
            raise BeaconScopeError(
                f"{path} does not exist, but {journal} holds a recording that is under way or was interrupted; run "
                f"`{shlex.join(['beaconscope', 'recover', str(path)])}`"
            )
        raise BeaconScopeError(f"{path} does not exist; check the name")
    if path.is_dir():
        if path.name and path == _journal_of(path.with_suffix("")):
            raise BeaconScopeError(
                f"{path} holds a recording that is under way or was interrupted; run "
                f"`{shlex.join(['beaconscope', 'recover', str(path)])}`"
            )
        raise BeaconScopeError(f"{path} is a folder; give a file")
    if not os.access(path, os.R_OK):
        raise BeaconScopeError(f"{path} may not be read; check its permissions")
    return path


def _journal_of(path: Path) -> Path:
    # Here, because it costs --help a part of its time.
    from beaconscope.trace import journal_path

    return journal_path(path)


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise BeaconScopeError(f"the folder {folder} does not exist; make it first: mkdir -p {folder}")
    if not folder.is_dir():
        raise BeaconScopeError(f"{folder} is a file, not a folder; give another --output")
    _check_can_write(folder)


def _check_can_write(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BeaconScopeError(f"nothing can be written in the folder {folder}; give another --output")
