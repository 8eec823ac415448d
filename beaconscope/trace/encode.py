"""Blocks of a recording as Arrow batches for the journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd  # noqa: F401 - or pyarrow imports it at the first array, while the recording waits
import pyarrow as pa

from beaconscope.trace.schema import (
    BEACON_TYPE,
    BeaconChange,
    Eviction,
    HeadBlock,
    LayerLayout,
    TokenBlock,
    TraceLayout,
    journal_schema,
    row_bytes,
    token_schema,
)
from beaconscope.trace.vectors import to_vector_type

GROUP_BYTES = 4 << 20
"""About how large a row group, and at most how large a batch of the journal, is in memory."""
_NUMBERS = ("beacon", "beacon_similarity", "mass_sink", "mass_local", "mass_distant", "hit_position", "hit_mass")


def rows_per_group(layer: LayerLayout, layout: TraceLayout) -> int:
    """Rows of a row group: about `GROUP_BYTES`, but neither a handful of rows nor more than 2048."""
    return min(max(GROUP_BYTES // row_bytes(layer, layout), 256), 2048)


def encode_tokens(block: TokenBlock) -> pa.RecordBatch:
    """Turn a block of tokens into a batch of the token stream."""
    count = len(block.token_id)
    return pa.record_batch(
        [
            pa.array(np.arange(block.first_position, block.first_position + count, dtype=np.int32)),
            pa.array(np.asarray(block.token_id, np.int32)),
            pa.array(list(block.token_bytes), pa.binary()),
            pa.array(np.asarray(block.logprob, np.float32), from_pandas=True),  # nan becomes null
            pa.array(np.asarray(block.entropy, np.float32), from_pandas=True),
        ],
        schema=token_schema(),
    )


class HeadEncoder:
    """Turns blocks of one layer into batches of its stream."""

    def __init__(self, layer: LayerLayout, layout: TraceLayout, *, exact: bool) -> None:
        self.schema = journal_schema(layer, layout)
        self._layer = layer
        self._vector_type = layout.vector_type
        self._exact = exact
        self._rows = rows_per_group(layer, layout)

    def encode(self, block: HeadBlock) -> Iterator[pa.RecordBatch]:
        """Give batches of one head each, in the layout's order, none much over `GROUP_BYTES`.

        Raises
        ------
        BeaconScopeError
            For vectors that the trace's type does not hold; see `to_vector_type`.
        """
        for start in range(0, len(block.query), self._rows):
            rows = slice(start, min(start + self._rows, len(block.query)))
            for head, kv_head in enumerate(self._layer.kv_heads):
                yield self._encode_head(block, head, kv_head, rows)

    def _encode_head(self, block: HeadBlock, head: int, kv_head: int, rows: slice) -> pa.RecordBatch:
        count = rows.stop - rows.start
        first = block.first_position + rows.start
        columns = {
            "kv_head": pa.array(np.full(count, kv_head, np.int16)),
            "position": pa.array(np.arange(first, first + count, dtype=np.int32)),
        }
        for name in ("query", "key", "value"):
            if name in self.schema.names:
                vectors = to_vector_type(getattr(block, name)[rows, head], self._vector_type, exact=self._exact)
                columns[name] = _fixed_size_lists(vectors, self.schema.field(name).type)
        for name in _NUMBERS:
            columns[name] = _fixed_size_lists(getattr(block, name)[rows, head], self.schema.field(name).type)
        span = range(first, first + count)
        changes = [event for event in block.beacon_changes if event.kv_head == kv_head and event.position in span]
        evictions = [event for event in block.evictions if event.kv_head == kv_head and event.position in span]
        columns["beacons"] = _encode_changes(changes, first, count, self.schema.field("beacons").type)
        columns["evicted"] = _encode_evictions(evictions, first, count, self.schema.field("evicted").type)
        return pa.record_batch([columns[name] for name in self.schema.names], schema=self.schema)


def _fixed_size_lists(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Turn an array [T, ...] into T lists of type ``kind``."""
    flat = np.ascontiguousarray(values).reshape(-1)
    items = pa.array(flat.astype(kind.value_type.to_pandas_dtype(), copy=False))
    if kind.list_size == 0:
        return pa.array([[]] * len(values), kind)
    return pa.FixedSizeListArray.from_arrays(items, type=kind)


def _encode_changes(changes: Sequence[BeaconChange], first: int, count: int, kind: pa.DataType) -> pa.Array:
    """Put changes of the beacons into their rows. A later change of a row replaces an earlier one of the same heads."""
    if not changes:
        return pa.nulls(count, kind)
    by_row: dict[int, list[BeaconChange]] = {}
    for change in changes:
        by_row.setdefault(change.position - first, []).append(change)
    lengths = np.zeros(count, np.int32)
    parts: list[tuple[BeaconChange, npt.NDArray[np.bool_]]] = []
    for row in sorted(by_row):
        superseded: set[int] = set()
        row_parts = []
        for change in reversed(by_row[row]):
            heads = np.asarray(change.query_head)
            row_parts.append((change, ~np.isin(heads, list(superseded))))
            superseded.update(heads.tolist())
        row_parts.reverse()
        lengths[row] = sum(int(kept.sum()) for _, kept in row_parts)
        parts += row_parts
    values = pa.concat_arrays([_beacon_structs(change, kept) for change, kept in parts])
    return _ragged(values, lengths, np.array([row in by_row for row in range(count)], np.bool_), kind)


def _beacon_structs(change: BeaconChange, kept: npt.NDArray[np.bool_]) -> pa.Array:
    vector_type = BEACON_TYPE.field("vector").type
    count = int(kept.sum())
    if change.vector is None:
        vectors = pa.nulls(count, vector_type)
    else:
        rows = np.ascontiguousarray(np.asarray(change.vector, np.float32)[kept])
        width = rows.shape[1] if rows.ndim == 2 else 0
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width)
        vectors = pa.ListArray.from_arrays(offsets, pa.array(rows.reshape(-1)), type=vector_type)
    source = np.asarray(change.source, np.int32)[kept]
    return pa.StructArray.from_arrays(
        [
            pa.array(np.asarray(change.query_head, np.int16)[kept]),
            pa.array(source, mask=source < 0),
            pa.array(np.asarray(change.members, np.int32)[kept]),
            vectors,
        ],
        fields=list(BEACON_TYPE),
    )


def _encode_evictions(evictions: Sequence[Eviction], first: int, count: int, kind: pa.DataType) -> pa.Array:
    if not evictions:
        return pa.nulls(count, kind)
    by_row: dict[int, list[npt.NDArray[np.int32]]] = {}
    for eviction in evictions:
        by_row.setdefault(eviction.position - first, []).append(np.asarray(eviction.evicted, np.int32))
    rows = {row: np.sort(np.concatenate(parts)) for row, parts in sorted(by_row.items())}
    lengths = np.zeros(count, np.int32)
    for row, evicted in rows.items():
        lengths[row] = len(evicted)
    values = pa.array(np.concatenate(list(rows.values())))
    return _ragged(values, lengths, np.array([row in rows for row in range(count)], np.bool_), kind)


def _ragged(
    values: pa.Array, lengths: npt.NDArray[np.int32], valid: npt.NDArray[np.bool_], kind: pa.DataType
) -> pa.Array:
    """Cut ``values`` into lists of the given lengths; null where not ``valid``."""
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind, mask=pa.array(~valid))
