"""How large a trace will be, before it is recorded."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from beaconscope.trace.schema import TraceLayout, row_bytes

# Share of raw bytes that the file's encoding leaves, measured on queries, keys and values of SmolLM2-135M-Instruct (six
# layers, 1500 tokens). docs/trace-format.md has the table.
_RATIOS = {
    ("float32", "float32"): 0.85,
    ("float32", "float16"): 0.47,
    ("float32", "bfloat16"): 0.36,
    ("float16", "float32"): 0.92,
    ("float16", "float16"): 0.92,
    ("float16", "bfloat16"): 0.76,
}
_MARKS_RATIO = 0.7
_TOKEN_BYTES = 32


def raw_bytes(layout: TraceLayout, positions: int) -> int:
    """Count the bytes of a trace as arrays in memory, which is about what its journal takes."""
    rows = sum(len(layer.kv_heads) * row_bytes(layer, layout) for layer in layout.layers)
    return positions * (rows + _TOKEN_BYTES)


def vector_bytes(layout: TraceLayout, positions: int) -> int:
    """Count the bytes of queries, keys and values alone."""
    values = sum(
        len(layer.kv_heads) * ((layer.group_size + 1) * layer.key_size + (layer.value_size or 0))
        for layer in layout.layers
    )
    return positions * values * np.dtype(layout.vector_type).itemsize


def estimate_bytes(layout: TraceLayout, positions: int, *, model_dtype: str = "float32") -> int:
    """Estimate the size of the Parquet file.

    Parameters
    ----------
    layout : TraceLayout
    positions : int
        Prompt and generation together.
    model_dtype : {"bfloat16", "float16", "float32"}
        What the model computes in: fewer digits compress better. The default is the worst case.
    """
    dtype = model_dtype.removeprefix("torch.")
    ratio = _RATIOS.get((layout.vector_type, dtype), _RATIOS[layout.vector_type, "float32"])
    vectors = vector_bytes(layout, positions)
    marks = raw_bytes(layout, positions) - vectors
    return int(vectors * ratio + marks * _MARKS_RATIO)


def disk_bytes(layout: TraceLayout, positions: int, *, model_dtype: str = "float32") -> int:
    """Estimate the most that a recording takes on the disk: journal and file together, for a moment at its end."""
    return raw_bytes(layout, positions) + estimate_bytes(layout, positions, model_dtype=model_dtype)


def free_bytes(path: Path) -> int:
    """Bytes that can still be written where ``path`` is or will be."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
