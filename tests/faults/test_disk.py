"""A disk that fills up while a recording runs, or at its very end."""

from __future__ import annotations

import os
import resource
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from beaconscope import BeaconKV, BeaconScopeError, Full, RecordOptions, load_trace, record, recover
from beaconscope.record import plan
from tests.disk import small_disk
from tests.faults.conftest import LONG
from tests.record.recording import PROMPT, endless_tokenizer, record_tiny, token_ids
from tests.tiny import tiny_model

POLICY = BeaconKV(budget=32, interval=8, recent=4, beacons=4)


def options(**changes) -> RecordOptions:
    return RecordOptions(**{"policy": POLICY, "raw": True, "max_new_tokens": 600, "layers": "all", **changes})


@contextmanager
def files_of_at_most(size: int):
    """Let this process write no file beyond ``size`` bytes."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def check_recovered(output: Path, *, least: int) -> None:
    trace = load_trace(recover(output))
    assert not trace.whole
    assert trace.length >= least
    tokens = trace.length - len(PROMPT)
    whole = record_tiny(tiny_model(), output.parent, policy=POLICY, max_new_tokens=tokens, name="whole")
    assert token_ids(trace) == token_ids(whole)
    assert sorted(path.name for path in output.parent.iterdir()) == ["t.parquet", "whole.parquet"]


def test_a_disk_that_fills_up_at_the_very_end_loses_nothing(tmp_path):
    """The journal fits, one file per layer; the trace, which holds all of them, does not."""
    output = tmp_path / "t.parquet"
    settings = options(policy=Full(), completion="Three plus four is seven. " * 12)
    record(tiny_model(), endless_tokenizer(), PROMPT, settings, output=tmp_path / "free.parquet")
    size = (tmp_path / "free.parquet").stat().st_size
    with files_of_at_most(int(0.93 * size)), pytest.raises(BeaconScopeError) as caught:
        record(tiny_model(), endless_tokenizer(), PROMPT, settings, output=output)
    assert f"all {len(PROMPT) + 26 * 12} tokens are safe" in str(caught.value)
    assert f"run `beaconscope recover {output}`" in str(caught.value)
    assert not list(tmp_path.glob("*.partial"))
    trace = load_trace(recover(output))
    assert trace.whole
    assert token_ids(trace) == token_ids(load_trace(tmp_path / "free.parquet"))


def test_a_small_disk_is_noticed_before_the_recording_starts(tmp_path):
    with small_disk(tmp_path / "disk", "200k"):
        with pytest.raises(BeaconScopeError, match=r"has 20\d kB free"):
            record(tiny_model(), endless_tokenizer(), PROMPT, options(), output=tmp_path / "disk" / "t.parquet")
        assert list((tmp_path / "disk").iterdir()) == []


def test_a_disk_that_somebody_else_fills_up(tmp_path, monkeypatch):
    # GIVEN a disk that had room when the recording started
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 1 << 40)
    output = tmp_path / "disk" / "t.parquet"
    with small_disk(tmp_path / "disk", "400k"):
        with pytest.raises(BeaconScopeError) as caught:
            record(tiny_model(), endless_tokenizer(), PROMPT, options(), output=output)
        assert "No space left on device; make room" in str(caught.value)
        # WHEN there is room again
        subprocess.run(["mount", "-o", "remount,size=20m", str(tmp_path / "disk")], check=True)
        # THEN nothing that was said to be safe is lost
        check_recovered(output, least=len(PROMPT) + 40)


@pytest.mark.slow
def test_a_full_disk_on_the_command_line(start, run, here, model_folder):
    # GIVEN a process that may not write beyond 200 kB of a file
    arguments = ("record", "-q", "--model", model_folder, "--prompt", "plan.txt", "--raw", "--budget", "32")
    arguments += ("--interval", "8", "--recent", "4", "--beacons", "4", "--layers", "all", "-n", LONG - 100)
    process = start(*arguments, cwd=here, prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)))
    out, err = process.communicate(timeout=200)
    # THEN it ends with one line that says what to run
    assert (process.returncode, out) == (1, "")
    assert err.startswith("error: cannot write to plan.parquet.journal: File too large; make room; ")
    assert err.endswith(" tokens are safe in plan.parquet.journal: run `beaconscope recover plan.parquet`\n")
    assert len(err.splitlines()) == 1
    # AND that does it
    result = run("recover", "plan.parquet")
    assert result.exit_code == 0, result.output
    trace = load_trace("plan.parquet")
    assert trace.length >= int(err.partition(" tokens are safe")[0].rpartition(" ")[2])
    assert sorted(os.listdir()) == ["plan.parquet", "plan.txt"]
