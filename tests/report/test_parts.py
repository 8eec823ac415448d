"""What the page is made of: hits, planes, curves, figures."""

from __future__ import annotations

import xml.dom.minidom
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.manifold import trustworthiness

from beaconscope.errors import BeaconScopeError
from beaconscope.report import write_figures
from beaconscope.report.beacons import BeaconTrack, cluster_curves
from beaconscope.report.collect import Collected
from beaconscope.report.figures import _beacons, _overview, _to_png, _tradeoff
from beaconscope.report.looks import Looks, gather
from beaconscope.report.pack import Pack
from beaconscope.report.space import lay_out, shown_positions
from beaconscope.report.svg import ACCENT, LOSS, Drawing, ticks
from tests.report.made import HOSTILE, PLAIN, hostile_trace, subject


def looks(*rows: tuple[int, int, int, float]) -> Looks:
    step, head, source, mass = zip(*rows, strict=True)
    return Looks(*(np.array(column, np.int32) for column in (step, head, source)), np.array(mass, np.float32))


def test_hits_come_in_order() -> None:
    both = gather([looks((5, 1, 2, 0.1), (3, 1, 0, 0.9)), looks((5, 0, 1, 0.2), (5, 0, 4, 0.7))])
    assert list(zip(both.step, both.head, both.source, strict=True)) == [(3, 1, 0), (5, 0, 4), (5, 0, 1), (5, 1, 2)]


def test_far_hits_stay_longer_than_near_ones_and_sinks() -> None:
    every = looks((50, 0, 49, 0.9), (50, 0, 0, 0.8), (50, 0, 10, 0.3), (50, 0, 12, 0.0001))
    # Near and sink count a quarter: 0.225, 0.2, 0.3; what rounds to nothing is left out always.
    kept, least = every.strongest(1, window=16, sinks=[0])
    assert (kept.source.tolist(), least) == ([10], pytest.approx(0.225))
    kept, least = every.strongest(0, window=16, sinks=[0])
    assert (kept.source.tolist(), least) == ([], pytest.approx(0.3))
    # Of equals that do not all fit none is kept.
    kept, _ = looks((50, 0, 10, 0.3), (50, 1, 10, 0.3)).strongest(1, window=16, sinks=[0])
    assert len(kept) == 0
    kept, least = every.strongest(3, window=16, sinks=[0])
    assert (kept.source.tolist(), least) == ([49, 0, 10], 0.0)


def test_a_pack_keeps_what_is_missing_missing() -> None:
    pack = Pack()
    pack.add_numbers("x", np.array([1.0, np.nan, 3.0, np.inf]), bits=8)
    entry = pack.manifest["x"]
    assert (entry["low"], entry["step"]) == (1.0, 2 / 254)
    assert pack.array("x").tolist() == [0, 255, 254, 255]
    assert pack.numbers("x") == pytest.approx([1.0, np.nan, 3.0, np.nan], nan_ok=True)
    pack.add_numbers("none", np.full(3, np.nan))
    with pytest.raises(ValueError, match="cannot be added"):
        pack.add("x", np.zeros(1, np.uint8))


def test_revisits_are_shown_before_all_others() -> None:
    shown = shown_positions(100, 10, (np.array([3, 50]), np.array([60, 61, 62, 63])), 4, seed=0)
    assert {3, 50} <= set(shown.tolist())
    assert len(shown) == 4
    assert shown_positions(20, 10, (np.array([3]),), 99, 0).tolist() == [3, *range(10, 20)]


def test_pca_keeps_the_plane_that_queries_lie_in() -> None:
    angle = np.linspace(0.1, 1.2, 40)
    queries = np.stack([np.cos(angle), np.sin(angle), np.zeros(40)], axis=1)
    plane = lay_out(queries, np.zeros(40, bool), queries[:1] * 5, umap=False, fit=100, seed=0)
    flat = np.linalg.norm(plane.points[:, None] - plane.points[None], axis=-1)
    assert np.allclose(flat, np.linalg.norm(queries[:, None] - queries[None], axis=-1), atol=1e-5)
    # A centroid is scaled to length one, as queries are.
    assert np.allclose(plane.centroids[0], plane.points[0], atol=1e-5)
    one = lay_out(queries[:1], np.zeros(1, bool), np.zeros((0, 3)), umap=True, fit=100, seed=0)
    assert one.method == "PCA"


