from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from beaconscope.errors import BeaconScopeError
from beaconscope.trace import Journal, journal_path, load_trace, recover
from tests.trace.expected import assert_holds
from tests.trace.made import METADATA, SMALL, interrupted, make, many_layers

ROOT = Path(__file__).parents[2]

CHILD = """
import sys, time
from pathlib import Path
from beaconscope.trace import Journal
from tests.trace.made import METADATA, make, many_layers

output, length, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
made = make(many_layers(3), length=length)
with Journal.create(output, made.layout, METADATA) as journal:
    for first in range(0, length, 4):
        made.append(journal, first, first + 4)
        print(first + 4, time.monotonic(), flush=True)
        time.sleep(pause)
    journal.finalize(progress=lambda done, total: print("finalize", flush=True))
    time.sleep(10)
"""


def child(output: Path, length: int, pause: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(output), str(length), str(pause)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="no kill -9 there")
class TestKill:
    @pytest.mark.parametrize("after", [0.3, 1.8])
    def test_while_recording(self, tmp_path: Path, after: float) -> None:
        """GIVEN a recording WHEN it is killed at any moment THEN no token older than two seconds is lost."""
        output = tmp_path / "trace.parquet"
        with child(output, 2000, 0.01) as process:  # five seconds at least
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(10)]
            time.sleep(after + random.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
            killed = time.monotonic()
            said += process.stdout.readlines()
        appended = [(int(line.split()[0]), float(line.split()[1])) for line in said if line.endswith("\n")]
        old = max((position for position, when in appended if killed - when > 1.5), default=0)
        trace = load_trace(recover(output))
        assert trace.length >= max(old, 1)
        assert not trace.whole
        assert f"interrupted after {trace.length} tokens" in str(trace.cut_reason)
        assert_holds(trace, make(many_layers(3), length=2000), trace.length)
        assert os.listdir(tmp_path) == ["trace.parquet"]

    @pytest.mark.parametrize("row_groups", [1, 6])
    def test_while_finalising(self, tmp_path: Path, row_groups: int) -> None:
        """GIVEN a recording that ended WHEN it is killed while the file is written THEN all of it is there, whole."""
        output = tmp_path / "trace.parquet"
        with child(output, 400, 0.0) as process:
            assert process.stdout is not None
            for line in process.stdout:
                row_groups -= line == "finalize\n"
                if row_groups == 0:
                    break
            process.send_signal(signal.SIGKILL)
        with contextlib.suppress(BeaconScopeError):  # if it is there at all, it is all there
            assert load_trace(output).length == 400
        trace = load_trace(recover(output))
        assert trace.whole
        assert_holds(trace, make(many_layers(3), length=400))
        assert os.listdir(tmp_path) == ["trace.parquet"]


def message_ends(path: Path) -> list[int]:
    """Where the messages of a stream end, the schema first."""
    ends = []
    with pa.OSFile(str(path)) as file, contextlib.suppress(EOFError):
        while pa.ipc.read_message(file) is not None:
            ends.append(file.tell())
    return ends


class TestTornStreams:
    @pytest.mark.parametrize("name", ["tokens.arrows", "layer-00000.arrows", "layer-00003.arrows"])
    def test_cut_anywhere(self, tmp_path: Path, name: str) -> None:
        """GIVEN a stream cut at any kind of place THEN what is whole before the cut comes back, in all streams."""
        journal = interrupted(tmp_path / "made.parquet")
        ends = message_ends(journal / name)
        heads = 2 if name == "layer-00000.arrows" else 1
        assert len(ends) == 1 + 4 * heads
        size = (journal / name).stat().st_size
        places = {0, 1, 7, ends[0] - 1, ends[0], size - 1, size}
        for end in ends[1:3]:  # in the length, in the description, in the numbers, and at the end of a message
            places |= {end + 3, end + 8, end + 100, end + 1500, end - 1, end}
        for number, place in enumerate(sorted(place for place in places if place <= size)):
            output = tmp_path / f"{number}.parquet"
            shutil.copytree(journal, journal_path(output))
            os.truncate(journal_path(output) / name, place)
            whole_batches = sum(end <= place for end in ends[1:])
            expected = 8 * (whole_batches // heads)
            if expected == 0:
                with pytest.raises(BeaconScopeError, match="nothing can be recovered"):
                    recover(output)
                assert journal_path(output).is_dir()
                continue
            trace = load_trace(recover(output))
            assert_holds(trace, make(), expected)
            assert trace.whole is False
            assert ("8 more" in str(trace.cut_reason)) == (expected == 24)

    @pytest.mark.parametrize("tail", [b"\0" * 4096, b"\xff" * 4096, b"\xff\xff\xff\xff\x10\0\0\0junk" * 50])
    def test_rubbish_at_the_end(self, tmp_path: Path, tail: bytes) -> None:
        """GIVEN what a power cut may leave behind the last write THEN it is left out."""
        output = tmp_path / "trace.parquet"
        for path in interrupted(output).glob("*.arrows"):
            with path.open("ab") as file:
                file.write(tail)
        assert_holds(load_trace(recover(output)), make(), 32)

    def test_a_stream_that_is_gone(self, tmp_path: Path) -> None:
        output = tmp_path / "trace.parquet"
        (interrupted(output) / "layer-00003.arrows").unlink()
        with pytest.raises(BeaconScopeError, match="nothing can be recovered"):
            recover(output)

    def test_streams_of_two_recordings_are_not_mixed_up(self, tmp_path: Path) -> None:
        output = tmp_path / "trace.parquet"
        journal = interrupted(output)
        shutil.copy(journal / "tokens.arrows", journal / "layer-00003.arrows")
        with pytest.raises(BeaconScopeError, match="nothing can be recovered"):
            recover(output)

    def test_cut_within_the_prompt(self, tmp_path: Path) -> None:
        output = tmp_path / "trace.parquet"
        with Journal.create(output, SMALL, METADATA | {"prompt_length": 30}) as journal:
            make().append(journal, 0, 12)
        trace = load_trace(recover(output))
        assert trace.prompt_length == 12
        assert set(trace.tokens["phase"]) == {"prompt"}


def test_by_output_by_journal_and_to_elsewhere(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in ("a.parquet", "b.parquet", "c.parquet"))
    for output in (a, b, c):
        interrupted(output)
    assert recover(a) == a
    assert recover(journal_path(b)) == b
    assert recover(c, output=tmp_path / "d.parquet") == tmp_path / "d.parquet"
    assert sorted(os.listdir(tmp_path)) == ["a.parquet", "b.parquet", "d.parquet"]


def test_twice(tmp_path: Path) -> None:
    output = tmp_path / "trace.parquet"
    interrupted(output)
    recover(output)
    before = output.read_bytes()
    assert recover(output) == output
    assert output.read_bytes() == before


def test_a_file_that_was_in_place_before_its_journal_was_gone(tmp_path: Path) -> None:
    """GIVEN a kill between the rename and the removal THEN recover tidies up and leaves the file as it is."""
    output = tmp_path / "trace.parquet"
    shutil.copytree(interrupted(output), tmp_path / "kept")
    recover(output)
    (tmp_path / "kept").rename(journal_path(output))
    before = output.read_bytes()
    assert recover(output) == output
    assert output.read_bytes() == before
    assert os.listdir(tmp_path) == ["trace.parquet"]


def test_another_trace_is_not_replaced_without_force(tmp_path: Path) -> None:
    """GIVEN a recording with --force over an older trace, killed THEN the older one is replaced only by wish."""
    output = make(seed=1).record(tmp_path / "trace.parquet")
    with Journal.create(output, SMALL, METADATA, force=True) as journal:
        make().append(journal, 0, 16)
    with pytest.raises(BeaconScopeError, match="exists; give --force"):
        recover(output)
    assert_holds(load_trace(output), make(seed=1))
    assert_holds(load_trace(recover(output, force=True)), make(), 16)


@pytest.mark.parametrize("name", ["trace.parquet", "trace.parquet.journal"])
def test_nothing_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(BeaconScopeError, match=r"neither .*trace\.parquet nor .*trace\.parquet\.journal exists"):
        recover(tmp_path / name)


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello")
    with pytest.raises(BeaconScopeError, match="no trace"):
        recover(tmp_path / "x")


def test_a_folder_that_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "x.journal").mkdir()
    with pytest.raises(BeaconScopeError, match="holds no recording"):
        recover(tmp_path / "x")


def test_a_journal_with_nonsense_for_metadata(tmp_path: Path) -> None:
    journal = interrupted(tmp_path / "trace.parquet")
    (journal / "metadata.json").write_text("{}")
    with pytest.raises(BeaconScopeError, match="format_version"):
        recover(journal)
    assert (journal / "tokens.arrows").exists()


def test_the_journal_outlives_a_recover_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "trace.parquet"
    journal = interrupted(output)
    before = {path.name: path.read_bytes() for path in journal.iterdir()}

    def refuse(*paths: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("beaconscope.files.os.replace", refuse)
        with pytest.raises(BeaconScopeError, match=r"cannot write .*trace\.parquet: Input/output error"):
            recover(output)
    assert {path.name: path.read_bytes() for path in journal.iterdir()} == before
    assert os.listdir(tmp_path) == ["trace.parquet.journal"]
    assert_holds(load_trace(recover(output)), make(), 32)
