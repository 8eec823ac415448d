"""Disks that are small."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own at ``folder``; skips where it may not be mounted."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
