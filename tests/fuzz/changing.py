"""Traces that somebody has tampered with, told by a string of bytes how: what a fuzzer has to find is such a string.

A change is a byte that says what kind it is, and some more that say where and to what. A footer that was changed is
sealed again or its seal is broken, so that the checksum does not keep everything from the reader.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from beaconscope.trace import LayerLayout, TraceLayout
from beaconscope.trace.metadata import METADATA_KEY
from tests.trace.made import SMALL, make

_SEAL = struct.Struct("<4sI8x")

NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 255, 2**15, 2**31 - 1, 2**31, 2**63, 10**40, -(2**40), 0.5, float("nan"),
    float("inf"), -float("inf"), 1e308, "", "x", "float16", "../../x", "\x1b[2J", "[/bold]", "\ud800", "x" * 300, [],
    {}, [[]], [None], [0] * 9, {"a": 1}, [1.5, "x"], [{"layer": 0}], "1.0", "1.9", "2.0", "9" * 18 + ".0", "0.1",
)  # fmt: skip


class Script:
    """Reads numbers off a string of bytes; zeros after its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def below(self, most: int) -> int:
        """A whole number of 0 to ``most`` - 1."""
        size = max(1, (most - 1).bit_length() + 7 >> 3)
        part = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(part, "little") % most if most else 0

    def take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        self._at += count
        return part.ljust(count, b"\0")


@dataclass(frozen=True)
class Seed:
    """A sound trace: as a file, and as tables of one row group each."""

    data: bytes
    groups: tuple[pa.Table, ...]


def make_seed(layout: TraceLayout, path: Path, length: int = 24) -> Seed:
    """Make a small trace with everything in it, and room in its metadata for others."""
    kinds = [
        {
            "partner": list(range(layer.key_size)),
            "sign": [1.0] * layer.key_size,
            "frequency": [0] * layer.key_size,
            "inv_freq": [1.0],
            "scaling": 1.0,
            "dtype": "float32",
            "limit": None,
        }
        for layer in layout.layers
    ]
    heads = max(max(layer.kv_heads) for layer in layout.layers) + 1
    metadata = {
        "rotary": {"kinds": kinds, "layers": {str(layer.layer): at for at, layer in enumerate(layout.layers)}},
        "attention": {
            str(layer.layer): {
                "scaling": 0.3,
                "softcap": None,
                "sink_logit": [[0.5] * layer.group_size] * heads,
                "window": None,
                "kv_heads": heads,
            }
            for layer in layout.layers
        },
        "tokenizer": {"id": "tiny", "special_ids": [1, 2]},
        "prefill_passes": [3, 2],
        "peak_memory": {"host": 10},
        "options": {"hits": 3, "sampling": {"temperature": 0.0}, "layers": "all", "heads": "all"},
        "room": "x" * 3000,
    }
    make(layout, length).record(path, metadata=metadata)
    with pq.ParquetFile(path) as file:
        groups = tuple(file.read_row_group(number) for number in range(file.num_row_groups))
    return Seed(path.read_bytes(), groups)


def make_seeds(folder: Path) -> tuple[Seed, ...]:
    mixed = TraceLayout((LayerLayout(0, (0,), 2, 8, None), LayerLayout(1, (0,), 1, 4, 4)), "float16", 3)
    return (
        make_seed(SMALL, folder / "small.parquet"),
        make_seed(replace(SMALL, layers=SMALL.layers[:1], vector_type="float16"), folder / "half.parquet", 300),
        make_seed(mixed, folder / "mixed.parquet"),
    )


def changed(seeds: tuple[Seed, ...], script: bytes) -> bytes:
    """The file that comes of doing to a seed what the script says."""
    told = Script(script)
    seed = seeds[told.below(len(seeds))]
    if told.below(4) == 0:
        return _rewritten(seed, told)
    data = bytearray(seed.data)
    for _ in range(8):
        _CHANGES[told.below(len(_CHANGES))](data, told)
        if not told.left:
            break
    return bytes(data)


