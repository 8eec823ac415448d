"""The journal becomes the Parquet file, a row group at a time: memory does not grow with the trace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from beaconscope.errors import BeaconScopeError
from beaconscope.files import os_reason, remedy, replace_synced
from beaconscope.progress import Progress
from beaconscope.trace.columns import one_chunk
from beaconscope.trace.encode import rows_per_group
from beaconscope.trace.folder import JournalFolder
from beaconscope.trace.footer import seal
from beaconscope.trace.metadata import METADATA_KEY, dump_metadata, layout_to_json
from beaconscope.trace.phases import split_phases
from beaconscope.trace.schema import LayerLayout, TraceLayout, journal_schema, parquet_schema
from beaconscope.trace.stream import LayerIndex, read_tokens, scan_layer

# Level 1 is both the fastest and, on byte-stream split vectors, no larger than 3 or 9 (docs/trace-format.md, Size).
_ZSTD_LEVEL = 1
_DICTIONARY = [
    "layer",
    "kv_head",
    "token_id",
    "token",
    "token_bytes",
    "phase",
    "beacon.list.element",
    "hit_head.list.element",
    "hit_position.list.element",
]
_FLOAT_LISTS = ["beacon_similarity", "mass_sink", "mass_local", "mass_distant", "hit_mass"]


class Refused(BeaconScopeError):
    """The system did not let the file be written."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what
        self.remedy = remedy


@dataclass(frozen=True)
class Recovered:
    """What a journal holds that is whole over all layers and tokens."""

    tokens: pa.Table
    layers: tuple[LayerIndex, ...]
    length: int
    """Positions that the tokens and every layer have."""
    longest: int
    """Positions that some of them have."""


def scan(folder: JournalFolder, layout: TraceLayout) -> Recovered:
    """Find what a journal holds."""
    tokens = read_tokens(folder.tokens_path)
    layers = tuple(
        scan_layer(folder.layer_path(layer.layer), journal_schema(layer, layout), layer.kv_heads)
        for layer in layout.layers
    )
    lengths = [tokens.num_rows, *(layer.length for layer in layers)]
    return Recovered(tokens, layers, min(lengths), max(lengths))


def write_trace(
    found: Recovered,
    target: Path,
    layout: TraceLayout,
    metadata: Mapping[str, Any],
    progress: Progress | None = None,
) -> None:
    """Write the Parquet file ``target`` in one step: as a temporary file beside it, synced and renamed.

    Raises
    ------
    Refused
        Where the system does not let it; the temporary file is removed then and ``target`` is as it was.
    """
    partial = target.with_name(target.name + ".partial")
    try:
        _write(found, partial, layout, metadata, progress or (lambda done, total: None))
        seal(partial)
        replace_synced(partial, target)
    except OSError as error:
        raise Refused(f"cannot write {target}: {os_reason(error)}", remedy(error)) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _write(found: Recovered, path: Path, layout: TraceLayout, metadata: Mapping[str, Any], progress: Progress) -> None:
    columns = _token_columns(found, metadata)
    schema = parquet_schema(layout)
    described = dict(metadata) | {"layout": layout_to_json(layout)}
    described["prompt_length"] = min(int(metadata["prompt_length"]), found.length)
    if not isinstance(described.get("text"), str) or found.length < found.longest:
        described["text"] = b"".join(columns["token_bytes"].to_pylist()).decode("utf-8", "replace")
    total = found.length * sum(len(layer.kv_heads) for layer in layout.layers)
    done = 0
    # A file of our own, because the writer forgets to close its own where the disk refuses the footer.
    with (
        pa.OSFile(os.fsencode(path), "wb") as file,
        pq.ParquetWriter(
            file,
            schema.with_metadata({METADATA_KEY: dump_metadata(described)}),
            compression="zstd",
            compression_level=_ZSTD_LEVEL,
            use_dictionary=_DICTIONARY,
            column_encoding=_encodings(schema),
            write_statistics=["layer", "kv_head", "position"],
            write_page_checksum=True,
        ) as writer,
    ):
        for layer, index in zip(layout.layers, found.layers, strict=True):
            size = rows_per_group(layer, layout)
            for head, kv_head in enumerate(layer.kv_heads):
                for batches in _groups(index.read(head, found.length), size):
                    rows = pa.Table.from_batches(batches).combine_chunks()
                    writer.write_table(_file_rows(rows, layer, kv_head, layout, columns, schema))
                    done += rows.num_rows
                    progress(done, total)


