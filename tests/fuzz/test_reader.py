"""Traces that somebody has tampered with are read as they are, or refused in one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beaconscope.errors import BeaconScopeError
from beaconscope.trace import Journal, journal_path, load_trace, recover
from beaconscope.trace.metadata import METADATA_KEY
from tests.fuzz.changing import Seed, changed, make_seeds
from tests.fuzz.reading import read_everything, refused
from tests.trace.made import METADATA, SMALL, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def seeds(folder: Path) -> tuple[Seed, ...]:
    return make_seeds(folder)


def test_seeds_are_sound(seeds: tuple[Seed, ...], folder: Path) -> None:
    for seed in seeds:
        (folder / "sound.parquet").write_bytes(seed.data)
        read_everything(folder / "sound.parquet")


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.binary(max_size=40))
def test_a_trace_that_was_tampered_with(seeds: tuple[Seed, ...], folder: Path, script: bytes) -> None:
    path = folder / "changed.parquet"
    path.write_bytes(changed(seeds, script))
    refused(path)


@pytest.fixture(scope="module")
def seed(seeds: tuple[Seed, ...]) -> Seed:
    return seeds[0]


def rewritten(seed: Seed, path: Path, change: Any = None, **columns: pa.Array) -> Path:
    """A trace with one head, of which some columns or metadata are others."""
    table = seed.groups[0]
    for name, column in columns.items():
        at = table.column_names.index(name)
        table = table.set_column(at, pa.field(name, column.type), column)
    metadata = json.loads(table.schema.metadata[METADATA_KEY])
    metadata["layout"]["layers"] = metadata["layout"]["layers"][:1]
    metadata["layout"]["layers"][0]["kv_heads"] = [0]
    if change is not None:
        change(metadata)
    schema = table.schema.with_metadata({METADATA_KEY: json.dumps(metadata).encode()})
    pq.write_table(table.cast(schema), path, compression="zstd")
    return path


class TestBombs:
    """Small files that ask for much memory are refused before it is given."""

    def test_the_copy_is_read(self, seed: Seed, tmp_path: Path) -> None:
        assert refused(rewritten(seed, tmp_path / "t.parquet")) is None

    def test_hits_that_the_layout_has_room_for_but_no_memory(self, seed: Seed, tmp_path: Path) -> None:
        rows = 8_000
        copies = seed.groups[0].take([0] * rows).combine_chunks()
        copies = copies.set_column(
            copies.column_names.index("position"),
            copies.schema.field("position"),
            pa.array(np.arange(rows, dtype=np.int32)),
        )

        def many_hits(metadata: dict[str, Any]) -> None:
            metadata["layout"]["hits"] = 1024

        path = rewritten(Seed(b"", (copies,)), tmp_path / "t.parquet", many_hits)
        assert path.stat().st_size < 2_000_000
        assert "far more than a file of its size can hold" in str(refused(path))

    def test_a_long_text_that_every_row_repeats(self, seed: Seed, tmp_path: Path) -> None:
        rows = seed.groups[0].num_rows
        text = pa.array([b"x" * 8_000_000] * rows, pa.binary())
        path = rewritten(seed, tmp_path / "t.parquet", token_bytes=text)
        assert path.stat().st_size < 2_000_000
        assert "token_bytes is far longer" in str(refused(path))

    def test_lists_that_are_far_too_long(self, seed: Seed, tmp_path: Path) -> None:
        rows = seed.groups[0].num_rows
        lists = pa.array([[0] * 1_000_000] * rows, pa.list_(pa.field("element", pa.int32())))
        path = rewritten(seed, tmp_path / "t.parquet", evicted=lists)
        assert path.stat().st_size < 2_000_000
        assert "far more than a file of its size can hold" in str(refused(path))

    @pytest.mark.parametrize("length", [2**31 - 1, 2**32 - 1, 10**6])
    def test_a_footer_that_says_it_is_long(self, seed: Seed, tmp_path: Path, length: int) -> None:
        data = bytearray(seed.data)
        data[-8:-4] = struct.pack("<I", length)
        (tmp_path / "t.parquet").write_bytes(data)
        assert "is damaged" in str(refused(tmp_path / "t.parquet"))


class TestGaps:
    """Nulls where a trace has none."""

    @pytest.mark.parametrize("name", ["token_id", "token", "token_bytes", "phase", "query", "hit_head", "hit_mass"])
    def test_in_a_column_or_its_lists(self, seed: Seed, tmp_path: Path, name: str) -> None:
        column = seed.groups[0].column(name).combine_chunks()
        values = column.to_pylist()
        if isinstance(values[7], list):
            values[7] = [None] * len(values[7])
        else:
            values[7] = None
        kind = column.type
        if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
            kind = pa.list_(pa.field("element", kind.value_type))
        path = rewritten(seed, tmp_path / "t.parquet", **{name: pa.array(values, kind)})
        assert f"{name} has gaps" in str(refused(path))

    def test_a_phase_that_is_none(self, seed: Seed, tmp_path: Path) -> None:
        column = pa.array(["dream"] * seed.groups[0].num_rows)
        assert "phases other than" in str(refused(rewritten(seed, tmp_path / "t.parquet", phase=column)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), new=st.binary(min_size=1, max_size=9), data=st.data())
def test_a_journal_that_was_tampered_with(tmp_path_factory: Any, place: float, new: bytes, data: Any) -> None:
    """It is recovered as far as it is sound, or refused in one line and left alone."""
    output = tmp_path_factory.mktemp("journal") / "t.parquet"
    with Journal.create(output, SMALL, METADATA) as journal:
        for first in range(0, 24, 8):
            make().append(journal, first, first + 8)
    files = sorted(path for path in journal_path(output).iterdir() if path.name != "lock")
    path = data.draw(st.sampled_from(files))
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    content[at : at + len(new)] = new
    path.write_bytes(content)
    try:
        found = load_trace(recover(output))
    except BeaconScopeError:
        assert journal_path(output).is_dir()
        return
    assert found.length in (8, 16, 24)