def _footer_start(data: bytearray) -> int:
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def _reseal(data: bytearray, told: Script) -> None:
    start = _footer_start(data)
    if 16 <= start < len(data) - 8:
        mark = b"BSC1" if told.below(2) else b"\0\0\0\0"
        data[start - 16 : start] = _SEAL.pack(mark, zlib.crc32(bytes(data[start:-8])))


def _any_bytes(data: bytearray, told: Script) -> None:
    if data:
        at = told.below(len(data))
        new = told.take(1 + told.below(8))
        data[at : at + len(new)] = new


def _a_bit(data: bytearray, told: Script) -> None:
    if data:
        data[told.below(len(data))] ^= 1 << told.below(8)


def _footer_bytes(data: bytearray, told: Script) -> None:
    start = _footer_start(data)
    if 0 < start < len(data) - 8:
        at = start + told.below(len(data) - 8 - start)
        new = told.take(1 + told.below(4))
        data[at : at + len(new)] = new[: len(data) - 8 - at]
        _reseal(data, told)


def _a_footer_bit(data: bytearray, told: Script) -> None:
    start = _footer_start(data)
    if 0 < start < len(data) - 8:
        data[start + told.below(len(data) - 8 - start)] ^= 1 << told.below(8)
        _reseal(data, told)


def _cut(data: bytearray, told: Script) -> None:
    at = told.below(len(data) + 1)
    del data[at : at + 1 + told.below(1 << told.below(16))]


def _doubled(data: bytearray, told: Script) -> None:
    at = told.below(len(data) + 1)
    data[at:at] = data[at : at + told.below(64)]


def _footer_length(data: bytearray, told: Script) -> None:
    data[-8:-4] = told.take(4)


def _metadata(data: bytearray, told: Script) -> None:
    """Put something nasty somewhere in the JSON, which stays as long as it was."""
    start = data.find(b'{"created"')
    end = start + _json_length(data, start) if start >= 0 else -1
    if end <= start:
        return
    tree = json.loads(data[start:end].decode("ascii", "replace"))
    tree.pop("room", None)
    spoil(tree, told)
    text = json.dumps(tree).encode()
    if told.below(16) == 0:
        text = (b"[" * 900 + text)[: end - start] if told.below(2) else text[: told.below(len(text))]
    if len(text) <= end - start:
        data[start:end] = text.ljust(end - start)
        _reseal(data, told)


def _json_length(data: bytearray, start: int) -> int:
    try:
        _, length = json.JSONDecoder().raw_decode(data[start : start + 20_000].decode("ascii", "replace"))
    except (ValueError, RecursionError):
        return 0
    return length


def spoil(tree: Any, told: Script) -> None:
    """Go down the tree for a while, and there put, take or double something."""
    node = tree
    for _ in range(8):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = keys[told.below(len(keys))]
        if isinstance(node[key], dict | list) and told.below(3):
            node = node[key]
            continue
        action = told.below(4)
        if action == 0:
            del node[key]
        elif action == 1 and isinstance(node, list):
            node.append(node[key])
        elif action == 2 and isinstance(node[key], int) and not isinstance(node[key], bool):
            node[key] += told.below(9) - 4
        else:
            node[key] = NASTY[told.below(len(NASTY))]
        return


_CHANGES: tuple[Callable[[bytearray, Script], None], ...] = (
    _any_bytes, _a_bit, _footer_bytes, _a_footer_bit, _a_footer_bit, _cut, _doubled, _footer_length, _metadata,
    _metadata,
)  # fmt: skip


