"""Arrow IPC streams that survive being cut anywhere.

A stream is a schema and then batches, each one message. A message is written with one system call after another and
nothing is held back in this process, so what has been appended is safe from kill -9; a cut tears the last message only.
Nothing is read that is not whole: `scan_layer` walks the messages and stops at the first that is torn or out of turn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from beaconscope.trace.schema import token_schema

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class StreamWriter:
    """Writes one stream, unbuffered."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - held as long as the recording runs
        self._write(schema.serialize())

    def write(self, batch: pa.RecordBatch) -> None:
        """Hand a batch to the operating system.

        Raises
        ------
        OSError
            Where it does not take all of it.
        """
        self._write(batch.serialize())

    def close(self, *, whole: bool) -> None:
        """Close the file, with the mark of the stream's end where it is ``whole``."""
        with closing(self._file):
            if whole:
                self._write(_END_OF_STREAM)

    def _write(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            # A disk that is nearly full takes a part of it first, and refuses the next call.
            rest = rest[self._file.write(rest) :]


@dataclass(frozen=True)
class LayerIndex:
    """Where the batches of a layer's stream lie. C chunks of H heads each."""

    path: Path
    schema: pa.Schema
    first: np.ndarray[Any, np.dtype[np.int64]]  # [C], first position of a chunk
    rows: np.ndarray[Any, np.dtype[np.int64]]  # [C]
    offset: np.ndarray[Any, np.dtype[np.int64]]  # [C, H], of a batch in the file
    size: np.ndarray[Any, np.dtype[np.int64]]  # [C, H], bytes

    @property
    def length(self) -> int:
        """Positions that every head has."""
        return int(self.first[-1] + self.rows[-1]) if len(self.first) else 0

    def read(self, head: int, length: int) -> Iterator[pa.RecordBatch]:
        """Read the first ``length`` rows of a head, given by its place, batch by batch in order."""
        with open(self.path, "rb") as file:
            for first, rows, offset, size in zip(
                self.first, self.rows, self.offset[:, head], self.size[:, head], strict=True
            ):
                if first >= length:
                    return
                file.seek(int(offset))
                message = pa.ipc.read_message(pa.py_buffer(file.read(int(size))))
                batch = pa.ipc.read_record_batch(message, self.schema)
                yield batch.slice(0, min(int(rows), length - int(first)))


def scan_layer(path: Path, schema: pa.Schema, kv_heads: Sequence[int]) -> LayerIndex:
    """Find the batches of a layer's stream, up to where it is torn."""
    chunks: list[tuple[int, int]] = []
    places: list[tuple[int, int]] = []
    position = 0
    expected_rows = 0
    for offset, size, batch in _messages(path, schema):
        head = len(places) % len(kv_heads)
        if head == 0:
            expected_rows = batch.num_rows
        if not _in_turn(batch, position, expected_rows, kv_heads[head]):
            break
        places.append((offset, size))
        if head == len(kv_heads) - 1:
            chunks.append((position, expected_rows))
            position += expected_rows
    whole = len(chunks) * len(kv_heads)
    place = np.array(places[:whole], np.int64).reshape(len(chunks), len(kv_heads), 2)
    chunk = np.array(chunks, np.int64).reshape(len(chunks), 2)
    return LayerIndex(path, schema, first=chunk[:, 0], rows=chunk[:, 1], offset=place[..., 0], size=place[..., 1])


def read_tokens(path: Path) -> pa.Table:
    """Read the token stream, up to where it is torn."""
    batches = []
    position = 0
    for _, _, batch in _messages(path, token_schema()):
        if not _consecutive(batch, position):
            break
        batches.append(batch)
        position += batch.num_rows
    return pa.Table.from_batches(batches, token_schema()).combine_chunks()


def _messages(path: Path, schema: pa.Schema) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Walk the batches of a stream with their place: offset and size in bytes."""
    # A stream that is not there was torn before its first byte.
    if not path.exists():
        return
    with pa.OSFile(os.fsencode(path)) as file:
        try:
            if not pa.ipc.read_schema(pa.ipc.read_message(file)).equals(schema):
                return
            while True:
                offset = file.tell()
                message = pa.ipc.read_message(file)
                batch = pa.ipc.read_record_batch(message, schema)
                batch.validate(full=True)
                yield offset, file.tell() - offset, batch
        except (EOFError, OSError, pa.ArrowException):
            return


def _in_turn(batch: pa.RecordBatch, position: int, rows: int, kv_head: int) -> bool:
    heads = batch.column("kv_head").to_numpy()
    return batch.num_rows == rows and _consecutive(batch, position) and bool(np.all(heads == kv_head))


def _consecutive(batch: pa.RecordBatch, position: int) -> bool:
    positions = batch.column("position").to_numpy()
    return batch.num_rows > 0 and bool(np.array_equal(positions, np.arange(position, position + len(positions))))
