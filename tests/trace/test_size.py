from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from beaconscope.trace import (
    LayerLayout,
    TraceLayout,
    disk_bytes,
    estimate_bytes,
    free_bytes,
    journal_path,
    raw_bytes,
    vector_bytes,
)
from beaconscope.trace.journal import Journal
from tests.trace.made import METADATA, make

# 8 KV heads of 4 query heads, size 128, as in a model of 4 billion parameters; six layers.
LARGE = TraceLayout(tuple(LayerLayout(i, tuple(range(8)), 4, 128, 128) for i in range(6)), "float32", 8)
MIDDLE = TraceLayout((LayerLayout(0, (0, 1), 3, 64, 64),), "float32", 8)


def test_raw_bytes_are_those_of_the_arrays() -> None:
    made = make(MIDDLE, 10).layers[0]
    arrays = [made.query, made.key, made.value, made.beacon, made.beacon_similarity, made.mass]
    arrays += [made.hit_position, made.hit_mass]
    numbers = sum(array.nbytes for array in arrays if array is not None)
    assert numbers < raw_bytes(MIDDLE, 10) < 1.1 * numbers
    assert vector_bytes(MIDDLE, 10) == made.query.nbytes + made.key.nbytes + made.value.nbytes  # type: ignore[union-attr]


def test_the_estimate_for_a_large_model() -> None:
    """A model of 4 billion parameters, 32 K tokens and six layers: about 2 GB, with hits and all."""
    assert 1.6e9 < estimate_bytes(LARGE, 32768, model_dtype="bfloat16") < 2.5e9
    assert estimate_bytes(LARGE, 32768) > estimate_bytes(LARGE, 32768, model_dtype="torch.bfloat16")


@pytest.mark.parametrize("model_dtype", ["bfloat16", "float32"])
def test_the_estimate_is_near_the_truth(tmp_path: Path, model_dtype: str) -> None:
    made = make(MIDDLE, 1000)
    if model_dtype == "float32":
        random = np.random.default_rng(0)
        for name in ("query", "key", "value"):
            shape = getattr(made.layers[0], name).shape
            setattr(made.layers[0], name, random.standard_normal(shape).astype(np.float32))
    # Leave out the events, which the estimate leaves out too; made-up recordings have far too many.
    made.layers[0] = replace(made.layers[0], changes=[], evictions=[])
    size = made.record(tmp_path / "trace.parquet", block=250).stat().st_size
    assert 0.8 < size / estimate_bytes(MIDDLE, 1000, model_dtype=model_dtype) < 1.25


def test_the_journal_is_about_the_raw_bytes(tmp_path: Path) -> None:
    made = make(MIDDLE, 400)
    with Journal.create(tmp_path / "trace.parquet", MIDDLE, METADATA) as journal:
        for first in range(0, 400, 20):
            made.append(journal, first, first + 20)
    size = sum(path.stat().st_size for path in journal_path(tmp_path / "trace.parquet").iterdir())
    assert 1.0 < size / raw_bytes(MIDDLE, 400) < 1.2
    assert disk_bytes(MIDDLE, 400) > raw_bytes(MIDDLE, 400) + estimate_bytes(MIDDLE, 400) - 1


def test_free_bytes_of_what_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "no" / "such" / "trace.parquet") > 0


MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from beaconscope.trace import HeadBlock, Journal, LayerLayout, TokenBlock, TraceLayout, load_trace

output, length = Path(sys.argv[1]), int(sys.argv[2])
heads, groups, size, hits = 4, 2, 32, 4
layers = tuple(LayerLayout(layer, tuple(range(heads)), groups, size, size) for layer in range(3))
random = np.random.default_rng(0)
floats = lambda *shape: random.standard_normal(shape).astype(np.float32)

with Journal.create(output, TraceLayout(layers, "float32", hits), {"prompt_length": 1}, queue_bytes=1 << 20) as journal:
    for first in range(0, length, 250):
        token = np.zeros(250, np.float32)
        journal.append_tokens(TokenBlock(first, np.zeros(250, np.int32), [b"word"] * 250, token, token))
        for layer in range(3):
            marks = [floats(250, heads, groups) for _ in range(4)]
            positions = np.zeros((250, heads, groups, hits), np.int32)
            journal.append(HeadBlock(
                layer, first, floats(250, heads, groups, size), floats(250, heads, size), floats(250, heads, size),
                np.zeros((250, heads, groups), np.int16), *marks, positions, floats(250, heads, groups, hits),
            ))
    journal.finalize()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, output.stat().st_size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts resident memory as Linux does")
def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    """GIVEN 1 K and 8 K positions WHEN recorded and finalised THEN the peak grows by a fraction of the file only."""

    def peak_and_size(length: int) -> tuple[int, int]:
        output = tmp_path / f"{length}.parquet"
        child = subprocess.run(
            [sys.executable, "-c", MEMORY, str(output), str(length)],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        peak, size = map(int, child.stdout.split())
        return peak, size

    small_peak, small_size = peak_and_size(1000)
    peak, size = peak_and_size(8000)
    assert size - small_size > 35e6
    assert peak - small_peak < 12e6