@pytest.mark.slow
def test_umap_places_all_and_is_the_same_each_time() -> None:
    random = np.random.default_rng(0)
    queries = np.concatenate([random.normal(center, 0.1, (40, 6)) for center in (np.eye(6)[0], np.eye(6)[3])])
    must = np.arange(80) % 5 == 0
    first, again = (lay_out(queries, must, np.eye(6)[[0]], umap=True, fit=60, seed=3) for _ in range(2))
    assert first.method == "UMAP"
    assert np.array_equal(first.points, again.points)
    centers = first.points[:40].mean(axis=0), first.points[40:].mean(axis=0)
    gap = np.linalg.norm(centers[0] - centers[1])
    assert np.linalg.norm(first.points[:40] - centers[0], axis=1).mean() < gap / 2
    # Queries that are close by cosine are close on the plane.
    assert trustworthiness(queries, first.points, n_neighbors=10, metric="cosine") > 0.85
    assert np.linalg.norm(first.centroids[0] - centers[0]) < np.linalg.norm(first.centroids[0] - centers[1])


def test_curves_of_two_clear_clusters() -> None:
    queries = np.tile(np.array([[1.0, 0.05], [0.05, 1.0]]), (20, 1))  # [40, 2], in turn
    track = BeaconTrack(
        step=np.array([20, 30]), count=np.array([2, 2]), source=np.array([0, 1, 0, 3]), members=np.zeros(4, np.int64),
        centroid=np.zeros((0, 0), np.float32), nearest=np.zeros(40, np.int16), similarity=np.full(40, 0.9, np.float32),
    )  # fmt: skip
    curves = cluster_curves(track, queries)
    assert curves["step"] == [20, 30]
    assert curves["coverage"] == pytest.approx([0.9, 0.9])
    assert curves["churn"] == [None, 0.5]
    assert curves["silhouette"] == pytest.approx([1.0, 1.0], abs=1e-3)


def test_a_figure_says_how_many_beacons_it_leaves_out() -> None:
    # GIVEN a head of which each of 130 compressions replaced the only beacon
    pack = Pack()
    pack.add("beacons.0.step", np.arange(130, dtype=np.uint32))
    pack.add("beacons.0.count", np.ones(130, np.uint16))
    pack.add("beacons.0.source", np.arange(1, 131, dtype=np.uint8))
    pack.add("text", np.zeros(200, np.uint8))
    # WHEN its beacons are drawn
    drawn = str(_beacons(Collected(about_of(200, ["a"]), pack, gather([]), None, [])))
    # THEN those that find no room are counted
    assert "by position; the first 120 of 130" in drawn


def test_beacons_of_a_figure_are_named_by_their_word_and_sorted_as_numbers() -> None:
    # GIVEN a head that took beacons from the queries 107, 13 and 1 at step 120, and 13 alone at step 140
    pack = Pack()
    pack.add("beacons.0.step", np.array([120, 140], np.uint32))
    pack.add("beacons.0.count", np.array([3, 1], np.uint16))
    pack.add("beacons.0.source", np.array([107, 13, 1, 13], np.uint8) + np.uint8(1))
    pack.add("text", np.isin(np.arange(200), [1, 13]).astype(np.uint8))
    # WHEN its beacons are drawn
    drawing = xml.dom.minidom.parseString(
        str(_beacons(Collected(about_of(200, [" plan\n", "<b>"]), pack, gather([]), None, [])))
    )
    # THEN they come by position, each with its word
    texts = [text.firstChild.data for text in drawing.getElementsByTagName("text")]
    assert texts[:3] == ["<b> 1", "<b> 13", "plan 107"]
    # AND a bar is on the axis from the position after a change to the one that ends it
    left, right = axis(drawing, 200)
    drawn = [(x, x + wide) for x, wide in bars(drawing, ACCENT)]
    spans = [tuple(round((edge - left) / (right - left) * 200) for edge in edges) for edges in drawn]
    assert spans == [(121, 141), (121, 200), (121, 141)]


