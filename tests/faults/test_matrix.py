"""Every fault with every command that it can happen to: one line, the right exit code, and nothing half-written.

Commands run in forks of this process, so that a fault of theirs is none of ours.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from beaconscope import Full, load_trace, recover
from beaconscope.analyze import AnalyzeOptions, analyze
from beaconscope.trace import Trace
from beaconscope.trace.stream import StreamWriter
from tests.faults.forking import Child, without_privileges
from tests.record.recording import PROMPT, record_tiny
from tests.tiny import tiny_model
from tests.trace.made import interrupted

LINUX = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs what Linux has")
RECORD = ("record", "-q", "--prompt", "plan.txt", "--raw", "--budget", "32", "--interval", "8", "--recent", "4",
          "--beacons", "4", "--layers", "all", "-o", "out")  # fmt: skip
LONG = (400, 400, 400)
"""Positions of a recording that is interrupted, in one block."""
SMALL = ("--budget", "24", "--interval", "8", "--recent", "4", "--beacons", "4")
READERS = {
    "analyze": ("analyze", "t.parquet", "-q", "--cluster-heads", "0", "--shifts", "20", "-o", "out"),
    "replay": ("replay", "t.parquet", "-q", *SMALL, "--no-trt", "-o", "out"),
    "report": ("report", "t.parquet", "-q", "--analysis", "a.parquet", "--umap-heads", "0", "-o", "out"),
    "figures": ("figures", "t.parquet", "-q", "--analysis", "a.parquet", "-o", "out"),
}
every_reader = pytest.mark.parametrize("command", READERS)


@pytest.fixture(autouse=True)
def _no_umap(monkeypatch):
    """It compiles for half a minute, and children inherit what is patched."""
    from beaconscope.report import figures

    collect = figures.collect
    monkeypatch.setattr(
        figures,
        "collect",
        lambda trace, findings, options, **more: collect(trace, findings, replace(options, space_heads=0), **more),
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("files")
    trace = record_tiny(tiny_model(), folder, policy=Full(), max_new_tokens=60)
    analyze(trace, AnalyzeOptions(cluster_heads=0, shifts=20)).save(folder / "a.parquet")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path, files) -> Path:
    """A folder with a trace, an analysis of it and a prompt."""
    here = tmp_path / "here"
    here.mkdir()
    for name, data in files.items():
        (here / name).write_bytes(data)
    (here / "plan.txt").write_text(PROMPT)
    yield here
    here.chmod(0o700)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


BEFORE = ["a.parquet", "plan.txt", "t.parquet"]


def patched(owner: object, name: str, change: Callable[..., object]) -> Callable[[], None]:
    """What a child does beforehand: put ``change(what was there)`` in the place of a function."""

    def prepare() -> None:
        setattr(owner, name, change(getattr(owner, name)))

    return prepare


@LINUX
class TestFullDisk:
    @every_reader
    def test_results(self, fork, folder, command):
        def one_kilobyte() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

        ended = fork(*READERS[command], cwd=folder, prepare=one_kilobyte).wait()
        assert (ended.code, ended.out) == (1, "")
        assert ended.line.startswith("error: cannot write ")
        assert ended.line.endswith(": File too large; make room")
        assert [name for name in names(folder) if name not in BEFORE] in ([], ["out"], ["out.parts"])
        # What is small enough of what a sweep keeps may be there, whole.
        assert not [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "out.parts"
                    and path.name not in BEFORE]  # fmt: skip
        assert not list(folder.rglob("*.partial"))

    @pytest.mark.parametrize("arguments", [("info", "t.parquet"), ("info", "--json", "t.parquet"), ("policies",)])
    def test_what_is_printed(self, fork, folder, arguments):
        def to_a_full_disk() -> None:
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

        ended = fork(*arguments, cwd=folder, prepare=to_a_full_disk).wait()
        assert ended.code == 1
        assert ended.line == "error: No space left on device; make room"

    def test_recover(self, fork, folder, files):
        whole = len(files["t.parquet"])
        interrupted(folder / "out", *LONG)

        def not_enough() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (whole // 3, whole // 3))

        before = names(folder)
        ended = fork("recover", "out", "-q", cwd=folder, prepare=not_enough).wait()
        assert (ended.code, ended.out) == (1, "")
        assert "cannot write out: File too large" in ended.line
        assert "out.journal is as it was: make room" in ended.line
        assert names(folder) == before
        assert load_trace(recover(folder / "out")).length > len(PROMPT)


@LINUX
class TestReadOnlyFolder:
    @every_reader
    def test_said_before_the_work(self, fork, folder, command):
        folder.chmod(0o500)
        ended = fork(
            *READERS[command], cwd=folder, prepare=_and_without_privileges(patched(Trace, "head", _never))
        ).wait()
        assert (ended.code, ended.out) == (1, "")
        assert "nothing can be written in the folder" in ended.line
        assert names(folder) == BEFORE

    def test_record(self, fork, folder, model_folder):
        folder.chmod(0o500)
        ended = fork(*RECORD, "--model", model_folder, cwd=folder, prepare=without_privileges).wait()
        assert (ended.code, ended.out) == (1, "")
        assert "nothing can be written in the folder" in ended.line
        assert names(folder) == BEFORE

    def test_recover(self, fork, folder):
        journal = interrupted(folder / "out", *LONG)
        journal.chmod(0o500)
        folder.chmod(0o500)
        try:
            ended = fork("recover", "out", "-q", cwd=folder, prepare=without_privileges).wait()
        finally:
            journal.chmod(0o700)
        assert (ended.code, ended.out) == (1, "")
        assert "cannot write" in ended.line

    def test_info_needs_no_writing(self, fork, folder):
        folder.chmod(0o500)
        assert fork("info", "t.parquet", "-q", cwd=folder, prepare=without_privileges).wait().code == 0


@LINUX
class TestPermissionLost:
    @every_reader
    def test_while_a_result_is_made(self, fork, folder, command):
        # Figures go to a folder, which is there by then.
        lost = patched(
            Trace, "head", _then(lambda: [each.chmod(0o500) for each in (folder / "out", folder) if each.is_dir()])
        )
        ended = fork(*READERS[command], cwd=folder, prepare=_and_without_privileges(lost)).wait()
        assert (ended.code, ended.out) == (1, "")
        assert "Permission denied" in ended.line
        assert [path for path in folder.rglob("*") if path.is_file() and path.name not in BEFORE] == []

    def test_while_recording(self, fork, folder, model_folder):
        lost = patched(StreamWriter, "close", _then(lambda: folder.chmod(0o500)))
        arguments = (*RECORD, "--model", model_folder, "-n", 40)
        ended = fork(*arguments, cwd=folder, prepare=_and_without_privileges(lost)).wait()
        assert (ended.code, ended.out) == (1, "")
        assert "cannot write out: Permission denied; all 72 tokens are safe in out.journal" in ended.line
        assert "this folder can be written" in ended.line
        folder.chmod(0o700)
        assert load_trace(recover(folder / "out")).whole

    @every_reader
    def test_to_read_a_trace(self, fork, folder, command):
        (folder / "t.parquet").chmod(0)
        ended = fork(*READERS[command], cwd=folder, prepare=without_privileges).wait()
        assert (ended.code, ended.out) == (1, "")
        assert "may not be read" in ended.line


@every_reader
def test_a_trace_that_vanishes_while_it_is_read(fork, folder, command):
    gone = patched(Trace, "head", _then(lambda: (folder / "t.parquet").unlink(missing_ok=True)))
    ended = fork(*READERS[command], cwd=folder, prepare=gone).wait()
    assert (ended.code, ended.out) == (1, "")
    assert "t.parquet is gone; put it back" in ended.line
    assert names(folder) in (["a.parquet", "plan.txt"], ["a.parquet", "out", "plan.txt"])


@pytest.mark.parametrize("command", ["analyze", "replay", "report"])
def test_no_file_is_put_in_the_place_of_a_pipe_or_a_device(fork, folder, command):
    os.mkfifo(folder / "out")
    ended = fork(*READERS[command], "--force", cwd=folder).wait()
    assert (ended.code, ended.out) == (1, "")
    assert "out is a device or a pipe" in ended.line
    assert (folder / "out").is_fifo()


def test_a_journal_that_vanishes_under_a_recording(fork, folder, model_folder):
    def remove() -> None:
        for path in (folder / "out.journal").iterdir():
            path.unlink()

    arguments = (*RECORD, "--model", model_folder, "-n", 40)
    ended = fork(*arguments, cwd=folder, prepare=patched(StreamWriter, "close", _then(remove))).wait()
    assert (ended.code, ended.out) == (1, "")
    assert "out.journal was emptied while the recording ran" in ended.line
    assert not (folder / "out").exists()


class TestCtrlC:
    @every_reader
    @pytest.mark.parametrize("times", [1, 2])
    def test_while_a_result_is_made(self, fork, folder, command, times):
        def press() -> None:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)

        ended = fork(*READERS[command], cwd=folder, prepare=patched(Trace, "head", _then(press))).wait()
        assert ended.code == 130
        assert ended.out == ""
        assert "Traceback" not in ended.err
        left = "go on with --resume" if command == "replay" else "stopped before it was done"
        assert left in ended.line
        assert [path for path in folder.rglob("*") if path.is_file() and path.name not in BEFORE] == []

    def test_while_recovering(self, fork, folder):
        from beaconscope.trace import finalize

        interrupted(folder / "out", *LONG)
        before = names(folder)

        def press(rows):
            def pressing(*arguments):
                signal.raise_signal(signal.SIGINT)
                return rows(*arguments)

            return pressing

        ended = fork("recover", "out", cwd=folder, prepare=patched(finalize, "_file_rows", press)).wait()
        assert (ended.code, ended.out) == (130, "")
        assert "Traceback" not in ended.err
        assert names(folder) == before
        assert load_trace(recover(folder / "out")).length > len(PROMPT)


def fails_after(calls, error):
    """A method that does what it did for so many calls, and then raises."""

    def failing(method):
        left = calls

        def fail(self, *arguments):
            nonlocal left
            left -= 1
            if left < 0:
                raise error
            return method(self, *arguments)

        return fail

    return failing


class TestNoMemory:
    def test_in_the_writer(self, fork, folder, model_folder):
        arguments = (*RECORD, "--model", model_folder, "-n", 60)
        ended = fork(
            *arguments, cwd=folder, prepare=patched(StreamWriter, "write", fails_after(12, MemoryError()))
        ).wait()
        assert (ended.code, ended.out) == (1, "")
        assert ended.line.startswith("error: no memory is left to write to out.journal; ")
        safe = int(ended.line.split(" tokens are safe")[0].split()[-1])
        assert load_trace(recover(folder / "out")).length >= safe > len(PROMPT)

    def test_in_the_model(self, fork, folder, model_folder):
        from beaconscope.record.draw import Draw

        refused = RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory")
        arguments = (*RECORD, "--model", model_folder, "-n", 60)
        ended = fork(*arguments, cwd=folder, prepare=patched(Draw, "__call__", fails_after(40, refused))).wait()
        assert (ended.code, ended.out) == (1, "")
        assert ended.line == "error: no memory is left; what was recorded is safe: run `beaconscope recover out`"
        assert load_trace(recover(folder / "out")).length > len(PROMPT)

    @every_reader
    def test_in_a_reader(self, fork, folder, command):
        def failing(head):
            def fail(*arguments):
                raise MemoryError

            return fail

        ended = fork(*READERS[command], cwd=folder, prepare=patched(Trace, "head", failing)).wait()
        assert (ended.code, ended.out) == (1, "")
        assert ended.line.startswith("error: no memory is left")


def test_a_slow_disk_loses_nothing(fork, folder, model_folder):
    def slow(write):
        def slowly(self, data):
            time.sleep(0.01)
            write(self, data)

        return slowly

    arguments = (*RECORD, "--model", model_folder, "-n", 40)
    ended = fork(*arguments, cwd=folder, prepare=patched(StreamWriter, "_write", slow)).wait()
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert load_trace(folder / "out").whole


def test_a_clock_that_jumps_back_and_forth(fork, folder, model_folder):
    def jumping() -> None:
        now = time.time

        def jump() -> float:
            jump.calls += 1
            return now() + (-1) ** jump.calls * 10_000_000

        jump.calls = 0
        time.time = jump

    arguments = (*RECORD, "--model", model_folder, "-n", 40)
    ended = fork(*arguments, cwd=folder, prepare=jumping).wait()
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    trace = load_trace(folder / "out")
    assert trace.whole
    assert all(seconds >= 0 for seconds in trace.metadata["timings"].values())


class TestTwoAtOnce:
    def test_recordings_to_one_output(self, fork, folder, model_folder):
        arguments = (*RECORD, "--model", model_folder)
        first = fork(*arguments, "-n", 60, cwd=folder, prepare=patched(StreamWriter, "close", _when(folder / "go")))
        tokens = folder / "out.journal" / "tokens.arrows"
        _wait_for(lambda: tokens.exists() and tokens.stat().st_size > 500, first)
        for more in ((), ("--force",)):
            second = fork(*arguments, "-n", 5, *more, cwd=folder).wait()
            assert (second.code, second.out) == (1, "")
            assert "in use by another process" in second.line
        (folder / "go").touch()
        ended = first.wait()
        assert (ended.code, ended.err) == (0, "")
        assert load_trace(folder / "out").length == len(PROMPT) + 60
        assert names(folder) == sorted([*BEFORE, "go", "out"])

    @pytest.mark.parametrize("command", ["analyze", "report"])
    def test_results_in_one_output(self, fork, folder, command):
        both = [fork(*READERS[command], cwd=folder) for _ in range(2)]
        codes = [each.wait().code for each in both]
        # The one that comes last is whole; it may have been refused at once where the other was quick.
        assert 0 in codes
        assert names(folder) == sorted([*BEFORE, "out"])


def _never(function: Callable[..., object]) -> Callable[..., object]:
    def never(*arguments: object) -> object:
        raise AssertionError("the work was begun")

    return never


def _then(first: Callable[[], object]) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Do something before a function, each time."""

    def change(function: Callable[..., object]) -> Callable[..., object]:
        def changed(*arguments: object, **options: object) -> object:
            first()
            return function(*arguments, **options)

        return changed

    return change


def _when(path: Path) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Let a function wait until a file is there."""

    def wait() -> None:
        while not path.exists():
            time.sleep(0.01)

    return _then(wait)


def _and_without_privileges(prepare: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        without_privileges()
        prepare()

    return both


def _wait_for(condition: Callable[[], bool], child: Child) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert child.running(), child.wait()
        assert time.monotonic() < end
        time.sleep(0.01)
