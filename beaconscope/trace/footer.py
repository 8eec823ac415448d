"""The footer of a trace's file: sealed when written; checked before anything it claims is believed.

Parquet has checksums for pages but none for the footer, and pyarrow may end the whole process over a footer with a
flipped byte. So sixteen bytes that Parquet's readers skip stand before it: a mark, the CRC-32 of the footer, and zeros.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from beaconscope.errors import BeaconScopeError
from beaconscope.files import os_reason
from beaconscope.trace.folder import SUFFIX, journal_path
from beaconscope.trace.schema import LayerLayout, TraceLayout, row_bytes

_MAGIC = b"PAR1"
_SEAL = struct.Struct("<4sI8x")
_SEAL_MARK = b"BSC1"
_TAIL = struct.Struct("<I4s")
"""Length of the footer, and the magic bytes."""
MOST_POSITIONS = int(np.iinfo(np.int32).max)
_MOST_EXPANSION = 100
"""Times that a head in memory may be larger than the whole file. Recordings of a single head come to ten at most; what
claims more is made to fill the memory."""
_LEAST_ROOM = 64 << 20
"""Bytes that a head may take whatever the size of the file: tiny files of repeated rows compress well."""

UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError, pa.ArrowException)
"""What pyarrow raises for bytes that are no Parquet; a footer without a seal may hold anything."""


def check_file(path: Path) -> None:
    """Refuse a path that cannot be a whole Parquet file.

    Raises
    ------
    BeaconScopeError
        Saying in plain words why.
    """
    journal = journal_path(path)
    rescue = f"run `beaconscope recover {path}`" if journal.is_dir() else None
    try:
        if path.is_dir():
            if path.name.endswith(SUFFIX):
                raise BeaconScopeError(f"{path} is the journal of a recording; run `beaconscope recover {path}`")
            raise BeaconScopeError(f"{path} is a folder; give the trace in it")
        with path.open("rb") as file:
            head = file.read(4)
            size = file.seek(0, 2)
            file.seek(max(0, size - 4))
            tail = file.read(4)
    except FileNotFoundError as error:
        what = f"{path} is not finished" if rescue else f"{path} does not exist"
        raise BeaconScopeError(f"{what}; {rescue or 'give the path of a trace'}") from error
    except OSError as error:
        raise BeaconScopeError(f"cannot read {path}: {os_reason(error)}") from error
    if head != _MAGIC:
        raise BeaconScopeError(f"{path} is no trace (no Parquet file); give a file that `record` wrote")
    if tail != _MAGIC or size < 12:
        raise BeaconScopeError(f"{path} is cut short; {rescue or 'copy it again from where it came, or record again'}")


def seal(path: Path) -> None:
    """Put the checksum before the footer of a Parquet file."""
    with path.open("r+b") as file:
        footer, tail = _read_footer(file)
        file.seek(-len(footer) - _TAIL.size, os.SEEK_END)
        file.write(_SEAL.pack(_SEAL_MARK, zlib.crc32(footer)) + footer + tail)


def check_seal(path: Path) -> None:
    """Refuse a footer that is not what was written; one without a seal was written by another program.

    Raises
    ------
    BeaconScopeError
        Where the checksum is wrong.
    """
    with path.open("rb") as file:
        footer, tail = _read_footer(file)
        begin = file.seek(0, os.SEEK_END) - len(footer) - len(tail) - _SEAL.size
        if begin < 0:
            return
        file.seek(begin)
        mark, checksum = _SEAL.unpack(file.read(_SEAL.size))
    if mark == _SEAL_MARK and checksum != zlib.crc32(footer):
        raise damaged(path, "the checksum of its footer is wrong")


def _read_footer(file: BinaryIO) -> tuple[bytes, bytes]:
    """Read the footer of a Parquet file and the eight bytes that follow it."""
    size = file.seek(-_TAIL.size, os.SEEK_END)
    tail = file.read(_TAIL.size)
    length, _ = _TAIL.unpack(tail)
    if length > size:
        raise ValueError("its footer is longer than the file")
    file.seek(size - length)
    return file.read(length), tail


def row_groups_by_head(path: Path, footer: pq.FileMetaData) -> dict[tuple[int, int], list[int]]:
    """Find the row groups of each (layer, KV head) by their statistics, in order.

    Raises
    ------
    BeaconScopeError
        Where one does not say which head it holds.
    """
    names = [footer.schema.column(i).path for i in range(footer.num_columns)]
    try:
        layer_column, head_column = names.index("layer"), names.index("kv_head")
    except ValueError as error:
        raise damaged(path, "columns layer and kv_head are missing") from error
    groups: dict[tuple[int, int], list[int]] = {}
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        place = []
        for column in (layer_column, head_column):
            statistics = group.column(column).statistics
            if statistics is None or not statistics.has_min_max or statistics.min != statistics.max:
                raise damaged(path, f"row group {number} does not say which one head it holds")
            place.append(int(statistics.min))
        groups.setdefault((place[0], place[1]), []).append(number)
    return groups


def check_rows(
    path: Path, footer: pq.FileMetaData, layout: TraceLayout, groups: dict[tuple[int, int], list[int]]
) -> int:
    """Hold the sizes that the footer claims against the layout, before anything is read; T, the positions of each head.

    Raises
    ------
    BeaconScopeError
        Where heads are missing or of different lengths, or a size is not that of the layout or of any honest file.
    """
    heads = [(layer, head) for layer in layout.layers for head in layer.kv_heads]
    if set(groups) != {(layer.layer, head) for layer, head in heads}:
        raise damaged(path, "its heads are not those that its metadata name")
    lengths = {sum(footer.row_group(number).num_rows for number in numbers) for numbers in groups.values()}
    length: int = lengths.pop()
    if lengths or not 0 < length < MOST_POSITIONS:
        raise damaged(path, "its heads have different numbers of positions")
    columns = {footer.schema.column(i).path: i for i in range(footer.num_columns)}
    ragged = [place for name, place in columns.items() if name.startswith(("hit_", "beacons.", "evicted."))]
    for layer, head in heads:
        claimed = length * row_bytes(layer, layout)
        for number in groups[layer.layer, head]:
            group = footer.row_group(number)
            claimed += group.total_byte_size + sum(8 * group.column(place).num_values for place in ragged)
        if claimed > room(path):
            raise damaged(path, f"it claims {claimed:,} bytes for one head, far more than a file of its size can hold")
    for layer, head in heads:
        for number in groups[layer.layer, head]:
            group = footer.row_group(number)
            for name, size in _list_sizes(layer).items():
                column = columns.get(f"{name}.list.element")
                if column is None or group.column(column).num_values != group.num_rows * size:
                    raise damaged(path, f"{name} in row group {number} is not of the size that its metadata name")
    return length


def room(path: Path) -> int:
    """Bytes of memory that what is read of a head may take."""
    return max(_LEAST_ROOM, _MOST_EXPANSION * path.stat().st_size)


def _list_sizes(layer: LayerLayout) -> dict[str, int]:
    """Lengths of the lists that a reader gives memory for by the layout."""
    return {"query": layer.group_size * layer.key_size, "key": layer.key_size, "beacon": layer.group_size}


def damaged(path: Path, what: str) -> BeaconScopeError:
    """Make the error for a trace that contradicts itself."""
    return BeaconScopeError(f"{path} is damaged: {what}; copy it again from where it came, or record again")
