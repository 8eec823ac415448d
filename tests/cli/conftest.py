"""A model on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.record.recording import save_tiny


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))
