"""A model on disk that goes on writing, and the command line in this process or another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from beaconscope.cli import app
from tests.faults.forking import Child
from tests.record.recording import PROMPT, endless_tokenizer
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]

LONG = 100_000
"""Tokens of context, so that nothing ends by itself while a test waits."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", max_position_embeddings=LONG).save_pretrained(folder)
    endless_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_bars():
    """In a process of its own the command line sees to this before transformers is loaded."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A current folder with nothing but a prompt in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.txt").write_text(PROMPT, encoding="utf-8")
    return tmp_path


@pytest.fixture
def run():
    """Run the command line in this process."""

    def run(*arguments: str | Path, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run


@pytest.fixture
def start():
    """Start a process of its own: the command line, or a script that prepares something and then runs it."""
    started = []

    def start(
        *arguments: str | Path, script: str | None = None, prepare: Callable[[], None] = lambda: None, **settings
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
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
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


@pytest.fixture
def fork(tmp_path_factory):
    """Start the command line in a fork of this process; what is left of it is killed at the end."""
    children: list[Child] = []
    logs = tmp_path_factory.mktemp("logs")

    def fork(*arguments: str | Path, cwd: Path, prepare: Callable[[], None] = lambda: None) -> Child:
        children.append(Child(*arguments, cwd=cwd, logs=logs, prepare=prepare))
        return children[-1]

    yield fork
    for child in children:
        child.end()
