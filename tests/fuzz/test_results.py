"""Analyses and replays that somebody has tampered with are shown as they are, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beaconscope.analyze import analyze
from beaconscope.errors import BeaconScopeError
from beaconscope.report.collect import collect
from beaconscope.report.figures import _tradeoff
from beaconscope.report.findings import load_findings
from beaconscope.report.replays import load_replay
from beaconscope.trace import Trace
from tests.fuzz.changing import Script, spoil
from tests.report.made import PLAIN, QUICK, made_trace

QUICKLY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    trace = made_trace(tmp_path_factory.mktemp("results") / "t.parquet", length=40)
    analyze(trace, QUICK).save(trace.path.with_name("a.parquet"))
    return trace


def spoiled(table: pa.Table, key: str, script: bytes, path: Path) -> Path:
    """Write a table with the JSON under ``key`` changed as the script says."""
    tree: Any = json.loads(table.schema.metadata[key.encode()])
    told = Script(script)
    for _ in range(3):
        spoil(tree, told)
    pq.write_table(table.replace_schema_metadata({key: json.dumps(tree)}), path)
    return path


@QUICKLY
@given(script=st.binary(min_size=4, max_size=24))
def test_an_analysis(trace: Trace, script: bytes) -> None:
    table = pq.read_table(trace.path.with_name("a.parquet"))
    path = spoiled(table, "beaconscope.analysis", script, trace.path.with_name("changed.parquet"))
    try:
        findings = load_findings(path, trace)
    except BeaconScopeError:
        return
    collect(trace, findings, PLAIN)


SETTINGS = [
    {
        "setting": name,
        "policy": name,
        "params": {"beacons": 4},
        "mass": 0.5,
        "kv_bytes": size,
        "spread": None,
        "budget": 24,
    }
    for name, size in (("beacon", 1000), ("random", 900), ("full", 5000))
]


@QUICKLY
@given(script=st.binary(min_size=4, max_size=24))
def test_a_replay(trace: Trace, script: bytes) -> None:
    said = {"schema": "beaconscope.replay", "schema_version": "1.0", "ranked_by": "mass", "settings": SETTINGS}
    table = pa.table({"x": [1]}).replace_schema_metadata({"beaconscope.replay": json.dumps(said)})
    path = spoiled(table, "beaconscope.replay", script, trace.path.with_name("changed-replay.parquet"))
    try:
        found = load_replay(path)
    except BeaconScopeError:
        return
    _tradeoff(found)
