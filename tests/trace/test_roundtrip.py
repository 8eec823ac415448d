from __future__ import annotations

import os
import pickle
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beaconscope.trace import (
    BeaconChange,
    Eviction,
    Journal,
    LayerLayout,
    TraceLayout,
    journal_path,
    load_trace,
    summarize,
)
from tests.trace.expected import assert_holds
from tests.trace.made import METADATA, SMALL, make

UNEVEN = TraceLayout(
    layers=(
        LayerLayout(layer=2, kv_heads=(1, 3), group_size=1, key_size=4, value_size=None),
        LayerLayout(layer=5, kv_heads=(0,), group_size=3, key_size=6, value_size=2),
    ),
    vector_type="float32",
    hits=2,
)


@st.composite
def layouts(draw: st.DrawFn) -> TraceLayout:
    numbers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3, unique=True).map(sorted))
    heads = st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(lambda heads: tuple(sorted(heads)))
    sizes = st.tuples(st.integers(1, 4), st.integers(1, 9), st.none() | st.integers(1, 9))
    same = draw(st.none() | sizes)
    layers = []
    for number in numbers:
        group_size, key_size, value_size = same or draw(sizes)
        layers.append(LayerLayout(number, draw(heads), group_size, key_size, value_size))
    return TraceLayout(tuple(layers), draw(st.sampled_from(["float16", "float32"])), draw(st.integers(0, 4)))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layout=layouts(), length=st.integers(1, 60), seed=st.integers(0, 99), data=st.data())
def test_what_goes_in_comes_out(layout: TraceLayout, length: int, seed: int, data: st.DataObject) -> None:
    """GIVEN any layout WHEN a recording arrives in blocks of any sizes THEN the trace holds exactly it."""
    # GIVEN
    made = make(layout, length, seed=seed, prompt_length=min(3, length))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, length), max_size=4)) | {length})]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "trace.parquet"
        # WHEN
        with Journal.create(output, layout, METADATA | {"prompt_length": min(3, length)}) as journal:
            for first, stop in pairwise(cuts):
                made.append(journal, first, stop)
            assert journal.finalize() == output
        # THEN
        assert os.listdir(folder) == ["trace.parquet"]
        trace = load_trace(output)
        assert trace.layout == layout
        assert trace.whole
        assert_holds(trace, made)


def test_heads_longer_than_a_row_group(tmp_path: Path) -> None:
    """GIVEN a prompt of more than two row groups in one block THEN every row group holds one head and all is there."""
    made = make(length=4500)
    trace = load_trace(made.record(tmp_path / "trace.parquet", block=4400))
    assert_holds(trace, made)
    footer = pq.read_metadata(trace.path)
    assert footer.num_row_groups == 3 * 3
    for group in range(footer.num_row_groups):
        for column in (0, 1):
            statistics = footer.row_group(group).column(column).statistics
            assert statistics.min == statistics.max


def test_metadata(tmp_path: Path) -> None:
    made = make()
    trace = load_trace(made.record(tmp_path / "trace.parquet", metadata={"prompt": "plan \ud800 \N{SNOWMAN}"}))
    metadata = trace.metadata
    assert metadata["format_version"] == "1.0"
    assert metadata["timings"] == {"generation": 1.5}  # given at the end
    assert metadata["rotary"] == METADATA["rotary"]  # given at the start
    assert trace.text == b"".join(made.token_bytes).decode("utf-8", "replace")
    assert trace.prompt_length == 5
    # Half of a surrogate pair is no character, and other programs refuse it.
    assert trace.prompt == "plan \N{REPLACEMENT CHARACTER} \N{SNOWMAN}"
    assert trace.model_id == "tiny"
    assert trace.attention_over == "what the cache held"
    assert trace.policy["name"] == "beacon"
    assert trace.heads == ((0, 0), (0, 1), (3, 1))


def test_metadata_that_json_does_not_know_do_not_cost_the_recording(tmp_path: Path) -> None:
    odd = {"options": {"path": tmp_path, "inf": float("inf"), "n": np.float32(0.5), "t": (1, 2), "a": np.arange(2)}}
    trace = load_trace(make().record(tmp_path / "trace.parquet", metadata=odd))
    assert trace.options == {"path": str(tmp_path), "inf": None, "n": 0.5, "t": [1, 2], "a": [0, 1]}


def test_phases_are_those_of_the_text(tmp_path: Path) -> None:
    made = replace(make(length=6), token_bytes=[b"q", b"<think>", b"hm", b"</thi", b"nk>", b"42"])
    trace = load_trace(made.record(tmp_path / "trace.parquet", metadata={"prompt_length": 1}))
    assert trace.tokens["phase"].tolist() == ["prompt", "think", "think", "think", "think", "answer"]


def test_tokens_that_are_no_utf8_keep_their_bytes(tmp_path: Path) -> None:
    made = replace(make(length=3), token_bytes=[b"\xf0\x9f", b"\x98\x80", b""])
    trace = load_trace(made.record(tmp_path / "trace.parquet", metadata={"prompt_length": 0}))
    assert trace.text == "\N{GRINNING FACE}"
    assert trace.tokens["token"].tolist() == ["�", "��", ""]
    assert trace.tokens["token_bytes"].tolist() == made.token_bytes


