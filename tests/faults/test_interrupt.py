"""Ctrl-C once and twice, and a kill: what is left, and what is said."""

from __future__ import annotations

import re
import signal
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from beaconscope import BeaconKV, BeaconScopeError, RecordOptions, load_trace, record, recover
from beaconscope.record import Prompt, record_prompts
from tests.faults.conftest import LONG
from tests.record.recording import PROMPT, endless_tokenizer, evictions_of, record_tiny, token_ids
from tests.tiny import tiny_model
from tests.waiting import wait_for

POLICY = BeaconKV(budget=32, interval=8, recent=4, beacons=4)
ARGUMENTS = ("--raw", "--budget", "32", "--interval", "8", "--recent", "4", "--beacons", "4", "--layers", "all")

in_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread"
)


class Interrupting:
    """A progress that presses Ctrl-C when it is told of the numbers of tokens in ``at``, in whole recordings."""

    def __init__(self, *at: int) -> None:
        self.at = list(at)

    def __call__(self, done: int, total: int | None) -> None:
        if self.at and done >= self.at[0]:
            self.at.pop(0)
            signal.raise_signal(signal.SIGINT)


def options(**changes) -> RecordOptions:
    return RecordOptions(**{"policy": POLICY, "raw": True, "max_new_tokens": 2000, **changes})


@in_main_thread
def test_ctrl_c_ends_a_recording_early_and_says_so_in_the_trace(tmp_path):
    former = signal.getsignal(signal.SIGINT)
    trace = record(
        tiny_model(), endless_tokenizer(), PROMPT, options(), output=tmp_path / "t.parquet", progress=Interrupting(40)
    )
    assert not trace.whole
    assert trace.cut_reason == "interrupted by the user"
    assert len(PROMPT) + 40 <= trace.length < len(PROMPT) + 200
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]
    assert signal.getsignal(signal.SIGINT) is former
    # What is there is what the whole recording would have had.
    whole = record_tiny(tiny_model(), tmp_path, policy=POLICY, max_new_tokens=trace.length - len(PROMPT), name="w")
    assert token_ids(trace) == token_ids(whole)
    assert trace.evictions(0, 0)[-1].evicted.tolist() == whole.evictions(0, 0)[-1].evicted.tolist()


@in_main_thread
def test_ctrl_c_while_the_prompt_is_fed_leaves_the_prompt(tmp_path):
    trace = record(
        tiny_model(), endless_tokenizer(), PROMPT, options(), output=tmp_path / "t.parquet", progress=Interrupting(0)
    )
    assert trace.length == trace.prompt_length == len(PROMPT)
    assert not trace.whole


@in_main_thread
def test_ctrl_c_in_many_prompts_leaves_those_that_were_done_and_the_next_run_goes_on(tmp_path):
    prompts = [Prompt(name, PROMPT + name) for name in "abcd"]
    arguments = (tiny_model(), endless_tokenizer(), prompts, options(max_new_tokens=80))
    seen = []

    class InSecond(Interrupting):
        def __call__(self, done, total):
            seen.append(done)
            if seen.count(0) == 2:  # of the second prompt
                super().__call__(done, total)

    paths = record_prompts(*arguments, folder=tmp_path / "f", progress=InSecond(30))
    assert [path.stem for path in paths] == ["a", "b"]
    assert [load_trace(path).whole for path in paths] == [True, False]
    assert [path.stem for path in record_prompts(*arguments, folder=tmp_path / "f")] == ["a", "b", "c", "d"]
    assert all(load_trace(path).whole for path in (tmp_path / "f").iterdir())


@in_main_thread
def test_a_second_ctrl_c_leaves_the_journal_and_says_what_to_run(tmp_path):
    output = tmp_path / "t.parquet"

    class Twice(Interrupting):
        def __call__(self, done, total):
            super().__call__(done, total)
            if not self.at:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=re.escape(f"run `beaconscope recover {output}`")):
        record(tiny_model(), endless_tokenizer(), PROMPT, options(), output=output, progress=Twice(40))
    assert not output.exists()
    trace = load_trace(recover(output))
    assert not trace.whole
    assert trace.length >= len(PROMPT) + 40
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


