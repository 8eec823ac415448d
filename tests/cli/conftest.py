"""A model on disk, and the command line in this process or another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from beaconscope.cli import app
from tests.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A tiny Llama and its tokenizer, saved as a local model folder; no token ends its text."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty current folder with a prompt in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.txt").write_text("Plan: add, then double. 3 and 4?\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def run():
    """Run the command line in this process."""

    def run(*arguments: str | Path, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run


@pytest.fixture
def start():
    """Start the command line as a process of its own."""
    started = []

    def start(*arguments: str | Path, **settings) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "beaconscope", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # The package need not be installed, and a test may start it in another folder.
            env={**os.environ, "PYTHONPATH": str(ROOT), **settings.pop("env", {})},
            **settings,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
