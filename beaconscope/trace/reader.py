"""Read a trace, one head at a time.

`load_trace` reads the footer of the file only: metadata, and for each row group which head it belongs to. Everything
else is read when it is asked for, and only from the row groups and columns that hold it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from beaconscope.errors import BeaconScopeError
from beaconscope.files import os_reason
from beaconscope.trace.columns import has_gaps, one_chunk, same_kind, text_bytes
from beaconscope.trace.footer import (
    MOST_POSITIONS,
    UNREADABLE,
    check_file,
    check_rows,
    check_seal,
    damaged,
    room,
    row_groups_by_head,
)
from beaconscope.trace.metadata import METADATA_KEY, parse_metadata
from beaconscope.trace.schema import Eviction, LayerLayout, Phase, TraceLayout, parquet_schema

_TEXTS = ("token", "token_bytes", "phase")
"""Read as dictionaries, so that a text which is repeated is in memory once until its length is known."""


@dataclass(frozen=True)
class HeadTrace:
    """All that was recorded of one KV head. T positions, G query heads, M hits; arrays are read-only where possible."""

    layer: int
    kv_head: int
    position: npt.NDArray[np.int32]  # [T], 0 to T-1
    query: npt.NDArray[np.floating[Any]]  # [T, G, D], post-RoPE
    key: npt.NDArray[np.floating[Any]]  # [T, D], post-RoPE
    value: npt.NDArray[np.floating[Any]] | None  # [T, Dv]
    beacon: npt.NDArray[np.int16]  # [T, G], index into the head's current beacons, -1 for none
    beacon_similarity: npt.NDArray[np.float32]  # [T, G], cosine, nan for none
    mass_sink: npt.NDArray[np.float32]  # [T, G]
    mass_local: npt.NDArray[np.float32]  # [T, G]
    mass_distant: npt.NDArray[np.float32]  # [T, G]
    hit_position: npt.NDArray[np.int32]  # [T, G, M], by falling mass, -1 past the last
    hit_mass: npt.NDArray[np.float32]  # [T, G, M], 0 past the last


class Trace:
    """A trace on disk; make one with `load_trace`. It holds no file open and can be sent to other processes."""

    def __init__(self, path: Path, footer: pq.FileMetaData, metadata: dict[str, Any], layout: TraceLayout) -> None:
        self.path = path
        self.metadata = metadata
        """See `beaconscope.trace.metadata.TraceMetadata`."""
        self.layout = layout
        self._footer = footer
        self._schema = parquet_schema(layout)
        self._groups = row_groups_by_head(path, footer)
        self.length = check_rows(path, footer, layout, self._groups)
        """T, positions in the trace."""
        if metadata["prompt_length"] > self.length:
            raise damaged(path, "its prompt is longer than it is itself")
        self._evicted_after: dict[tuple[int, int], npt.NDArray[np.int32]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return load_trace, (self.path,)

    def __repr__(self) -> str:
        return f"Trace({str(self.path)!r}, length={self.length}, layers={list(self.layers)})"

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt; the generation begins at this position."""
        return int(self.metadata["prompt_length"])

    @property
    def layers(self) -> tuple[int, ...]:
        """Recorded layers, ascending."""
        return tuple(layer.layer for layer in self.layout.layers)

    def kv_heads(self, layer: int) -> tuple[int, ...]:
        """Recorded KV heads of a layer, ascending.

        Raises
        ------
        BeaconScopeError
            Where the layer is not in the trace.
        """
        return self._layer(layer).kv_heads

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """Every recorded (layer, KV head), in the order of the file."""
        return tuple((layer.layer, head) for layer in self.layout.layers for head in layer.kv_heads)

    @property
    def hits_per_head(self) -> int:
        """M, the most attended positions logged per query head and step."""
        return self.layout.hits

    @property
    def has_values(self) -> bool:
        """Whether any layer has its values recorded."""
        return any(layer.value_size is not None for layer in self.layout.layers)

    @property
    def whole(self) -> bool:
        """False where the recording was cut short; `cut_reason` says how."""
        return bool(self.metadata["whole"])

    @property
    def cut_reason(self) -> str | None:
        """Why the recording is not whole."""
        return self.metadata.get("cut_reason")

    @property
    def model_id(self) -> str:
        """Hub id or path of the model, empty where unknown."""
        return str(self.metadata.get("model", {}).get("id") or "")

    @property
    def prompt(self) -> str:
        """The prompt as given, before the chat template."""
        return str(self.metadata.get("prompt", ""))

    @property
    def text(self) -> str:
        """Prompt and generation as the model saw them."""
        return str(self.metadata.get("text", ""))

    @property
    def options(self) -> dict[str, Any]:
        """Every option of the recording."""
        return dict(self.metadata.get("options", {}))

    @property
    def policy(self) -> dict[str, Any]:
        """``name`` and ``params`` of what the cache evicted by."""
        return dict(self.metadata.get("policy", {}))

    @property
    def attention_over(self) -> str:
        """Over what hits and masses are taken: ``everything`` or ``what the cache held``."""
        return str(self.metadata.get("attention_over", "everything"))

    @property
    def tokens(self) -> pd.DataFrame:
        """One row per position: position, token_id, token, token_bytes, phase, logprob, entropy."""
        columns = ["position", "token_id", "token", "token_bytes", "phase", "logprob", "entropy"]
        table = self._read(*self.heads[0], columns)
        place = columns.index("token_bytes")
        table = table.set_column(place, "token_bytes", table.column(place).cast(pa.binary()))
        frame: pd.DataFrame = table.to_pandas()
        if not frame["phase"].isin(get_args(Phase)).all():
            raise damaged(self.path, "it has phases other than prompt, think and answer")
        return frame

    def head(self, layer: int, kv_head: int) -> HeadTrace:
        """Read what was recorded of one KV head.

        Raises
        ------
        BeaconScopeError
            Where the head is not in the trace or the file is damaged.
        """
        shape = self._layer(layer)
        groups = shape.group_size
        names = ["position", "query", "key", "beacon", "beacon_similarity", "mass_sink", "mass_local", "mass_distant"]
        names += ["hit_head", "hit_position", "hit_mass"] + (["value"] if shape.value_size is not None else [])
        table = self._read(layer, kv_head, names)

        def per_group(name: str) -> npt.NDArray[Any]:
            return self._array(table, name, (groups,))

        beacon = self._array(table, "beacon", (groups,), null=-1).astype(np.int16, copy=False)
        hit_position, hit_mass = self._hits(table, shape)
        return HeadTrace(
            layer=layer,
            kv_head=kv_head,
            position=np.asarray(one_chunk(table, "position")),
            query=self._array(table, "query", (groups, shape.key_size)),
            key=self._array(table, "key", (shape.key_size,)),
            value=None if shape.value_size is None else self._array(table, "value", (shape.value_size,)),
            beacon=beacon,
            beacon_similarity=self._array(table, "beacon_similarity", (groups,), null=np.nan),
            mass_sink=per_group("mass_sink"),
            mass_local=per_group("mass_local"),
            mass_distant=per_group("mass_distant"),
            hit_position=hit_position,
            hit_mass=hit_mass,
        )

    def beacons(self, layer: int, kv_head: int) -> pd.DataFrame:
        """Read the changes of a head's beacons.

        Returns
        -------
        DataFrame
            One row per beacon and change: ``position`` of the change; ``query_head`` in its group; ``beacon``, its
            index among those of its query head, which `HeadTrace.beacon` refers to from the next position on;
            ``source``, the position it was taken from, -1 for a centroid; ``members``, queries assigned to it since
            the last change; ``vector``, a float32 array [D] or None where ``source`` gives it. A change replaces all
            beacons of the query heads that it names.

        Raises
        ------
        BeaconScopeError
            Where the head is not in the trace or the file is damaged.
        """
        table = self._read(layer, kv_head, ["position", "beacons"])
        column = one_chunk(table, "beacons")
        changed = np.flatnonzero(np.asarray(column.is_valid()))
        lists = column.drop_null()
        position = np.repeat(changed, np.asarray(lists.value_lengths()).astype(np.int64)).astype(np.int32)
        structs = lists.flatten()
        query_head = np.asarray(structs.field("query_head"))
        source = np.asarray(structs.field("source").fill_null(-1))
        shape = self._layer(layer)
        vectors = structs.field("vector")
        if len(source) and (
            source.min() < -1
            or source.max() >= self.length
            or query_head.min() < 0
            or query_head.max() >= shape.group_size
            or np.any(np.asarray(vectors.value_lengths().fill_null(0))[source < 0] != shape.key_size)
        ):
            raise damaged(self.path, "its beacons come from nowhere")
        return pd.DataFrame(
            {
                "position": position,
                "query_head": query_head,
                "beacon": pd.DataFrame({"p": position, "h": query_head})
                .groupby(["p", "h"])
                .cumcount()
                .astype(np.int16),
                "source": source,
                "members": np.asarray(structs.field("members")),
                "vector": pd.Series(
                    [None if v is None else np.array(v, np.float32) for v in vectors.to_pylist()], dtype=object
                ),
            }
        )

    def evictions(self, layer: int, kv_head: int) -> list[Eviction]:
        """Read what each compression dropped from a head, in order.

        Raises
        ------
        BeaconScopeError
            Where the head is not in the trace or the file is damaged.
        """
        table = self._read(layer, kv_head, ["position", "evicted"])
        column = one_chunk(table, "evicted")
        fired = np.flatnonzero(np.asarray(column.is_valid()))
        lists = column.drop_null()
        ends = np.cumsum(np.asarray(lists.value_lengths()).astype(np.int64))
        evicted = np.asarray(lists.flatten())
        evictions = [
            Eviction(int(position), kv_head, part)
            for position, part in zip(fired, np.split(evicted, ends[:-1]) if len(ends) else [], strict=True)
        ]
        for eviction in evictions:
            dropped = eviction.evicted
            if len(dropped) and (dropped[0] < 0 or dropped[-1] > eviction.position or np.any(np.diff(dropped) <= 0)):
                raise damaged(self.path, f"at position {eviction.position} it evicts what was not there")
        return evictions

    def kept(self, layer: int, kv_head: int, position: int) -> npt.NDArray[np.int32]:
        """Give the positions that a head's cache holds after the step at ``position``, ascending.

        What a sliding layer drops by itself is no eviction, and counts as held.

        Raises
        ------
        BeaconScopeError
            Where the head or the position is not in the trace.
        """
        if not 0 <= position < self.length:
            raise BeaconScopeError(f"position {position} is not in {self.path}; it has 0 to {self.length - 1}")
        key = (layer, kv_head)
        if key not in self._evicted_after:
            after = np.full(self.length, MOST_POSITIONS, np.int32)
            # Backwards, so that a position which is dropped twice is gone from the first time on.
            for eviction in reversed(self.evictions(layer, kv_head)):
                after[eviction.evicted] = eviction.position
            self._evicted_after[key] = after
        return np.flatnonzero(self._evicted_after[key][: position + 1] > position).astype(np.int32)

    def hits(self, layer: int, kv_head: int) -> pd.DataFrame:
        """Read the most attended positions of a head.

        Returns
        -------
        DataFrame
            position, query_head, rank (0 is the most attended), hit_position, mass.

        Raises
        ------
        BeaconScopeError
            Where the head is not in the trace or the file is damaged.
        """
        shape = self._layer(layer)
        table = self._read(layer, kv_head, ["position", "hit_head", "hit_position", "hit_mass"])
        row, head, rank = self._hit_places(table, shape)
        return pd.DataFrame(
            {
                "position": row.astype(np.int32),
                "query_head": head,
                "rank": rank.astype(np.int16),
                "hit_position": np.asarray(one_chunk(table, "hit_position").flatten()),
                "mass": np.asarray(one_chunk(table, "hit_mass").flatten()),
            }
        )

    def _layer(self, layer: int) -> LayerLayout:
        try:
            return self.layout.of(layer)
        except KeyError:
            raise BeaconScopeError(f"layer {layer} is not in {self.path}; it has {_listed(self.layers)}") from None

    def _read(self, layer: int, kv_head: int, columns: Sequence[str]) -> pa.Table:
        """Read columns of one head, and check that they are that head's."""
        if kv_head not in self.kv_heads(layer):
            raise BeaconScopeError(
                f"KV head {kv_head} of layer {layer} is not in {self.path}; it has {_listed(self.kv_heads(layer))}"
            )
        groups = self._groups[layer, kv_head]
        try:
            with (
                pa.OSFile(os.fsencode(self.path)) as source,
                pq.ParquetFile(
                    source, metadata=self._footer, page_checksum_verification=True, read_dictionary=list(_TEXTS)
                ) as file,
            ):
                table = file.read_row_groups(groups, columns=list(columns))
            table.validate(full=True)
        except FileNotFoundError as error:
            raise BeaconScopeError(f"{self.path} is gone; put it back and run this again") from error
        except UNREADABLE as error:
            raise damaged(self.path, os_reason(error)) from error
        for name in columns:
            column = one_chunk(table, name)
            if has_gaps(column, self._schema.field(name)):
                raise damaged(self.path, f"{name} has gaps")
            if name in _TEXTS and text_bytes(column) > room(self.path):
                raise damaged(self.path, f"{name} is far longer than a file of its size can hold")
        if not np.array_equal(np.asarray(one_chunk(table, "position")), np.arange(self.length)):
            raise damaged(
                self.path, f"the positions of layer {layer}, KV head {kv_head} are not 0 to {self.length - 1}"
            )
        return table

    def _array(self, table: pa.Table, name: str, shape: tuple[int, ...], null: float | None = None) -> npt.NDArray[Any]:
        """Turn a column of lists into an array [T, *shape]."""
        column = one_chunk(table, name)
        width = int(np.prod(shape))
        lengths = column.value_lengths()
        if column.null_count or np.any(np.asarray(lengths) != width):
            raise damaged(self.path, f"rows of {name} do not have the {width} entries that its layout says")
        items = column.flatten()
        if items.null_count:
            if null is None:
                raise damaged(self.path, f"{name} has gaps")
            items = items.fill_null(pa.scalar(null, items.type))
        return np.asarray(items).reshape(self.length, *shape)

    def _hit_places(
        self, table: pa.Table, shape: LayerLayout
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int16], npt.NDArray[np.int64]]:
        """Row, query head and rank of each hit, in the order of the file."""
        lengths = [
            np.asarray(one_chunk(table, name).value_lengths()) for name in ("hit_head", "hit_position", "hit_mass")
        ]
        head = np.asarray(one_chunk(table, "hit_head").flatten())
        position = np.asarray(one_chunk(table, "hit_position").flatten())
        if any(np.any(other != lengths[0]) for other in lengths[1:]):
            raise damaged(self.path, "its hits have heads, positions and masses in different numbers")
        if len(head) and (head.min() < 0 or head.max() >= shape.group_size):
            raise damaged(self.path, "its hits name query heads that are not there")
        if len(position) and (position.min() < 0 or position.max() >= self.length):
            raise damaged(self.path, "its hits name positions that are not there")
        row = np.repeat(np.arange(self.length), lengths[0])
        new = np.ones(len(head), np.bool_)
        new[1:] = (np.diff(row) != 0) | (np.diff(head) != 0)
        start = np.flatnonzero(new)
        rank = np.arange(len(head)) - np.repeat(start, np.diff(np.append(start, len(head))))
        if len(rank) and rank.max() >= self.layout.hits:
            raise damaged(self.path, f"it has more than {self.layout.hits} hits for a query head")
        return row, head, rank

    def _hits(self, table: pa.Table, shape: LayerLayout) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        row, head, rank = self._hit_places(table, shape)
        hit_position = np.full((self.length, shape.group_size, self.layout.hits), -1, np.int32)
        hit_mass = np.zeros(hit_position.shape, np.float32)
        hit_position[row, head, rank] = np.asarray(one_chunk(table, "hit_position").flatten())
        hit_mass[row, head, rank] = np.asarray(one_chunk(table, "hit_mass").flatten())
        return hit_position, hit_mass


def load_trace(path: str | Path) -> Trace:
    """Open a trace.

    Reads the end of the file only, whatever its size; see `Trace` for the rest.

    Raises
    ------
    BeaconScopeError
        Where the file is missing, cut, no trace, of a newer format, or contradicts itself.
    """
    path = Path(path)
    check_file(path)
    try:
        return _open(path)
    except UNREADABLE as error:
        raise damaged(path, os_reason(error)) from error


def _open(path: Path) -> Trace:
    check_seal(path)
    with pa.OSFile(os.fsencode(path)) as source, pq.ParquetFile(source) as file:
        footer = file.metadata
        columns = file.schema_arrow
    described = footer.metadata or {}
    if METADATA_KEY not in described:
        raise BeaconScopeError(f"{path} is a Parquet file but no BeaconScope trace; give a file that `record` wrote")
    metadata, layout = parse_metadata(described[METADATA_KEY], path)
    for field in parquet_schema(layout):
        if field.name not in columns.names:
            raise damaged(path, f"column {field.name} is missing")
        found = columns.field(field.name).type
        if not same_kind(found, field.type):
            raise damaged(path, f"column {field.name} is {found}, not {field.type}")
    return Trace(path, footer, metadata, layout)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
