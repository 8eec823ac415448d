"""Sweeps and recordings in several processes, on Dask with a scheduler and two workers of their own, and on Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

from beaconscope import BeaconKV, BeaconScopeError, Full, LoadOptions, RecordOptions, StreamingLLM, engines
from beaconscope.models import load_model
from beaconscope.record import Prompt, record_prompts, record_with_workers
from beaconscope.record.many import claim_gpu
from beaconscope.replay.sweep import Parts, make_jobs, sweep
from beaconscope.trace import load_trace
from tests.dying import DieOf, DieOnce, RefuseOf
from tests.record.recording import record_tiny, save_tiny, token_ids
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[1]
SETTINGS = [Full(), StreamingLLM(budget=20), BeaconKV(budget=20, interval=6, beacons=3, recent=4)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    model = tiny_model(num_hidden_layers=3)
    return record_tiny(model, tmp_path_factory.mktemp("trace"), policy=Full(), max_new_tokens=12)


@pytest.fixture(scope="module")
def jobs(trace):
    return make_jobs(trace, SETTINGS)


@pytest.fixture(scope="module")
def alone(jobs):
    return results(sweep(jobs))


def results(found):
    return found.settings.drop(columns="seconds")


@pytest.fixture
def dask_cluster(tmp_path):
    """Address of a scheduler with two workers, each a process of its own that nobody starts again."""
    pytest.importorskip("distributed", reason="the extra dask is not installed")
    started = []

    def start(*arguments):
        # Elsewhere than this process, as on another machine.
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DASK_LOGGING__DISTRIBUTED": "critical"}
        command = [sys.executable, "-m", "dask", *arguments]
        with (tmp_path / f"{len(started)}.log").open("w") as log:
            started.append(
                subprocess.Popen(command, cwd=tmp_path / "elsewhere", env=environment, stdout=log, stderr=log)
            )

    where = tmp_path / "scheduler.json"
    # A host by number: to look names up can take long.
    start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(where))
    for _ in range(2):
        start("worker", "--scheduler-file", str(where), "--nthreads", "1", "--no-nanny", "--no-dashboard")
    try:
        yield _address(where, workers=2)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _address(where, workers):
    """Of the scheduler, once so many workers have come."""
    import json

    from distributed import Client

    end = time.monotonic() + 60
    while not where.exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    address = json.loads(where.read_text())["address"]
    with Client(address, timeout=30) as client:
        client.wait_for_workers(workers, timeout=60)
    return address


def test_a_worker_that_grows_is_replaced_without_a_word(tmp_path):
    # In a process of its own: the warning comes from a thread.
    code = (
        "from beaconscope import engines; from tests.growing import Grow\n"
        "tasks = {str(number): Grow(number) for number in range(7)}\n"
        "found = dict(engines.run_tasks(tasks, workers=2)); print(len(found), len(set(found.values())))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    done, workers = map(int, ended.stdout.split())
    assert done == 7
    assert workers > 2
    assert ended.stderr == ""


def test_dask_workers_in_other_processes_find_what_one_process_finds(dask_cluster, jobs, alone, tmp_path):
    # WHEN one of the two workers dies on the way
    died = tmp_path / "died"
    found = sweep(jobs, engine="dask", address=dask_cluster, run=DieOnce(str(died)))
    # THEN nothing is missing
    assert died.exists()
    pd.testing.assert_frame_equal(results(found), alone)

    # WHEN a sweep is stopped once something is finished
    parts, heard = tmp_path / "parts", []

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"stopped with \d of 3 layers replayed; .*--resume"):
        sweep(jobs, engine="dask", address=dask_cluster, parts=parts, progress=stop)
    # THEN it goes on from there
    found = sweep(
        jobs,
        engine="dask",
        address=dask_cluster,
        parts=parts,
        resume=True,
        progress=lambda done, total: heard.append(done),
    )
    assert heard[0] >= 1
    pd.testing.assert_frame_equal(results(found), alone)


@pytest.fixture(scope="module")
def ray_cluster():
    """A cluster on this machine, which takes seconds to start."""
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="CRITICAL")
    yield
    ray.shutdown()


@pytest.mark.usefixtures("ray_cluster")
def test_a_ray_worker_that_dies_does_not_lose_the_sweep(jobs, alone, tmp_path):
    died = tmp_path / "died"
    found = sweep(jobs, engine="ray", workers=2, run=DieOnce(str(died)))
    assert died.exists()
    pd.testing.assert_frame_equal(results(found), alone)


@pytest.mark.usefixtures("ray_cluster")
def test_a_ray_sweep_that_was_stopped_goes_on_from_what_is_finished(jobs, alone, tmp_path, monkeypatch):
    parts = tmp_path / "parts"
    with pytest.raises(BeaconScopeError) as refused:
        sweep(jobs, engine="ray", parts=parts, run=RefuseOf(2))
    assert str(refused.value) == "this cannot be; do that"
    monkeypatch.setattr(engines, "_DEATHS", 1)
    with pytest.raises(engines.WorkersDied, match=r"died of one task.*--resume"):
        sweep(jobs, engine="ray", parts=parts, resume=True, run=DieOf(2))
    assert [Parts(parts).read(job.fingerprint()) is not None for job in jobs] == [True, True, False]
    found = sweep(jobs, parts=parts, resume=True)
    pd.testing.assert_frame_equal(results(found), alone)


PROMPTS = [Prompt(f"p{n}", f"Plan {n}: add, then double.") for n in range(4)]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    return LoadOptions(str(save_tiny(tmp_path_factory.mktemp("model"))), device="cpu")


@pytest.fixture(scope="module")
def recorded(load, tmp_path_factory):
    """What one process records of each prompt."""
    loaded = load_model(load)
    folder = tmp_path_factory.mktemp("alone")
    paths = record_prompts(loaded.model, loaded.tokenizer, PROMPTS, OPTIONS, folder=folder)
    return [token_ids(load_trace(path)) for path in paths]


OPTIONS = RecordOptions(policy=BeaconKV(budget=20, interval=6, beacons=3, recent=4), raw=True, max_new_tokens=60)


def test_prompts_are_recorded_by_processes_one_of_which_dies(load, recorded, tmp_path):
    heard = []

    def kill_one(done, total):
        heard.append(done)
        if done == 1:
            workers = [
                each for each in psutil.Process().children(recursive=True) if "popen_loky" in str(each.cmdline())
            ]
            workers[0].kill()

    paths = record_with_workers(load, PROMPTS, OPTIONS, folder=tmp_path / "f", workers=2, progress=kill_one)
    traces = [load_trace(path) for path in paths]
    assert [trace.metadata["prompt_id"] for trace in traces] == [prompt.id for prompt in PROMPTS]
    assert all(trace.whole for trace in traces)
    assert [token_ids(trace) for trace in traces] == recorded
    assert heard[-1] == 4
    # AND what is there is not done again
    notes = []
    record_with_workers(load, PROMPTS, OPTIONS, folder=tmp_path / "f", workers=2, note=notes.append)
    assert notes == ["4 of 4 prompts are recorded already and are skipped."]


def test_prompts_are_recorded_on_dask(load, recorded, tmp_path):
    """On a cluster that is started for it."""
    pytest.importorskip("distributed", reason="the extra dask is not installed")
    paths = record_with_workers(load, PROMPTS[:2], OPTIONS, folder=tmp_path / "f", engine="dask")
    assert [token_ids(load_trace(path)) for path in paths] == recorded[:2]


@pytest.mark.usefixtures("ray_cluster")
def test_prompts_are_recorded_on_ray(load, recorded, tmp_path):
    paths = record_with_workers(load, PROMPTS[:2], OPTIONS, folder=tmp_path / "f", engine="ray")
    assert [token_ids(load_trace(path)) for path in paths] == recorded[:2]


def test_a_prompt_that_cannot_be_recorded_is_named(load, tmp_path):
    prompts = [PROMPTS[0], Prompt("long", "x " * 5000)]
    with pytest.raises(BeaconScopeError, match="prompt long: the prompt has"):
        record_with_workers(load, prompts, OPTIONS, folder=tmp_path / "f", workers=2)


def test_each_worker_has_a_gpu_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = (claim_gpu("run", 2, tmp_path) for _ in range(2))
    assert (first[0], second[0]) == (0, 1)
    with pytest.raises(BeaconScopeError, match="all 2 GPUs have a worker already"):
        claim_gpu("run", 2, tmp_path)
    # Another run does not ask, and one that has ended has none.
    assert claim_gpu("other", 2, tmp_path)[0] == 0
    first[1].close()
    assert claim_gpu("run", 2, tmp_path)[0] == 0


def test_a_part_of_a_gpu_is_taken_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-8f6a/1/0, MIG-GPU-8f6a/2/0")
    first, second = (claim_gpu("run", 2, tmp_path) for _ in range(2))
    assert (first[0], second[0]) == (0, 1)


@pytest.mark.parametrize("engine", ["dask", "ray"])
@pytest.mark.parametrize("address", ["127.0.0.1:9", "tcp://127.0.0.1:9"])
def test_a_cluster_that_does_not_answer_is_said_at_once(engine, address, jobs):
    pytest.importorskip({"dask": "distributed"}.get(engine, engine))
    started = time.monotonic()
    with pytest.raises(BeaconScopeError, match=rf"no {engine.title()} \w+ answers at {address}; start one"):
        sweep(jobs, engine=engine, address=address)
    assert time.monotonic() - started < 30  # an import of Ray is in it


@pytest.mark.parametrize("engine", ["dask", "ray"])
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("head:eighty", "is none; give one such as tcp://head:"),
        ("head:\N{SUPERSCRIPT TWO}", "is none; give one such as tcp://head:"),
        ("head:" + "9" * 5000, "is none; give one such as tcp://head:"),
        ("127.0.0.1:99999", "answers at"),
        ("no..host:80", "answers at"),
        ("x" * 70 + ":80", "answers at"),
    ],
)
def test_an_address_that_is_none_is_refused_in_one_line(engine, address, says, jobs):
    pytest.importorskip({"dask": "distributed"}.get(engine, engine))
    with pytest.raises(BeaconScopeError, match=says):
        sweep(jobs, engine=engine, address=address)