def _rewritten(seed: Seed, told: Script) -> bytes:
    """The trace as pyarrow writes it once a column of it was changed."""
    name = seed.groups[0].column_names[told.below(len(seed.groups[0].column_names))]
    action = told.below(7)
    which = told.below(len(seed.groups) + 1)
    groups = []
    for number, table in enumerate(seed.groups):
        # A type is that of the whole file.
        if action >= 4 or which in (number, len(seed.groups)):
            table = _with_column(table, name, action, told)
        groups.append(table)
    if told.below(8) == 0:
        groups = groups[: told.below(len(groups) + 1)] or groups[:1]
    out = io.BytesIO()
    try:
        schema = groups[0].schema.with_metadata(_spoiled_schema_metadata(groups[0].schema.metadata, told))
        with pq.ParquetWriter(out, schema, write_statistics=["layer", "kv_head", "position"]) as writer:
            for table in groups:
                writer.write_table(table.cast(schema))
    except (pa.ArrowException, ValueError, KeyError, TypeError, OverflowError):
        return seed.data  # what cannot be written need not be read
    return out.getvalue()


def _spoiled_schema_metadata(metadata: dict[bytes, bytes], told: Script) -> dict[bytes, bytes]:
    if told.below(3):
        return metadata
    tree = json.loads(metadata[METADATA_KEY])
    spoil(tree, told)
    return {METADATA_KEY: json.dumps(tree).encode()}


def _with_column(table: pa.Table, name: str, action: int, told: Script) -> pa.Table:
    at = table.column_names.index(name)
    field = table.schema.field(at)
    column = table.column(at).combine_chunks()
    try:
        if action == 6:
            return table.remove_column(at)
        if action == 5:
            kind = _TYPES[told.below(len(_TYPES))]
            return table.set_column(at, pa.field(name, kind), pa.array(column.to_pylist(), kind))
        values = column.to_pylist()
        row = told.below(len(values)) if values else 0
        if action == 0:
            values[row] = None
        elif action == 1:
            values[row] = _other(values[row], told)
        elif action == 2:
            values = [_other(value, told) for value in values]
        elif action == 3:
            values = values[::-1]
        else:  # what is fixed in size becomes free
            kind = field.type
            if pa.types.is_fixed_size_list(kind):
                kind = pa.list_(pa.field("element", kind.value_type))
                values[row] = _other(values[row], told)
            return table.set_column(at, pa.field(name, kind), pa.array(values, kind))
        return table.set_column(at, pa.field(name, field.type), pa.array(values, field.type))
    except (pa.ArrowException, ValueError, KeyError, TypeError, OverflowError):
        return table


def _other(value: Any, told: Script) -> Any:
    """Something of about the kind of ``value``."""
    kind = told.below(6)
    if isinstance(value, list):
        if not value or kind == 0:
            return []
        if kind == 1:
            return value + value
        if kind == 2:
            return value[:-1]
        new = list(value)
        new[told.below(len(new))] = None if kind == 3 else _other(new[0], told)
        return new
    if isinstance(value, dict):
        key = list(value)[told.below(len(value))]
        return value | {key: None if kind == 0 else _other(value[key], told)}
    if isinstance(value, bool) or value is None:
        return [0] if kind == 0 else None
    if isinstance(value, int):
        return (-1, 2**15 - 1, 2**31 - 1, -(2**15), value + 1, 0)[kind]
    if isinstance(value, float | np.floating):
        return (float("nan"), float("inf"), -1.0, 1e38, 0.0, None)[kind]
    if isinstance(value, bytes):
        return (b"", b"\xff\xfe", b"\x1b[2J", b"x" * 5000, b"</think>", None)[kind]
    return ("", "think", "\x1b[2J", "x" * 5000, "prompt", None)[kind]


_TYPES = (
    pa.int8(), pa.int64(), pa.uint16(), pa.float64(), pa.float16(), pa.string(), pa.large_string(), pa.binary(),
    pa.bool_(), pa.list_(pa.int32()), pa.list_(pa.float32()), pa.large_list(pa.float32()),
    pa.list_(pa.list_(pa.int32())), pa.dictionary(pa.int8(), pa.string()),
    pa.list_(pa.struct([("query_head", pa.int16())])), pa.null(),
)  # fmt: skip
