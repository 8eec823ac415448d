"""Pages and figures of traces that are not finite: missing is shown as missing."""

from __future__ import annotations

import re

import numpy as np
import pytest

from beaconscope import BeaconKV
from beaconscope.report import ReportOptions, write_figures
from tests.record.recording import at_position, record_tiny, spoiled
from tests.report.made import Page, page_of, subject
from tests.tiny import tiny_model

NAN = float("nan")
OPTIONS = ReportOptions(space_heads=1, shown_queries=60, fit_queries=40)


def broken(block):
    """From position 50 on layer 1 is not finite at all; in layer 0 a query, a hit and a beacon's cosine are not."""
    late = np.arange(block.first_position, block.first_position + len(block.query)) >= 50
    if block.layer == 1:
        for name in ("query", "key", "value", "hit_mass", "mass_local", "beacon_similarity"):
            getattr(block, name)[late] = NAN
    at_position("query", NAN, 0, 45, 0, 0, 0)(block)
    at_position("hit_mass", NAN, 0, 45, 0, 0, 0)(block)
    at_position("beacon_similarity", NAN, 0, 45, 0, 0)(block)


@pytest.fixture(scope="module", params=["fps", "kmeans"])
def trace(request, tmp_path_factory):
    policy = BeaconKV(budget=24, interval=8, beacons=4, recent=4, selector=request.param)
    with spoiled(broken):
        return record_tiny(tiny_model(), tmp_path_factory.mktemp("t"), policy=policy, max_new_tokens=60)


def test_what_is_not_finite_is_not_drawn_and_is_listed(trace):
    page = Page(page_of(trace, OPTIONS))
    summary = page.plain["summary"]
    # 42 positions of 2 query heads and one key in each of 2 KV heads, and the one query in layer 0.
    assert summary["missing_vectors"] == 2 * 42 * 3 + 1
    assert [(head["layer"], head["kv_head"]) for head in summary["missing"]] == [(0, 0), (1, 0), (1, 1)]
    # M = 8 hits of 4 query heads at 42 positions, and the one in layer 0.
    assert f"{42 * 4 * 8 + 1:,} recorded hits, whose attention is not finite" in page.plain["left_out"]
    for head in page.plain["heads"]:
        shown = page.array(f"space.{head['number']}.position")
        assert len(shown)
        assert (shown < 50).all() == (head["layer"] == 1)
    first = page.array("space.0.position")
    assert 45 not in first and 44 in first
    for name in page.plain["manifest"]:
        if name.startswith("space.") and name.endswith((".x", ".y")):
            assert np.isfinite(page.numbers(name)).all()


def test_figures_are_drawn(trace, tmp_path):
    assert {path.stem for path in write_figures(subject(trace), tmp_path, OPTIONS)} >= {
        "overview",
        "attention",
        "heads",
    }
    for path in tmp_path.glob("*.svg"):
        assert not re.search(r"\b(nan|inf)\b", path.read_text(), re.IGNORECASE), path


def test_a_trace_of_nothing_finite_has_a_page(tmp_path):
    def all_gone(block):
        for name in ("query", "key", "value", "hit_mass", "beacon_similarity"):
            getattr(block, name)[:] = NAN

    policy = BeaconKV(budget=24, interval=8, beacons=4, recent=4)
    with spoiled(all_gone):
        trace = record_tiny(tiny_model(), tmp_path, policy=policy, max_new_tokens=30)
    page = Page(page_of(trace, OPTIONS))
    assert not [name for name in page.plain["manifest"] if name.startswith("space.")]
    assert page.plain["verdict"]["text"].startswith("Not")
    assert write_figures(subject(trace), tmp_path, OPTIONS)