def test_two_changes_in_one_step(tmp_path: Path) -> None:
    """GIVEN a pool thinned and a compression fired at one step THEN the later beacons of a query head count."""
    made = make(length=6)

    def change(heads: list[int], source: list[int]) -> BeaconChange:
        return BeaconChange(
            4, 1, np.array(heads, np.int16), np.array(source, np.int32), np.zeros(len(heads), np.int32), None
        )

    made.layers[0].changes[:] = [change([0, 0, 1], [0, 1, 2]), change([0], [3])]
    made.layers[0].evictions[:] = [
        Eviction(4, 1, np.array([2], np.int32)),
        Eviction(4, 1, np.array([0, 1], np.int32)),
    ]
    trace = load_trace(made.record(tmp_path / "trace.parquet"))
    beacons = trace.beacons(0, 1)
    assert list(zip(beacons["query_head"], beacons["beacon"], beacons["source"], strict=True)) == [(1, 0, 2), (0, 0, 3)]
    assert [e.evicted.tolist() for e in trace.evictions(0, 1)] == [[0, 1, 2]]
    assert trace.kept(0, 1, 3).tolist() == [0, 1, 2, 3]
    assert trace.kept(0, 1, 5).tolist() == [3, 4, 5]


def test_hits_frame(tmp_path: Path) -> None:
    made = make()
    frame = load_trace(made.record(tmp_path / "trace.parquet")).hits(3, 1)
    layer = made.layers[1]
    expected = [
        (t, g, rank, int(layer.hit_position[t, 0, g, rank]))
        for t in range(made.length)
        for g in range(2)
        for rank in range(3)
        if layer.hit_position[t, 0, g, rank] >= 0
    ]
    found = frame[["position", "query_head", "rank", "hit_position"]].itertuples(index=False, name=None)
    assert list(found) == expected


def test_a_trace_can_be_sent_to_another_process(tmp_path: Path) -> None:
    made = make()
    trace = pickle.loads(pickle.dumps(load_trace(made.record(tmp_path / "trace.parquet"))))
    assert_holds(trace, made)


def test_summary_is_plain(tmp_path: Path) -> None:
    import json

    summary = summarize(load_trace(make().record(tmp_path / "trace.parquet")))
    assert json.loads(json.dumps(summary)) == summary
    assert summary["length"] == 40
    assert summary["phases"] == {"prompt": 5, "think": 0, "answer": 35}
    assert summary["compressions"] == 4  # at 13, 20, 27 and 34


def test_compressions_are_counted_where_the_first_layer_is_a_sliding_one(tmp_path: Path) -> None:
    made = make()
    made.layers[0].evictions.clear()
    assert summarize(load_trace(made.record(tmp_path / "trace.parquet")))["compressions"] == 4


@pytest.mark.skipif(sys.platform != "linux", reason="counts bytes in /proc")
def test_one_head_reads_its_own_row_groups_only(tmp_path: Path) -> None:
    """GIVEN a trace of eight heads WHEN one is read THEN no more bytes than an eighth and the footer's are."""
    heads = tuple(range(8))
    layout = TraceLayout((LayerLayout(0, heads, 2, 32, 32),), "float32", 2)
    path = make(layout, 2000).record(tmp_path / "trace.parquet", block=500)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    footer = pq.read_metadata(path)
    own = sum(footer.row_group(5).column(column).total_compressed_size for column in range(footer.num_columns))
    before = bytes_read()
    trace = load_trace(path)
    opened = bytes_read() - before
    trace.head(0, 5)
    read = bytes_read() - before - opened
    assert footer.num_row_groups == 8
    assert path.stat().st_size > 6 * own
    assert opened < path.stat().st_size / 8
    assert read < own + 4096


class TestOtherPrograms:
    """The file opens without this package, every column of it."""

    @pytest.fixture(params=["float32", "float16"])
    def path(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        return make(replace(SMALL, vector_type=request.param)).record(tmp_path / "trace.parquet")

    def test_pandas(self, path: Path) -> None:
        pandas = pytest.importorskip("pandas")
        frame = pandas.read_parquet(path)
        row = frame[(frame.layer == 3) & (frame.position == 30)].iloc[0]
        np.testing.assert_array_equal(row["key"], make().layers[1].key[30, 0])
        assert row["phase"] == "answer"

    def test_polars(self, path: Path) -> None:
        polars = pytest.importorskip("polars")
        frame = polars.read_parquet(path).filter(polars.col("layer") == 3)
        np.testing.assert_array_equal(frame["key"][30].to_list(), make().layers[1].key[30, 0])
        assert frame["evicted"].drop_nulls().to_list() == [e.evicted.tolist() for e in make().layers[1].evictions]

    def test_duckdb(self, path: Path) -> None:
        duckdb = pytest.importorskip("duckdb")
        rows = duckdb.sql(f"select * from '{path}' where layer = 3 order by position").fetchall()
        assert len(rows) == 40
        sql = f"select key, len(beacons), unnest(hit_position) from '{path}' where layer = 3 and position = 20"
        key, beacons, _ = duckdb.sql(sql).fetchall()[0]
        np.testing.assert_array_equal(key, make().layers[1].key[20, 0])
        assert beacons == 4


def test_layers_of_different_sizes_open_elsewhere_too(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    made = make(UNEVEN)
    path = made.record(tmp_path / "trace.parquet")
    assert_holds(load_trace(path), made)
    frame = polars.read_parquet(path)
    assert frame["query"].list.len().unique().sort().to_list() == [4, 18]
    assert frame["value"].null_count() == 2 * 40
    assert not journal_path(path).exists()
