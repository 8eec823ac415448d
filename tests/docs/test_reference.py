"""The reference says what the code says."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import beaconscope
from beaconscope.analyze import AnalyzeOptions, add_causal, compare
from beaconscope.record import Forced, Free
from beaconscope.replay import Difference, by_setting, make_jobs, sweep
from beaconscope.replay.summary import MEANS
from beaconscope.trace import LayerLayout, TraceLayout, parquet_schema
from docs._reference import FOLDER, pages
from docs._reference.columns import specified
from tests.docs.blocks import MODEL


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return pages()


@pytest.mark.parametrize("name", ["commands.md", "policies.md", "columns.md", "python.md"])
def test_a_page_is_what_the_code_gives(written: dict[str, str], name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == written[name], (
        "run `make reference` and commit what it writes"
    )


@pytest.mark.parametrize("name", ["policies.md", "columns.md"])
def test_everything_has_a_meaning(written: dict[str, str], name: str) -> None:
    assert [line for line in written[name].splitlines() if line.endswith("|  |")] == []


def test_the_specification_of_the_trace_has_the_columns_of_the_schema() -> None:
    layout = TraceLayout((LayerLayout(0, (0,), group_size=2, key_size=4, value_size=4),), "float32", hits=8)
    schema = {field.name: field.nullable for field in parquet_schema(layout)}
    # A column that is never null itself may have gaps in its lists, and values are null only where a layer has none.
    may_be_null = {name: not row[2].startswith("never") for name, row in specified("Columns").items()}
    assert may_be_null == schema | {"value": True}


@pytest.fixture(scope="module")
def found(given: Path) -> dict[str, set[str]]:
    """The names that the commands give, by heading of measures.md."""
    trace = beaconscope.load_trace(given / "trace.parquet")
    options = AnalyzeOptions(cluster_heads=1, cluster_queries=40, permutations=19, shifts=20, clusters=3)
    analysis = beaconscope.analyze(trace, options)
    model = beaconscope.load_model(beaconscope.LoadOptions(MODEL)).model
    causal = add_causal(trace, analysis, model)
    both = compare([trace, trace], [analysis, analysis])
    replayed = sweep(make_jobs(trace, [beaconscope.BeaconKV(budget=96, interval=16)], heads=[(1, 0)], per_token=True))
    frames: dict[str, Any] = {
        "A token": causal.tokens,
        "A revisit": causal.revisits,
        "What a revisit looks at": analysis.targets,
        "A revisited sentence": analysis.anchors,
        "A query head": analysis.heads,
        "Clusters of a head's queries": analysis.clusters,
        "Each number of clusters": analysis.sweep,
        "The beacons of a query head": analysis.beacons,
        "What the recording's cache lost": analysis.cache,
        "A revisit that looked at evicted positions": analysis.lost,
        "Did looks back matter": causal.causal,
        "Two traces": both.pairs[0],
        "One head in two traces": both.matches[0],
        "Revisits by length": both.by_length[0],
        "A setting and a KV head": replayed.settings,
        "A setting and a query": replayed.tokens,
    }
    of_settings = set(by_setting(replayed.settings)) - set(replayed.settings) - set(MEANS)
    fields = {"Run with the model on the recorded text": Forced, "Run with the model, writing by itself": Free}
    return {
        **{name: set(frame) for name, frame in frames.items()},
        **{name: {field.name for field in dataclasses.fields(kind)} for name, kind in fields.items()},
        "A setting, over heads and seeds": of_settings,
        "Does BeaconKV beat its controls": {field.name for field in dataclasses.fields(Difference)}
        | {"exceeds_spread"},
    }


def sections() -> dict[str, str]:
    """The parts of measures.md by their headings."""
    text = (FOLDER / "measures.md").read_text(encoding="utf-8")
    return dict(part.split("\n", 1) for part in text.split("\n## ")[1:])


def names(section: str) -> list[str]:
    return re.findall(r"^\| `(\w+)`", section, re.MULTILINE)


@pytest.mark.parametrize("heading", [heading for heading in sections() if heading != "A step of a trace"])
def test_the_measures_are_those_that_the_commands_give(found: dict[str, set[str]], heading: str) -> None:
    assert sorted(names(sections()[heading])) == sorted(found[heading])


def test_the_measures_of_a_step_are_columns_of_the_trace() -> None:
    assert set(names(sections()["A step of a trace"])) <= set(specified("Columns"))


def test_no_kind_of_measure_is_left_out(found: dict[str, set[str]]) -> None:
    assert set(found) | {"A step of a trace"} == set(sections())


@pytest.mark.parametrize(("heading", "section"), sections().items(), ids=list(sections()))
def test_what_computes_a_measure_exists(heading: str, section: str) -> None:
    (line,) = re.findall(r"Computed by (.+)\.$", section, re.MULTILINE)
    for name in re.findall(r"`([\w.]+)`", line):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, member = name.rpartition(".")
            assert hasattr(importlib.import_module(module), member), name
