from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beaconscope.errors import BeaconScopeError
from beaconscope.trace import Journal, load_trace
from beaconscope.trace.metadata import METADATA_KEY
from tests.trace.made import METADATA, SMALL, make


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make().record(tmp_path_factory.mktemp("trace") / "trace.parquet")


def refused(path: Path) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(BeaconScopeError) as error:
        load_trace(path)
    text = str(error.value)
    assert str(path) in text
    assert "\n" not in text
    return text


def rewritten(path: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a trace with other metadata, in the same row groups."""
    with pq.ParquetFile(path) as file:
        metadata = json.loads(file.schema_arrow.metadata[METADATA_KEY])
        change(metadata)
        schema = file.schema_arrow.with_metadata({METADATA_KEY: json.dumps(metadata).encode()})
        with pq.ParquetWriter(target, schema) as writer:
            for group in range(file.num_row_groups):
                writer.write_table(file.read_row_group(group).cast(schema))
    return target


class TestFilesThatAreNoTrace:
    def test_missing(self, tmp_path: Path) -> None:
        assert "does not exist" in refused(tmp_path / "trace.parquet")

    def test_a_folder(self, tmp_path: Path) -> None:
        assert "is a folder" in refused(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"PAR", b"hello world, I am a text", b"\0" * 5000, b"PAR1PAR1"])
    def test_something_else(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x").write_bytes(content)
        refused(tmp_path / "x")

    def test_another_parquet_file(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
        assert "no BeaconScope trace" in refused(tmp_path / "x.parquet")

    def test_a_journal(self, tmp_path: Path) -> None:
        output = tmp_path / "trace.parquet"
        with Journal.create(output, SMALL, METADATA) as journal:
            make().append(journal, 0, 8)
        assert f"{output} is not finished; run `beaconscope recover {output}`" in refused(output)
        assert "beaconscope recover" in refused(tmp_path / "trace.parquet.journal")


class TestDamage:
    @pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.999])
    def test_cut(self, path: Path, tmp_path: Path, share: float) -> None:
        data = path.read_bytes()
        cut = tmp_path / "cut.parquet"
        cut.write_bytes(data[: max(5, int(len(data) * share))])
        assert "is cut short" in refused(cut)
        (tmp_path / "cut.parquet.journal").mkdir()
        assert f"run `beaconscope recover {cut}`" in refused(cut)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(place=st.floats(0, 1, exclude_max=True), value=st.binary(min_size=1, max_size=9))
    def test_changed_bytes_never_give_other_numbers(
        self, path: Path, tmp_path: Path, place: float, value: bytes
    ) -> None:
        """GIVEN a file with some bytes changed WHEN it is read THEN it is refused or says what it always said."""
        data = bytearray(path.read_bytes())
        start = int(place * len(data))
        data[start : start + len(value)] = value[: len(data) - start]
        damaged = tmp_path / "damaged.parquet"
        damaged.write_bytes(data)
        expected = make().layers[1]
        try:
            head = load_trace(damaged).head(3, 1)
        except BeaconScopeError:
            return
        np.testing.assert_array_equal(head.query, expected.query[:, 0])
        np.testing.assert_array_equal(head.hit_position, expected.hit_position[:, 0])

    def test_rows_left_out(self, path: Path, tmp_path: Path) -> None:
        schema = pq.read_schema(path)
        with pq.ParquetFile(path) as file, pq.ParquetWriter(tmp_path / "x.parquet", schema) as writer:
            for group in range(file.num_row_groups):
                writer.write_table(file.read_row_group(group).slice(0, 40 - group).cast(schema))
        assert "different numbers of positions" in refused(tmp_path / "x.parquet")

    def test_heads_mixed(self, path: Path, tmp_path: Path) -> None:
        pq.write_table(pq.read_table(path), tmp_path / "x.parquet")
        assert "which one head" in refused(tmp_path / "x.parquet")

    @pytest.mark.parametrize("column", ["query", "phase", "hit_mass", "beacons", "evicted"])
    def test_columns_left_out(self, path: Path, tmp_path: Path, column: str) -> None:
        with pq.ParquetFile(path) as file:
            tables = [file.read_row_group(group).drop_columns([column]) for group in range(file.num_row_groups)]
        with pq.ParquetWriter(tmp_path / "x.parquet", tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)
        assert f"column {column} is missing" in refused(tmp_path / "x.parquet")

    def test_positions_out_of_order(self, path: Path, tmp_path: Path) -> None:
        schema = pq.read_schema(path)
        with pq.ParquetFile(path) as file, pq.ParquetWriter(tmp_path / "x.parquet", schema) as writer:
            for group in range(file.num_row_groups):
                writer.write_table(file.read_row_group(group).sort_by([("position", "descending")]).cast(schema))
        with pytest.raises(BeaconScopeError, match="positions of layer 0, KV head 0"):
            load_trace(tmp_path / "x.parquet").head(0, 0)


def _set(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda metadata: metadata.update(changes)


class TestMetadata:
    def test_a_copy_with_the_same_metadata_is_read(self, path: Path, tmp_path: Path) -> None:
        assert load_trace(rewritten(path, tmp_path / "x.parquet", lambda metadata: None)).length == 40

    def test_a_newer_minor_version_with_new_keys_is_read(self, path: Path, tmp_path: Path) -> None:
        copy = rewritten(path, tmp_path / "x.parquet", _set(format_version="1.7", mood="good"))
        assert load_trace(copy).metadata["mood"] == "good"

    @pytest.mark.parametrize("version", ["2.0", "10.3"])
    def test_a_newer_major_version(self, path: Path, tmp_path: Path, version: str) -> None:
        copy = rewritten(path, tmp_path / "x.parquet", _set(format_version=version))
        assert f"trace format {version}, newer than this beaconscope reads (1.x); upgrade beaconscope" in refused(copy)

    @pytest.mark.parametrize(
        ("changes", "names"),
        [
            ({"format_version": 1}, "format_version"),
            ({"format_version": "one"}, "format_version"),
            ({"prompt_length": "5"}, "prompt_length"),
            ({"prompt_length": True}, "prompt_length"),
            ({"prompt_length": -1}, "prompt_length"),
            ({"prompt_length": 41}, "prompt"),
            ({"whole": "yes"}, "whole"),
            ({"model": []}, "model"),
            ({"timings": {"decode_seconds": "long"}}, "timings.decode_seconds"),
            ({"timings": {"decode_seconds": 10**400}}, "timings.decode_seconds"),
            ({"peak_memory": {"host": -(10**400)}}, "peak_memory.host"),
            ({"layout": {}}, "layout"),
            ({"layout": None}, "layout"),
            ({"layout": {"vector_type": "float32", "hits": 3, "layers": []}}, "layout"),
            ({"layout": {"vector_type": "float64", "hits": 3, "layers": [1]}}, "layout"),
        ],
    )
    def test_nonsense(self, path: Path, tmp_path: Path, changes: dict[str, Any], names: str) -> None:
        assert names in refused(rewritten(path, tmp_path / "x.parquet", _set(**changes)))

    @pytest.mark.parametrize("key", ["key_size", "group_size", "value_size"])
    @pytest.mark.parametrize("size", [7, 60_000, 10**12])
    def test_sizes_that_the_columns_do_not_have(self, path: Path, tmp_path: Path, key: str, size: int) -> None:
        def change(metadata: dict[str, Any]) -> None:
            metadata["layout"]["layers"][0][key] = size
            metadata["layout"]["layers"][1][key] = size

        copy = rewritten(path, tmp_path / "x.parquet", change)
        with pytest.raises(BeaconScopeError):
            load_trace(copy).head(0, 0)

    def test_heads_that_are_not_there(self, path: Path, tmp_path: Path) -> None:
        def change(metadata: dict[str, Any]) -> None:
            metadata["layout"]["layers"][0]["kv_heads"] = [0, 4]

        assert "heads are not those" in refused(rewritten(path, tmp_path / "x.parquet", change))

    @pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 100_000, b"\xff"])
    def test_no_json(self, path: Path, tmp_path: Path, text: bytes) -> None:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow.with_metadata({METADATA_KEY: text})
            pq.write_table(file.read_row_group(0).cast(schema), tmp_path / "x.parquet")
        assert "metadata" in refused(tmp_path / "x.parquet")


class TestQuestionsThatHaveNoAnswer:
    def test_layers_and_heads(self, path: Path) -> None:
        trace = load_trace(path)
        with pytest.raises(BeaconScopeError, match=r"layer 1 is not in .*; it has 0, 3"):
            trace.kv_heads(1)
        with pytest.raises(BeaconScopeError, match=r"KV head 0 of layer 3 is not in .*; it has 1"):
            trace.head(3, 0)

    @pytest.mark.parametrize("position", [-1, 40])
    def test_positions(self, path: Path, position: int) -> None:
        with pytest.raises(BeaconScopeError, match="it has 0 to 39"):
            load_trace(path).kept(0, 0, position)

    def test_a_file_that_has_gone(self, tmp_path: Path) -> None:
        trace = load_trace(make().record(tmp_path / "trace.parquet"))
        trace.path.unlink()
        with pytest.raises(BeaconScopeError):
            trace.head(0, 0)


def test_reading_needs_no_torch() -> None:
    code = "import sys, beaconscope.trace; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
