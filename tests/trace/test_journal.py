from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from beaconscope.errors import BeaconScopeError
from beaconscope.trace import Eviction, Journal, LayerLayout, TraceLayout, journal_path, load_trace, recover
from beaconscope.trace.stream import StreamWriter
from tests.disk import small_disk
from tests.trace.expected import assert_holds
from tests.trace.made import METADATA, SMALL, Made, make, many_layers

ROOT = Path(__file__).parents[2]


def start(output: Path, **options: object) -> Journal:
    return Journal.create(output, SMALL, METADATA, **options)  # type: ignore[arg-type]


def append_slowly(made: Made, journal: Journal, first: int, stop: int) -> None:
    for position in range(first, stop):
        made.append(journal, position, position + 1)
        time.sleep(0.01)


def one_line(error: pytest.ExceptionInfo[BeaconScopeError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_second_recording_to_the_same_output_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "trace.parquet"
    made = make()
    with start(output) as journal:
        for force in (False, True):
            with pytest.raises(BeaconScopeError, match="in use by another process") as error:
                start(output, force=force)
            one_line(error)
        with pytest.raises(BeaconScopeError, match="in use by another process"):
            recover(output)
        # The first is unharmed.
        made.append(journal, 0, made.length)
        journal.finalize()
    assert_holds(load_trace(output), made)


def test_an_interrupted_recording_is_not_overwritten(tmp_path: Path) -> None:
    """GIVEN the journal of a recording that ended halfway WHEN another begins THEN it is told what to do."""
    output = tmp_path / "trace.parquet"
    with start(output) as journal:
        make().append(journal, 0, 20)
    with pytest.raises(BeaconScopeError, match="beaconscope recover") as error:
        start(output)
    assert "--force" in one_line(error)
    with start(output, force=True) as journal:
        make(seed=1).append(journal, 0, 40)
        journal.finalize()
    assert_holds(load_trace(output), make(seed=1))


def test_an_existing_output_is_not_replaced_without_force(tmp_path: Path) -> None:
    output = make().record(tmp_path / "trace.parquet")
    with pytest.raises(BeaconScopeError, match="exists; give --force"):
        start(output)
    assert not journal_path(output).exists()
    with start(output, force=True) as journal:
        make(seed=1).append(journal, 0, 30)
        # Until the new one is whole, the old one is there.
        assert_holds(load_trace(output), make())
        journal.finalize()
    assert load_trace(output).length == 30


@pytest.mark.parametrize("where", ["missing/trace.parquet", "file/trace.parquet", "folder"])
def test_an_output_that_cannot_be(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BeaconScopeError) as error:
        start(tmp_path / where)
    one_line(error)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BeaconScopeError, match="cannot write"):
        start(tmp_path / "trace.parquet")


def test_a_folder_of_someone_else_is_not_emptied(tmp_path: Path) -> None:
    output = tmp_path / "trace.parquet"
    journal_path(output).mkdir()
    (journal_path(output) / "thesis.tex").write_text("precious")
    with pytest.raises(BeaconScopeError, match=r"thesis\.tex"):
        start(output, force=True)
    assert (journal_path(output) / "thesis.tex").read_text() == "precious"


def test_nothing_recorded_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "trace.parquet"
    with start(output):
        pass
    assert os.listdir(tmp_path) == []
    with start(output) as journal, pytest.raises(BeaconScopeError, match="nothing was recorded"):
        journal.finalize()
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full_from_the_first_byte_on_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a disk that refuses the first block late WHEN finalising THEN no journal is left that holds nothing."""

    def refuse(self: StreamWriter, batch: pa.RecordBatch) -> None:
        time.sleep(0.3)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StreamWriter, "write", refuse)
    with start(tmp_path / "trace.parquet") as journal:
        make().append(journal, 0, 8)
        with pytest.raises(BeaconScopeError, match="make room; nothing is recorded yet"):
            journal.finalize()
    assert os.listdir(tmp_path) == []


def test_a_recording_that_stops_between_two_layers(tmp_path: Path) -> None:
    """GIVEN tokens and a first layer that got further than the second THEN what all have is kept, marked as cut."""
    made = make()
    with start(tmp_path / "trace.parquet") as journal:
        made.append(journal, 0, 16)
        journal.append_tokens(made.tokens(16, 24))
        journal.append(made.layers[0].block(16, 20))
        assert journal.length == 16
        trace = load_trace(journal.finalize())
    assert_holds(trace, made, 16)
    assert not trace.whole
    assert trace.cut_reason
    assert trace.text == b"".join(made.token_bytes[:16]).decode("utf-8", "replace")


def test_a_recording_that_is_cut_by_its_user_says_so(tmp_path: Path) -> None:
    with start(tmp_path / "trace.parquet") as journal:
        make().append(journal, 0, 16)
        trace = load_trace(journal.finalize({"whole": False, "cut_reason": "Ctrl-C"}))
    assert not trace.whole
    assert trace.cut_reason == "Ctrl-C"


def test_an_error_in_the_recording_is_not_hidden(tmp_path: Path) -> None:
    output = tmp_path / "trace.parquet"

    def fail_after_16_tokens() -> None:
        with start(output) as journal:
            make().append(journal, 0, 16)
            raise RuntimeError("model")

    with pytest.raises(RuntimeError, match="model"):
        fail_after_16_tokens()
    assert_holds(load_trace(recover(output)), make(), 16)


class TestBlocksThatDoNotFit:
    @pytest.fixture
    def journal(self, tmp_path: Path) -> Journal:
        return start(tmp_path / "trace.parquet")

    def test_not_the_next_position(self, journal: Journal) -> None:
        made = make()
        made.append(journal, 0, 8)
        with pytest.raises(ValueError, match="begins at position 9; expected 8"):
            journal.append_tokens(made.tokens(9, 12))
        with pytest.raises(ValueError, match="layer 3"):
            journal.append(made.layers[1].block(4, 12))

    def test_shapes(self, journal: Journal) -> None:
        block = make().layers[0].block(0, 8)
        with pytest.raises(ValueError, match="key of layer 0"):
            journal.append(replace(block, key=block.key[..., :4]))
        with pytest.raises(ValueError, match="value of layer 0"):
            journal.append(replace(block, value=None))
        with pytest.raises(ValueError, match="layer 7"):
            journal.append(replace(block, layer=7))

    def test_events_outside_the_block(self, journal: Journal) -> None:
        block = make().layers[0].block(0, 8)
        gone = np.array([1], np.int32)
        with pytest.raises(ValueError, match="outside its block"):
            journal.append(replace(block, evictions=[Eviction(8, 0, gone)]))
        with pytest.raises(ValueError, match="KV head 5"):
            journal.append(replace(block, evictions=[Eviction(3, 5, gone)]))

    def test_closed(self, journal: Journal) -> None:
        journal.close()
        journal.close()
        with pytest.raises(ValueError, match="closed"):
            journal.append_tokens(make().tokens(0, 1))


def test_layouts_that_cannot_be(tmp_path: Path) -> None:
    layer = SMALL.layers[0]
    for layers in ((), (layer, layer), (replace(layer, kv_heads=()),), (replace(layer, key_size=0),)):
        with pytest.raises(ValueError, match="layer"):
            Journal.create(tmp_path / "t.parquet", TraceLayout(layers, "float32", 2), METADATA)
    with pytest.raises(ValueError, match="prompt_length"):
        Journal.create(tmp_path / "t.parquet", SMALL, {})
    assert os.listdir(tmp_path) == []


def test_vectors_out_of_range_end_the_recording_with_the_remedy(tmp_path: Path) -> None:
    output = tmp_path / "trace.parquet"
    made = make(replace(SMALL, vector_type="float16"))
    made.layers[0].key[25] = 1e5
    with Journal.create(output, made.layout, METADATA) as journal:
        made.append(journal, 0, 20)
        with pytest.raises(BeaconScopeError, match="--dtype-trace float32") as error:
            append_slowly(made, journal, 20, 40)
        assert "beaconscope recover" in one_line(error)
        with pytest.raises(BeaconScopeError):
            journal.close()
    assert_holds(load_trace(recover(output)), made, 25)


def test_a_float32_model_may_be_rounded_to_float16(tmp_path: Path) -> None:
    made = make(replace(SMALL, vector_type="float16"))
    made.layers[0].key[:] = 1 / 3
    path = made.record(tmp_path / "trace.parquet", metadata={"model": {"dtype": "float32"}})
    assert np.all(load_trace(path).head(0, 0).key == np.float16(1 / 3))
    with pytest.raises(BeaconScopeError, match="more digits than float16 holds"):
        made.record(tmp_path / "other.parquet", metadata={"model": {"dtype": "bfloat16"}})


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a disk that stands still WHEN blocks arrive THEN `append` waits once the bound is reached, then goes on."""
    moving = threading.Event()
    write = StreamWriter.write

    def slow_write(self: StreamWriter, batch: pa.RecordBatch) -> None:
        moving.wait(10)
        write(self, batch)

    monkeypatch.setattr(StreamWriter, "write", slow_write)
    layout = TraceLayout((LayerLayout(0, (0,), 1, 64, 64),), "float32", 1)
    made = make(layout, 64)
    bound = 40_000  # about 45 positions of some 850 bytes
    journal = Journal.create(tmp_path / "trace.parquet", layout, METADATA, queue_bytes=bound)

    def record() -> None:
        for position in range(64):
            made.append(journal, position, position + 1)

    thread = threading.Thread(target=record)
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    assert 30 < journal.length < 50
    moving.set()
    thread.join(10)
    assert_holds(load_trace(journal.finalize()), made)


def test_bytes_reach_the_system_while_the_recording_stands_still(tmp_path: Path) -> None:
    """GIVEN blocks and then silence THEN a second look at the files finds everything, without any flush."""
    import shutil

    output = tmp_path / "trace.parquet"
    made = make()
    with start(output) as journal:
        made.append(journal, 0, 33)
        time.sleep(0.5)
        copy = tmp_path / "copy.parquet"
        shutil.copytree(journal_path(output), journal_path(copy))
        assert_holds(load_trace(recover(copy)), made, 33)


FULL_DISK = """
import resource, sys, time
from pathlib import Path
from beaconscope.errors import BeaconScopeError
from beaconscope.trace import Journal
from tests.trace.made import METADATA, make, many_layers

output, limit, pause, layers = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
made = make(many_layers(layers), length=400)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    with Journal.create(output, made.layout, METADATA) as journal:
        for first in range(0, 400, 8):
            made.append(journal, first, first + 8)
            print(first + 8, flush=True)
            time.sleep(pause)
        journal.finalize({'timings': {'generation': 2.0}})
except BeaconScopeError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
"""


def record_in_child(output: Path, limit: int, pause: float = 0.0, layers: int = 2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(output), str(limit), str(pause), str(layers)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on file size there")
class TestFullDisk:
    def test_while_recording(self, tmp_path: Path) -> None:
        """GIVEN a disk that fills up WHEN recording THEN one line says what is safe, and recover brings it back."""
        output = tmp_path / "trace.parquet"
        child = record_in_child(output, 100_000, 0.005)
        assert child.returncode == 1
        (line,) = child.stderr.splitlines()
        assert f"beaconscope recover {output}" in line
        told = int(line.split("make room; ")[1].split(" tokens are safe")[0])
        assert told >= 8
        trace = load_trace(recover(output))
        assert trace.length >= told
        assert not trace.whole
        assert_holds(trace, make(many_layers(2), length=400), trace.length)
        assert os.listdir(tmp_path) == ["trace.parquet"]

    def test_while_finalising(self, tmp_path: Path) -> None:
        """GIVEN streams that fit and a file that does not WHEN finalising THEN nothing is lost nor half-written."""
        output = tmp_path / "trace.parquet"
        child = record_in_child(output, 700_000, layers=6)
        assert child.returncode == 1
        (line,) = child.stderr.splitlines()
        assert f"all 400 tokens are safe in {journal_path(output)}" in line
        assert f"beaconscope recover {output}" in line
        assert os.listdir(tmp_path) == ["trace.parquet.journal"]
        # The recording had ended by itself: what is recovered is all of it.
        trace = load_trace(recover(output))
        assert trace.whole
        assert trace.metadata["timings"] == {"generation": 2.0}
        assert_holds(trace, make(many_layers(6), length=400))

    def test_a_small_disk(self, tmp_path: Path) -> None:
        disk = tmp_path / "disk"
        with small_disk(disk, "300k"):
            output = disk / "trace.parquet"
            child = record_in_child(output, 0)
            assert child.returncode == 1
            (line,) = child.stderr.splitlines()
            assert "No space left on device" in line
            assert f"beaconscope recover {output}" in line
            # There is no room for the file beside the journal; elsewhere there is.
            with pytest.raises(BeaconScopeError, match="--output on another disk") as error:
                recover(output)
            one_line(error)
            trace = load_trace(recover(output, output=tmp_path / "rescued.parquet"))
            assert trace.length >= 8
            assert_holds(trace, make(many_layers(2), length=400), trace.length)
            assert os.listdir(disk) == []