def _token_columns(found: Recovered, metadata: Mapping[str, Any]) -> dict[str, pa.Array]:
    """Give the columns that do not depend on the head, [T] each."""
    table = found.tokens.slice(0, found.length).combine_chunks()
    token_bytes = table.column("token_bytes").to_pylist()
    phases = split_phases(
        token_bytes,
        min(int(metadata["prompt_length"]), found.length),
        str(metadata.get("think_open", "<think>")),
        str(metadata.get("think_close", "</think>")),
    )
    columns = {name: one_chunk(table, name) for name in ("token_id", "token_bytes", "logprob", "entropy")}
    columns["token"] = pa.array([token.decode("utf-8", "replace") for token in token_bytes], pa.string())
    columns["phase"] = pa.array(phases, pa.string())
    return columns


def _groups(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[list[pa.RecordBatch]]:
    """Regroup batches into lists of ``size`` rows; the last may be shorter."""
    group: list[pa.RecordBatch] = []
    missing = size
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, missing)
            group.append(part)
            start += part.num_rows
            missing -= part.num_rows
            if missing == 0:
                yield group
                group, missing = [], size
    if group:
        yield group


def _file_rows(
    rows: pa.Table,
    layer: LayerLayout,
    kv_head: int,
    layout: TraceLayout,
    token_columns: Mapping[str, pa.Array],
    schema: pa.Schema,
) -> pa.Table:
    """Turn consecutive rows of a head from the journal's columns into the file's."""
    count = rows.num_rows
    first = rows.column("position")[0].as_py()

    def flat(name: str) -> npt.NDArray[Any]:
        return np.asarray(one_chunk(rows, name).flatten())

    columns: dict[str, pa.Array] = {
        "layer": pa.array(np.full(count, layer.layer, np.int16)),
        "kv_head": pa.array(np.full(count, kv_head, np.int16)),
        "position": one_chunk(rows, "position"),
        "beacons": one_chunk(rows, "beacons"),
        "evicted": one_chunk(rows, "evicted"),
    }
    for name, column in token_columns.items():
        part = column.slice(first, count)
        # Encoded here and not once for the file, or every row group would carry the whole dictionary.
        columns[name] = part.dictionary_encode() if name in ("token", "phase") else part
    for name in ("query", "key", "value", "mass_sink", "mass_local", "mass_distant"):
        if name in rows.column_names:
            columns[name] = _lists(pa.array(flat(name)), count, schema.field(name).type)
        elif name in schema.names:
            columns[name] = pa.nulls(count, schema.field(name).type)
    nearest = flat("beacon")
    columns["beacon"] = _lists(pa.array(nearest, mask=nearest < 0), count, schema.field("beacon").type)
    columns["beacon_similarity"] = _lists(
        pa.array(flat("beacon_similarity"), mask=nearest < 0), count, schema.field("beacon_similarity").type
    )
    hit = flat("hit_position").reshape(count, layer.group_size, layout.hits)
    there = hit >= 0
    heads = np.broadcast_to(np.arange(layer.group_size, dtype=np.int16)[:, None], hit.shape)
    ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(there.sum((1, 2)), dtype=np.int32)])
    for name, values in (
        ("hit_head", heads[there]),
        ("hit_position", hit[there]),
        ("hit_mass", flat("hit_mass").reshape(hit.shape)[there]),
    ):
        columns[name] = pa.ListArray.from_arrays(pa.array(ends), pa.array(values), type=schema.field(name).type)
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _lists(values: pa.Array, count: int, kind: pa.DataType) -> pa.Array:
    """Cut values into ``count`` lists of equal length, of fixed size if ``kind`` says so."""
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(values, type=kind)
    offsets = np.arange(count + 1, dtype=np.int32) * (len(values) // count)
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind)


def _encodings(schema: pa.Schema) -> dict[str, str]:
    """Choose the encoding of each column that is not dictionary-encoded."""
    encodings = {
        "position": "DELTA_BINARY_PACKED",
        "logprob": "BYTE_STREAM_SPLIT",
        "entropy": "BYTE_STREAM_SPLIT",
        "beacons.list.element.vector.list.element": "BYTE_STREAM_SPLIT",
        "evicted.list.element": "DELTA_BINARY_PACKED",
    }
    encodings |= {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in _FLOAT_LISTS}
    for name in ("query", "key", "value"):
        # DuckDB reads a byte-stream split of float32 but not of float16; there it would save a tenth only.
        if name in schema.names and schema.field(name).type.value_type == pa.float32():
            encodings[f"{name}.list.element"] = "BYTE_STREAM_SPLIT"
    return encodings
