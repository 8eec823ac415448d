"""What a trace holds: its layout, the blocks in which a recording arrives, and the Parquet schema.

The specification for readers of the file is ``docs/trace-format.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

FORMAT_VERSION = "1.0"

VectorType = Literal["float16", "float32"]
Phase = Literal["prompt", "think", "answer"]


@dataclass(frozen=True)
class LayerLayout:
    """What is recorded of one layer."""

    layer: int
    kv_heads: tuple[int, ...]
    """Recorded KV heads, ascending."""
    group_size: int
    """G, the query heads that a KV head serves."""
    key_size: int
    """D, the size of a query or key."""
    value_size: int | None
    """Size of a value, None where values are left out."""


@dataclass(frozen=True)
class TraceLayout:
    """What is recorded of a model: which layers and heads, how exactly, and how many hits."""

    layers: tuple[LayerLayout, ...]
    vector_type: VectorType
    hits: int
    """M, the most attended positions logged per query head and step."""


@dataclass(frozen=True)
class TokenBlock:
    """Consecutive tokens, as far as they do not depend on a layer. T tokens."""

    first_position: int
    token_id: npt.NDArray[np.int32]  # [T]
    token_bytes: Sequence[bytes]  # T, the bytes of each token alone
    logprob: npt.NDArray[np.float32]  # [T], nan where there is none (the prompt)
    entropy: npt.NDArray[np.float32]  # [T], nats, nan where there is none


@dataclass(frozen=True)
class BeaconChange:
    """The beacons of some query heads of one KV head, as they stand after a change."""

    position: int
    """The newest position when the change happened; the beacons count from the next query on."""
    kv_head: int
    query_head: npt.NDArray[np.int16]  # [N], in its group, 0 to G-1
    source: npt.NDArray[np.int32]  # [N], position the beacon was taken from, -1 for a centroid
    members: npt.NDArray[np.int32]  # [N], queries assigned to it since the beacons changed last
    vector: npt.NDArray[np.float32] | None  # [N, D], None where ``source`` gives it


@dataclass(frozen=True)
class Eviction:
    """What one compression dropped from one KV head."""

    position: int
    """The newest position when the compression fired."""
    kv_head: int
    evicted: npt.NDArray[np.int32]  # [N], positions dropped, ascending


@dataclass(frozen=True)
class HeadBlock:
    """What one layer recorded for T consecutive positions. H recorded KV heads, G query heads in each, M hits."""

    layer: int
    first_position: int
    query: npt.NDArray[np.floating]  # [T, H, G, D], post-RoPE
    key: npt.NDArray[np.floating]  # [T, H, D], post-RoPE
    value: npt.NDArray[np.floating] | None  # [T, H, Dv]
    beacon: npt.NDArray[np.int16]  # [T, H, G], index into the head's current beacons, -1 for none
    beacon_similarity: npt.NDArray[np.float32]  # [T, H, G], cosine, nan for none
    mass_sink: npt.NDArray[np.float32]  # [T, H, G]
    mass_local: npt.NDArray[np.float32]  # [T, H, G]
    mass_distant: npt.NDArray[np.float32]  # [T, H, G]
    hit_position: npt.NDArray[np.int32]  # [T, H, G, M], by falling mass, -1 past the last
    hit_mass: npt.NDArray[np.float32]  # [T, H, G, M]
    beacon_changes: Sequence[BeaconChange] = ()
    evictions: Sequence[Eviction] = ()
