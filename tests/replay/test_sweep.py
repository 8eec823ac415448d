"""Sweeps: what jobs find, workers that die, and going on from what is finished."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest

from beaconscope import BeaconKV, BeaconScopeError, Full, RandomEviction, StreamingLLM, UsageError
from beaconscope.kv.policies import TOVA, FastGen, Oracle
from beaconscope.replay.grid import with_controls
from beaconscope.replay.sweep import Found, Parts, make_jobs, run_job, sweep
from tests.dying import DieOf, DieOnce
from tests.record.recording import record_tiny
from tests.tiny import tiny_model

SETTINGS = [Full(), StreamingLLM(budget=20), BeaconKV(budget=20, interval=6, beacons=3, recent=4), TOVA(budget=20)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    model = tiny_model(num_hidden_layers=3)
    return record_tiny(model, tmp_path_factory.mktemp("trace"), policy=Full(), max_new_tokens=16)


def test_a_job_is_small_and_holds_no_tensor(trace):
    jobs = make_jobs(trace, with_controls(SETTINGS), revisits=[40])
    assert [job.layer for job in jobs] == [0, 1, 2]
    assert len(pickle.dumps(jobs[0])) < 10_000


def test_rows_say_what_was_measured(trace):
    found = sweep(make_jobs(trace, SETTINGS, revisits=[40, 41], per_token=True))
    assert len(found.settings) == 4 * 3 * 2
    full = found.settings[found.settings["policy"] == "full"]
    assert (full[["mass", "mass_trt", "hit_rate"]] == 1).all(axis=None)
    assert (full["trts"] == 2).all()
    assert (full["queries"] == 16).all()
    # 48 positions of keys and values of 16 float32 each.
    assert (full["kv_bytes"] == 48 * 2 * 16 * 4).all()
    streaming = found.settings[found.settings["policy"] == "streaming-llm"]
    assert (streaming["entries_peak"] == 21).all()
    per_token = found.tokens.merge(found.settings, on=["layer", "kv_head", "setting"], suffixes=("", "_mean"))
    means = per_token.groupby(["layer", "kv_head", "setting"])[["mass", "mass_mean"]].mean()
    np.testing.assert_allclose(means["mass"], means["mass_mean"], rtol=1e-6)
    of_trt = found.tokens[found.tokens["trt"]]
    assert set(of_trt["position"]) == {40, 41}


def test_a_layer_set_is_decided_by_all_heads_though_one_is_measured(trace):
    whole = sweep(make_jobs(trace, [TOVA(budget=20)])).settings
    part = sweep(make_jobs(trace, [TOVA(budget=20)], heads=[(1, 1)])).settings
    same = whole[(whole["layer"] == 1) & (whole["kv_head"] == 1)]
    assert part["mass"].tolist() == same["mass"].tolist()


def results(found):
    return found.settings.drop(columns="seconds")


def test_a_worker_that_dies_does_not_lose_the_sweep(trace, tmp_path):
    jobs = make_jobs(trace, SETTINGS)
    found = sweep(jobs, workers=2, run=DieOnce(str(tmp_path / "died")))
    assert (tmp_path / "died").exists()
    pd.testing.assert_frame_equal(results(found), results(sweep(jobs)))


def test_workers_that_keep_dying_end_the_sweep_and_what_is_finished_stays(trace, tmp_path):
    jobs = make_jobs(trace, SETTINGS)
    parts = tmp_path / "parts"
    with pytest.raises(BeaconScopeError, match=r"3 workers died of one task.*--resume"):
        sweep(jobs, workers=2, parts=parts, run=DieOf(0))
    assert [Parts(parts).read(job.fingerprint()) is not None for job in jobs] == [False, True, True]

    # WHEN it goes on
    done = []

    def only_the_missing(job):
        done.append(job.layer)
        return run_job(job)

    found = sweep(jobs, parts=parts, resume=True, run=only_the_missing)
    assert done == [0]
    pd.testing.assert_frame_equal(results(found), results(sweep(jobs)))


def test_a_part_that_is_no_parquet_is_done_again(trace, tmp_path):
    jobs = make_jobs(trace, SETTINGS[:1])
    sweep(jobs, parts=tmp_path / "parts")
    (tmp_path / "parts" / f"{jobs[0].fingerprint()}.settings.parquet").write_bytes(b"PAR1 half")
    found = sweep(jobs, parts=tmp_path / "parts", resume=True)
    assert len(found.settings) == 6


def test_other_settings_are_another_job(trace):
    prints = {
        job.fingerprint()
        for settings in ([Full()], [StreamingLLM(budget=20)], [StreamingLLM(budget=21)])
        for revisits in ((), (40,))
        for job in make_jobs(trace, settings, revisits=revisits)
    }
    assert len(prints) == 18


def test_parts_leave_what_is_not_theirs(tmp_path):
    folder = tmp_path / "parts"
    parts = Parts(folder)
    parts.write("a", Found(pd.DataFrame({"x": [1]}), pd.DataFrame()))
    (folder / "notes.txt").write_text("mine")
    parts.remove()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_what_cannot_be_swept_is_refused(trace, tmp_path):
    jobs = make_jobs(trace, [Full()])
    with pytest.raises(UsageError, match="engine is 'spark'; give one of loky, dask, ray"):
        sweep(jobs, engine="spark")
    with pytest.raises(UsageError, match="address"):
        sweep(jobs, address="tcp://nowhere:1")
    with pytest.raises(UsageError, match="jobs is 0"):
        sweep(jobs, workers=0)
    sliding = record_tiny(tiny_model("gemma3_text"), tmp_path, max_new_tokens=4, layers="0")
    with pytest.raises(BeaconScopeError, match="sliding window"):
        make_jobs(sliding, [Full()])


def test_a_trace_that_does_not_know_its_special_tokens_says_so(trace, monkeypatch):
    monkeypatch.setattr("beaconscope.replay.layer._kinds", lambda trace, device: None)
    with pytest.raises(BeaconScopeError, match=r"special.*leave fastgen out"):
        sweep(make_jobs(trace, [FastGen()]))


def test_seeds_have_rows_of_their_own(trace):
    settings = [RandomEviction(budget=20, interval=6, recent=2, seed=seed) for seed in range(3)]
    found = sweep(make_jobs(trace, [*settings, Oracle(budget=20, interval=6)])).settings
    random = found[found["policy"] == "random"]
    assert random["setting"].nunique() == 1
    assert random["seed"].nunique() == 3
    assert random.groupby(["layer", "kv_head"])["mass"].nunique().max() > 1
