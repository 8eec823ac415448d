"""A model on disk that goes on writing, and the command line in a fork of this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.forking import Child
from tests.record.recording import save_tiny

LONG = 100_000
"""Tokens of context, so that nothing ends by itself while a test waits."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=LONG)


@pytest.fixture(autouse=True)
def _no_bars():
    """In a process of its own the command line sees to this before transformers is loaded."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


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