@pytest.mark.parametrize("length", [1, 2, 300, 360, 479, 640, 5000])
def test_revisits_and_losses_of_the_overview_are_drawn_at_their_positions(length: int) -> None:
    for position in sorted({0, length // 3, length // 2, length - 1}):
        # GIVEN a trace in which one position revisits and loses
        pack = Pack()
        pack.add("phase", np.ones(length, np.uint8))
        pack.add_numbers("lost_share", np.where(np.arange(length) == position, 1.0, 0.0))
        about = about_of(length) | {"revisits": [{"position": position, "score": 2.0}]}
        # WHEN it is drawn
        drawing = xml.dom.minidom.parseString(str(_overview(Collected(about, pack, gather([]), None, []))))
        # THEN each bar is, by the ticks of the axis, over that position and at most a 320th of the axis wide
        left, right = axis(drawing, length)
        for colour in (ACCENT, LOSS):
            ((x, wide),) = bars(drawing, colour)
            first, last = ((edge - left) / (right - left) * length for edge in (x, x + wide / 0.9))
            assert first - 0.02 * length / 320 <= position < last + 0.02 * length / 320
            assert last - first < max(1, length / 320) + 1.02


def test_columns_of_the_overview_are_of_equally_many_tokens() -> None:
    # GIVEN a trace of which every position revisits as strongly, of a length that 320 does not divide
    pack = Pack()
    pack.add("phase", np.ones(360, np.uint8))
    pack.add_numbers("lost_share", np.zeros(360))
    about = about_of(360) | {"revisits": [{"position": position, "score": 2.0} for position in range(360)]}
    # WHEN it is drawn THEN all columns are as high and as wide
    drawing = xml.dom.minidom.parseString(str(_overview(Collected(about, pack, gather([]), None, []))))
    drawn = [rect for rect in drawing.getElementsByTagName("rect") if rect.getAttribute("fill") == ACCENT]
    assert {rect.getAttribute("height") for rect in drawn} == {"52.00"}
    assert len({rect.getAttribute("width") for rect in drawn}) == 1


@pytest.mark.parametrize(
    ("low", "high", "count", "meant"),
    [
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 360, 6, [0, 100, 200, 300]),
        (0, 0.3, 3, [0, 0.1, 0.2, 0.3]),
        (4, 4, 5, [4]),
    ],
)
def test_ticks_are_round_and_reach_both_ends(low: float, high: float, count: int, meant: list[float]) -> None:
    assert ticks(low, high, count) == pytest.approx(meant)


def test_random_eviction_and_the_oracle_are_told_apart_at_one_budget() -> None:
    # GIVEN a replay at one budget
    rows = [
        {"policy": policy, "kv_bytes": 1000.0, "mass": mass, "params": {}}
        for policy, mass in (("h2o", 0.7), ("random", 0.5), ("oracle", 0.9))
    ]
    # WHEN it is drawn
    drawing = xml.dom.minidom.parseString(str(_tradeoff({"ranked_by": "mass", "settings": rows})))
    # THEN the oracle points up and random eviction down, at their place and in the legend
    tips = []
    for mark in drawing.getElementsByTagName("polygon"):
        corners = [float(corner.split(",")[1]) for corner in mark.getAttribute("points").split()]
        tips.append("up" if corners[2] < corners[0] else "down")
    assert tips == ["down", "down", "up", "up"]
    assert len(drawing.getElementsByTagName("circle")) == 2


def about_of(length: int, dictionary: list[str] | None = None) -> dict[str, Any]:
    head = {"number": 0, "name": "0.0.0", "rank": 0}
    return {"trace": {"length": length}, "heads": [head], "dictionary": dictionary or [""]}


def bars(drawing: xml.dom.minidom.Document, colour: str) -> list[tuple[float, float]]:
    """Left edge and width of the boxes of a colour."""
    return [
        (float(rect.getAttribute("x")), float(rect.getAttribute("width")))
        for rect in drawing.getElementsByTagName("rect")
        if rect.getAttribute("fill") == colour
    ]


def axis(drawing: xml.dom.minidom.Document, length: int) -> tuple[float, float]:
    """Where 0 and the length are, by the first and last tick that are written along the bottom."""
    written = [
        (float(text.firstChild.data.replace(",", "")), float(text.getAttribute("x")))
        for text in drawing.getElementsByTagName("text")
        if text.getAttribute("text-anchor") == "middle" and text.firstChild.data.replace(",", "").isdigit()
    ]
    (low, x), (high, other) = written[0], written[-1]
    per = (other - x) / (high - low)
    return x - low * per, x + (length - low) * per


@pytest.mark.parametrize("does", ["exit 1", "exit 0", "exec sleep 30"])
def test_a_browser_that_does_not_draw_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    monkeypatch.setattr("beaconscope.report.figures._PNG_SECONDS", 0.5)
    browser = tmp_path / "chromium"
    browser.write_text(f"#!/bin/sh\n{does}\n")
    browser.chmod(0o755)
    with pytest.raises(BeaconScopeError, match="chromium did not draw"):
        _to_png(str(browser), tmp_path / "heads.svg", Drawing(10, 10))
    assert not (tmp_path / "heads.png").exists()


def test_figures_are_drawings_even_of_hostile_traces(tmp_path: Path) -> None:
    trace = hostile_trace(tmp_path / "hostile.parquet")
    (tmp_path / "figures").mkdir()
    setting = {"policy": HOSTILE[1].decode(), "kv_bytes": 1000.0, "mass": 0.5, "spread": 0.1, "params": {}}
    replay = {"ranked_by": "mass", "settings": [setting, setting | {"kv_bytes": 2000.0}]}
    written = write_figures(subject(trace, replay=replay), tmp_path / "figures", PLAIN)
    assert [path.stem for path in written] == ["overview", "attention", "heads", "queries", "beacons", "tradeoff"]
    for path in written:
        drawing = xml.dom.minidom.parse(str(path))
        assert drawing.documentElement.tagName == "svg"
        assert not drawing.getElementsByTagName("script")
        assert not drawing.getElementsByTagName("img")
