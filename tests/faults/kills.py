"""Kill recordings and replays at moments of every kind, and hold what is left against what was there.

``python -m tests.faults.kills --kills 60`` does it for a while and prints a table. A moment is drawn from a seed: any
time at all, or within the writing of a message, of the trace, of its footer, before and after its rename, or while the
journal is removed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from transformers.utils import logging

from beaconscope import Full, Trace, load_trace, recover
from beaconscope.errors import BeaconScopeError
from tests.faults.forking import Child
from tests.record.recording import PROMPT, record_tiny, save_tiny, token_ids
from tests.tiny import tiny_model

TOKENS = 300
RECORDING = ("--raw", "--budget", "32", "--interval", "8", "--recent", "4", "--beacons", "4", "--layers", "all")
REPLAY = ("--policy", "beacon,keydiff", "--budget", "24,40", "--interval", "8", "--recent", "4", "--no-trt", "-q")
RECORD_MOMENTS = ("any time", "in a message", "in the trace", "before the rename", "after the rename", "in the removal")
REPLAY_MOMENTS = ("any time", "in a part", "before a rename", "after a rename")


@dataclass(frozen=True)
class Outcome:
    """What a kill left."""

    moment: str
    safe: int
    """Tokens, or layers, that had been handed to the system."""
    left: int
    """Of these, what came back."""
    extra: int
    """That came back though it was not yet known to be safe."""
    how: str


@dataclass(frozen=True)
class Material:
    """What is recorded and replayed, and what comes of it where nothing is killed."""

    model: Path
    whole: Trace
    seconds: float
    """Of a whole recording."""
    trace: Path
    replay: pd.DataFrame
    replay_seconds: float


def make_material(folder: Path) -> Material:
    model = save_tiny(folder / "model")
    (folder / "plan.txt").write_text(PROMPT)
    begun = time.monotonic()
    code = Child(*_record(model, folder), cwd=folder, logs=folder / "logs").wait().code
    assert code == 0
    seconds = time.monotonic() - begun
    record_tiny(tiny_model(num_hidden_layers=4), folder, policy=Full(), max_new_tokens=60, name="four")
    begun = time.monotonic()
    ended = Child("replay", "four.parquet", *REPLAY, "-o", "r.parquet", cwd=folder, logs=folder / "logs").wait()
    assert ended.code == 0, ended.err
    return Material(
        model,
        load_trace(folder / "t.parquet"),
        seconds,
        folder / "four.parquet",
        pd.read_parquet(folder / "r.parquet"),
        time.monotonic() - begun,
    )


def _record(model: Path, folder: Path) -> tuple[str | Path, ...]:
    return ("record", "-q", "--model", model, "--prompt", folder / "plan.txt", *RECORDING, "-n", str(TOKENS), "-o",
            "t.parquet")  # fmt: skip


def kill_a_recording(material: Material, folder: Path, seed: int) -> Outcome:
    """Kill a recording, recover it, and check all that is promised."""
    draw = random.Random(seed)
    moment = RECORD_MOMENTS[seed % len(RECORD_MOMENTS)]
    folder.mkdir()
    log = folder.parent / f"{folder.name}.log"
    arguments = _record(material.model, material.model.parent)
    child = Child(
        *arguments, cwd=folder, logs=material.model.parent / "logs", prepare=_dying(moment, draw, log, _note_written)
    )
    if moment == "any time":
        time.sleep(draw.uniform(0, 1.1 * material.seconds))
        child.kill()
    ended = child.wait()
    # One that was quicker than the kill has ended well.
    assert ended.code in (-signal.SIGKILL, 0), ended.err
    output = folder / "t.parquet"
    safe = _last(log)
    there = output.exists()
    if there:  # then it is whole, before anything is tidied up
        assert load_trace(output).whole
        assert load_trace(output).length == material.whole.length
    journal = folder / "t.parquet.journal"
    if ended.code == 0:
        assert there
        assert not journal.exists()
        return Outcome(moment, safe, safe, 0, "was quicker")
    if journal.exists() and safe:
        # Nobody runs over what is there.
        again = Child(*arguments, cwd=folder, logs=material.model.parent / "logs").wait()
        assert again.code == 1
        assert "recover" in again.line or "exists" in again.line
    try:
        trace = load_trace(recover(output))
    except BeaconScopeError:
        if safe:
            raise
        return Outcome(moment, 0, 0, 0, "nothing was recorded yet")
    assert sorted(path.name for path in folder.iterdir()) == ["t.parquet"]
    assert trace.length >= safe
    assert token_ids(trace) == token_ids(material.whole)[: trace.length]
    _assert_same_vectors(trace, material.whole)
    if not there and moment in ("any time", "in a message") and trace.length < material.whole.length:
        assert not trace.whole
    return Outcome(moment, safe, safe, trace.length - safe, "in place" if there else "recovered")


def _assert_same_vectors(trace: Trace, whole: Trace) -> None:
    for at in whole.heads:
        for name in ("query", "key", "value", "hit_mass"):
            ours, theirs = getattr(trace.head(*at), name), getattr(whole.head(*at), name)[: trace.length]
            assert abs(ours - theirs).max() < 1e-5, (at, name)


def kill_a_replay(material: Material, folder: Path, seed: int) -> Outcome:
    """Kill a replay, go on with it, and check that it finds what one finds that was never killed."""
    draw = random.Random(seed)
    moment = REPLAY_MOMENTS[seed % len(REPLAY_MOMENTS)]
    folder.mkdir()
    shutil.copy(material.trace, folder)
    log = folder.parent / f"{folder.name}.log"
    arguments = ("replay", "four.parquet", *REPLAY, "-o", "r.parquet")
    logs = material.model.parent / "logs"
    child = Child(*arguments, cwd=folder, logs=logs, prepare=_dying(moment, draw, log, _note_parts))
    if moment == "any time":
        time.sleep(draw.uniform(0, 1.1 * material.replay_seconds))
        child.kill()
    ended = child.wait()
    assert ended.code in (-signal.SIGKILL, 0), ended.err
    there = (folder / "r.parquet").exists()
    safe = _last(log)
    if there:
        _assert_same_rows(pd.read_parquet(folder / "r.parquet"), material.replay)
    if ended.code == 0:
        return Outcome(moment, safe, safe, 0, "was quicker")
    parts = folder / "r.parquet.parts"
    whole = [path for path in parts.glob("*.settings.parquet") if _reads(path)]
    assert len(whole) == len(list(parts.glob("*.settings.parquet")))
    assert there or len(whole) >= safe
    # What is finished is not done again.
    again_log = folder.parent / f"{folder.name}.again"
    again = Child(
        *arguments, "--resume", cwd=folder, logs=logs, prepare=_dying("never", draw, again_log, _note_parts)
    ).wait()
    assert again.code == 0, again.err
    if not there:
        assert _last(again_log) == 4 - len(whole)
    _assert_same_rows(pd.read_parquet(folder / "r.parquet"), material.replay)
    assert not parts.exists()
    return Outcome(moment, safe, safe, len(whole) - safe if not there else 0, "in place" if there else "gone on with")


def _reads(path: Path) -> bool:
    try:
        return len(pd.read_parquet(path)) > 0
    except (OSError, ValueError):
        return False


def _assert_same_rows(found: pd.DataFrame, wanted: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(found.drop(columns="seconds"), wanted.drop(columns="seconds"))


def _last(log: Path) -> int:
    data = log.read_bytes() if log.exists() else b""
    return int(struct.unpack("q", data[-8:])[0]) if data else 0


def _dying(moment: str, draw: random.Random, log: Path, note: Callable[[int], None]) -> Callable[[], None]:
    """What a process does beforehand so that it dies at a moment, and notes in ``log`` what is safe until then."""
    share = draw.random()

    def prepare() -> None:
        note(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        _PREPARE[moment](share)

    return prepare


def _note_written(log: int) -> None:
    """Note how many tokens every layer has handed to the system, whenever that changes."""
    from beaconscope.trace.writer import Writer

    write = Writer._write

    def noting(self: Any, *block: Any) -> None:
        write(self, *block)
        os.write(log, struct.pack("q", min(self.written.values())))

    Writer._write = noting  # type: ignore[method-assign]


def _note_parts(log: int) -> None:
    """Note how many layers are replayed and written."""
    from beaconscope.replay.sweep import Parts

    write = Parts.write
    written = 0

    def noting(self: Any, *part: Any) -> None:
        nonlocal written
        write(self, *part)
        written += 1
        os.write(log, struct.pack("q", written))

    Parts.write = noting  # type: ignore[method-assign]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _never(share: float) -> None:
    pass


def _in_a_message(share: float) -> None:
    """Half of a message is written, then no more."""
    from beaconscope.trace.stream import StreamWriter

    write = StreamWriter._write
    left = 3 + int(share * 100)

    def dying(self: Any, data: Any) -> None:
        nonlocal left
        left -= 1
        if left:
            write(self, data)
            return
        view = memoryview(data).cast("B")
        self._file.write(view[: int(share * len(view))])
        _die()

    StreamWriter._write = dying  # type: ignore[method-assign]


def _in_the_trace(share: float) -> None:
    """Some row groups are written, or all of them but the checksum."""
    from beaconscope.trace import finalize

    rows, seal = finalize._file_rows, finalize.seal
    left = 1 + int(share * 5)

    def dying(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        return rows(*arguments) if left else _die()

    finalize._file_rows = dying
    finalize.seal = lambda path: _die() if share > 0.5 else seal(path)


def _before(share: float) -> None:
    replace = os.replace

    def dying(source: Any, target: Any, **other: Any) -> None:
        if str(target).endswith(".parquet"):
            _die()
        replace(source, target, **other)

    os.replace = dying  # type: ignore[assignment]


def _after(share: float) -> None:
    replace = os.replace
    left = 1 + int(share * 4)

    def dying(source: Any, target: Any, **other: Any) -> None:
        nonlocal left
        replace(source, target, **other)
        # The one file of a recording, or one of those of a replay.
        left -= 1 if str(target).endswith(".parquet") else 0
        if Path(target).name == "t.parquet" or not left:
            _die()

    os.replace = dying  # type: ignore[assignment]


def _in_the_removal(share: float) -> None:
    unlink = Path.unlink
    left = 1 + int(share * 6)

    def dying(self: Path, *arguments: Any, **other: Any) -> None:
        nonlocal left
        left -= 1 if ".journal" in self.parent.name else 0
        if not left:
            _die()
        unlink(self, *arguments, **other)

    Path.unlink = dying  # type: ignore[method-assign]


def _in_a_part(share: float) -> None:
    """Half of a file is written in place of the temporary one."""
    import pyarrow.parquet as pq

    write = pq.write_table
    left = 1 + int(share * 8)

    def dying(table: Any, file: Any, **other: Any) -> None:
        nonlocal left
        write(table, file, **other)
        left -= 1
        if not left:
            file.truncate(int(share * file.tell()))
            _die()

    pq.write_table = dying


_PREPARE: dict[str, Callable[[float], None]] = {
    "any time": _never,
    "never": _never,
    "in a message": _in_a_message,
    "in the trace": _in_the_trace,
    "before the rename": _before,
    "after the rename": _after,
    "in the removal": _in_the_removal,
    "in a part": _in_a_part,
    "before a rename": _before,
    "after a rename": _after,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    # What the command line sees to before it loads the library, and a fork of this process cannot.
    logging.disable_progress_bar()
    counts: Counter[tuple[str, str, str]] = Counter()
    safe: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        material = make_material(folder)
        for number in range(given.kills):
            what = "replay" if number % 3 == 2 else "record"
            kill = kill_a_replay if what == "replay" else kill_a_recording
            outcome = kill(material, folder / f"kill-{number}", given.seed + number // 3 + 7 * (number % 3))
            counts[what, outcome.moment, outcome.how] += 1
            safe[what, outcome.moment] += outcome.safe
            print(f"{number:3} {what} {outcome}", flush=True)
    print(f"\n{'':8}{'killed':20}{'what was left':26}times")
    for (what, moment, how), times in sorted(counts.items()):
        print(f"{what:8}{moment:20}{how:26}{times}")
    print(f"{sum(counts.values())} kills, {sum(safe.values()):,} tokens and layers that were safe, none of them lost")


if __name__ == "__main__":
    sys.exit(main())
