"""What a trace holds: its layout, the blocks in which a recording arrives, and the schemas of file and journal.

The specification for readers of the file is ``docs/trace-format.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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

    def of(self, layer: int) -> LayerLayout:
        """Give the layout of one layer.

        Raises
        ------
        KeyError
            Where the layer is not recorded.
        """
        for candidate in self.layers:
            if candidate.layer == layer:
                return candidate
        raise KeyError(layer)


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
    members: npt.NDArray[np.int32]  # [N], queries assigned to the former beacon of this number, since the last change
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


def parquet_schema(layout: TraceLayout) -> pa.Schema:
    """Give the columns of a trace's Parquet file, without metadata.

    Lists whose length is the same in every layer are fixed-size. Where layers differ (sliding and global layers of some
    models do) they are plain lists, and the layout in the metadata says how long each layer's are. The two look the
    same in Parquet; only what pyarrow and Polars hand out differs.
    """
    vector = _VECTOR_TYPES[layout.vector_type]
    groups = {layer.group_size for layer in layout.layers}
    keys = {layer.key_size for layer in layout.layers}
    queries = {layer.group_size * layer.key_size for layer in layout.layers}
    values = {layer.value_size for layer in layout.layers}

    fields = [
        pa.field("layer", pa.int16(), nullable=False),
        pa.field("kv_head", pa.int16(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("token_id", pa.int32(), nullable=False),
        pa.field("token", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("token_bytes", pa.binary(), nullable=False),
        pa.field("phase", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("logprob", pa.float32()),
        pa.field("entropy", pa.float32()),
        pa.field("query", _list(vector, queries), nullable=False),
        pa.field("key", _list(vector, keys), nullable=False),
    ]
    if values != {None}:
        sizes = {size for size in values if size is not None}
        fields.append(pa.field("value", _list(vector, sizes), nullable=None in values))
    fields += [
        pa.field("beacon", _list(pa.int16(), groups, nullable=True), nullable=False),
        pa.field("beacon_similarity", _list(pa.float32(), groups, nullable=True), nullable=False),
        pa.field("mass_sink", _list(pa.float32(), groups), nullable=False),
        pa.field("mass_local", _list(pa.float32(), groups), nullable=False),
        pa.field("mass_distant", _list(pa.float32(), groups), nullable=False),
        pa.field("hit_head", _list(pa.int16()), nullable=False),
        pa.field("hit_position", _list(pa.int32()), nullable=False),
        pa.field("hit_mass", _list(pa.float32()), nullable=False),
        _BEACONS_FIELD,
        _EVICTED_FIELD,
    ]
    return pa.schema(fields)


def journal_schema(layer: LayerLayout, layout: TraceLayout) -> pa.Schema:
    """Give the columns of one layer's stream in the journal: a `HeadBlock` as it is, one head per batch."""
    vector = _VECTOR_TYPES[layout.vector_type]
    groups = {layer.group_size}
    hits = {layer.group_size * layout.hits}
    fields = [
        pa.field("kv_head", pa.int16(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("query", _list(vector, {layer.group_size * layer.key_size}), nullable=False),
        pa.field("key", _list(vector, {layer.key_size}), nullable=False),
    ]
    if layer.value_size is not None:
        fields.append(pa.field("value", _list(vector, {layer.value_size}), nullable=False))
    fields += [
        pa.field("beacon", _list(pa.int16(), groups), nullable=False),
        pa.field("beacon_similarity", _list(pa.float32(), groups), nullable=False),
        pa.field("mass_sink", _list(pa.float32(), groups), nullable=False),
        pa.field("mass_local", _list(pa.float32(), groups), nullable=False),
        pa.field("mass_distant", _list(pa.float32(), groups), nullable=False),
        pa.field("hit_position", _list(pa.int32(), hits), nullable=False),
        pa.field("hit_mass", _list(pa.float32(), hits), nullable=False),
        _BEACONS_FIELD,
        _EVICTED_FIELD,
    ]
    return pa.schema(fields)


def token_schema() -> pa.Schema:
    """Give the columns of the journal's token stream."""
    return pa.schema(
        [
            pa.field("position", pa.int32(), nullable=False),
            pa.field("token_id", pa.int32(), nullable=False),
            pa.field("token_bytes", pa.binary(), nullable=False),
            pa.field("logprob", pa.float32()),
            pa.field("entropy", pa.float32()),
        ]
    )


def row_bytes(layer: LayerLayout, layout: TraceLayout) -> int:
    """Count the bytes of one row in memory: one head at one position, without token, beacons and evictions."""
    vectors = (layer.group_size + 1) * layer.key_size + (layer.value_size or 0)
    # Beacon, its similarity and three masses; then a position and a mass for each hit.
    marks = layer.group_size * (2 + 4 + 3 * 4 + layout.hits * (4 + 4))
    return vectors * np.dtype(layout.vector_type).itemsize + marks + 2 + 4


def _list(item: pa.DataType, sizes: Collection[int] = (), *, nullable: bool = False) -> pa.DataType:
    """Build the type of a list: of fixed size where there is one size only."""
    field = pa.field("element", item, nullable=nullable)
    return pa.list_(field, next(iter(sizes))) if len(sizes) == 1 else pa.list_(field)


_VECTOR_TYPES: Mapping[str, pa.DataType] = MappingProxyType({"float16": pa.float16(), "float32": pa.float32()})

BEACON_TYPE = pa.struct(
    [
        pa.field("query_head", pa.int16(), nullable=False),
        pa.field("source", pa.int32()),
        pa.field("members", pa.int32(), nullable=False),
        pa.field("vector", _list(pa.float32())),
    ]
)
_BEACONS_FIELD = pa.field("beacons", pa.list_(pa.field("element", BEACON_TYPE, nullable=False)))
_EVICTED_FIELD = pa.field("evicted", _list(pa.int32()))