# A command line whose last step takes its time, so that there is some for a second Ctrl-C.
SLOW_END = """
import time
from beaconscope.cli import main
from beaconscope.trace import Journal
finalize = Journal.finalize
def slowly(self, *rest, **options):
    print("finishing", flush=True)
    time.sleep(60)
    return finalize(self, *rest, **options)
Journal.finalize = slowly
main()
"""


@pytest.mark.slow
def test_two_ctrl_c_on_the_command_line(start, run, here, model_folder):
    # GIVEN a recording under way
    arguments = ("record", "--model", model_folder, "--prompt", "plan.txt", *ARGUMENTS, "-n", LONG - 100)
    process = start(*arguments, script=SLOW_END, cwd=here)
    tokens = here / "plan.parquet.journal" / "tokens.arrows"
    wait_for(lambda: tokens.exists() and tokens.stat().st_size > 10_000, process)
    # WHEN Ctrl-C is pressed, and again while the file is being finished
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "finishing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    # THEN it stops at once, leaves the journal and says what to run
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1].startswith("error: stopped before the trace was written")
    assert "`beaconscope recover plan.parquet`" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not (here / "plan.parquet").exists()
    # AND that does what it says
    result = run("recover", "plan.parquet")
    assert result.exit_code == 0, result.output
    assert load_trace("plan.parquet").length > len(PROMPT)
    assert sorted(path.name for path in here.iterdir()) == ["plan.parquet", "plan.txt"]


# A command line that draws a token every 20 ms and notes when.
TIMED = """
import os, struct, sys, time
from beaconscope.cli import main
from beaconscope.record.draw import Draw
draw = Draw.__call__
times = os.open("times", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def timed(self, logits):
    time.sleep(0.02)
    os.write(times, struct.pack("d", time.time()))
    return draw(self, logits)
Draw.__call__ = timed
main()
"""


def times_in(path: Path) -> list[float]:
    data = path.read_bytes() if path.exists() else b""
    return [time for (time,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]


@pytest.mark.slow
def test_after_a_kill_no_token_older_than_two_seconds_is_lost(start, run, here, model_folder):
    # GIVEN a recording under way for some seconds
    arguments = ("record", "--model", model_folder, "--prompt", "plan.txt", *ARGUMENTS, "-n", LONG - 100)
    process = start(*arguments, script=TIMED, cwd=here)
    wait_for(lambda: (times := times_in(here / "times")) and times[-1] - times[0] > 4, process)
    # WHEN it is killed
    killed = time.time()
    process.kill()
    process.wait()
    written = sum(moment < killed - 2 for moment in times_in(here / "times"))
    assert written >= 20
    # THEN there is no trace, another recording does not run over what is there, and recover makes one of it
    assert not (here / "plan.parquet").exists()
    refused = run(*arguments, "-q")
    assert refused.exit_code == 1
    assert "`beaconscope recover plan.parquet`" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    result = run("recover", "plan.parquet")
    assert result.exit_code == 0, result.output
    trace = load_trace("plan.parquet")
    assert not trace.whole
    assert "interrupted" in trace.cut_reason
    # AND it holds all that was written two seconds before, as a whole recording would have
    generated = trace.length - len(PROMPT)
    assert generated >= written
    whole = record_tiny(
        tiny_model("llama", max_position_embeddings=LONG), here, policy=POLICY, max_new_tokens=generated, name="whole"
    )
    assert token_ids(trace) == token_ids(whole)
    assert trace.text == whole.text
    for at in whole.heads:
        ours, theirs = trace.head(*at), whole.head(*at)
        for name in ("query", "key", "value", "hit_mass", "beacon_similarity"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-5)
        assert evictions_of(trace, at) == evictions_of(whole, at)


def test_a_fault_in_the_middle_leaves_the_journal(tmp_path, monkeypatch):
    """Whatever it was that went wrong: what was recorded stays."""
    output = tmp_path / "t.parquet"

    class Failing(Interrupting):
        def __call__(self, done, total):
            if done >= 40:
                raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        record(tiny_model(), endless_tokenizer(), PROMPT, options(), output=output, progress=Failing())
    with pytest.raises(BeaconScopeError, match="holds an interrupted recording"):
        record(tiny_model(), endless_tokenizer(), PROMPT, options(), output=output)
    assert load_trace(recover(output)).length >= len(PROMPT) + 40
