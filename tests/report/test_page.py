"""The page: what is in it is what is in the trace, and nothing in it acts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from beaconscope.errors import BeaconScopeError, UsageError
from beaconscope.report import ReportOptions, build_report, load_findings
from beaconscope.report.page import bundle
from beaconscope.trace import LayerLayout, Trace, TraceLayout
from tests.report.made import HOSTILE, PLAIN, Page, hostile_trace, made_trace, page_of, subject
from tests.trace.made import make


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return made_trace(tmp_path_factory.mktemp("report") / "made.parquet")


@pytest.fixture(scope="module")
def page(trace: Trace) -> Page:
    return Page(page_of(trace))


def test_tokens_and_measures_are_those_of_the_trace(trace: Trace, page: Page) -> None:
    tokens = trace.tokens
    for name in ("logprob", "entropy"):
        found, meant = page.numbers(name), tokens[name].to_numpy(float)
        assert np.array_equal(np.isnan(found), np.isnan(meant))
        step = page.plain["manifest"][name]["step"]
        assert np.nanmax(np.abs(found - meant)) <= step / 2 + 1e-6
    names = ("prompt", "think", "answer")
    assert [names[code] for code in page.array("phase")] == list(tokens["phase"].astype(str))


def test_hits_are_those_of_the_trace(trace: Trace, page: Page) -> None:
    steps = np.repeat(np.arange(trace.length), page.array("recorded.count"))
    sources = steps - page.array("recorded.back")
    found = zip(
        steps.tolist(),
        page.array("recorded.head").tolist(),
        sources.tolist(),
        page.array("recorded.mass").tolist(),
        strict=True,
    )
    meant, first = [], 0
    for layer, head in trace.heads:
        recorded = trace.head(layer, head)
        for step, group, rank in np.argwhere((recorded.hit_position >= 0) & (recorded.hit_mass >= 0.5 / 255)):
            mass = round(float(recorded.hit_mass[step, group, rank]) * 255)
            meant.append((int(step), int(first + group), int(recorded.hit_position[step, group, rank]), mass))
        first += recorded.query.shape[1]
    assert sorted(found) == sorted(meant)
    assert page.plain["left_out"] == []


def test_evictions_are_those_of_the_trace(trace: Trace, page: Page) -> None:
    for layer, head in trace.heads:
        at = page.array(f"evicted.{layer}.{head}").astype(int) - 1
        for step in (35, 60, trace.length - 1):
            kept = [p for p in range(step + 1) if at[p] < 0 or at[p] > step]
            assert kept == trace.kept(layer, head, step).tolist()


def test_beacons_are_those_of_the_trace(trace: Trace, page: Page) -> None:
    number = 0
    for layer, head in trace.heads:
        changes = trace.beacons(layer, head)
        for group in range(2):
            mine = changes[changes["query_head"] == group]
            assert (page.array(f"beacons.{number}.source").astype(int) - 1).tolist() == mine["source"].tolist()
            assert page.array(f"beacons.{number}.members").tolist() == mine["members"].tolist()
            nearest = page.array(f"beacons.{number}.nearest").astype(int)
            meant = trace.head(layer, head).beacon[:, group]
            assert np.where(nearest == 0xFFFF, -1, nearest).tolist() == meant.tolist()
            number += 1


def test_full_attention_is_the_softmax_over_everything(trace: Trace, page: Page) -> None:
    head = trace.head(3, 1)
    step, number = 70, 4  # the first query head of the last KV head
    logits = head.key[: step + 1] @ head.query[step, 0] * 8**-0.5
    weight = np.exp(logits - logits.max())
    weight /= weight.sum()
    steps = np.repeat(np.arange(trace.length), page.array("full.count"))
    mine = (steps == step) & (page.array("full.head") == number)
    sources = step - page.array("full.back")[mine].astype(int)
    assert sources.tolist() == np.argsort(-weight, kind="stable")[: len(sources)].tolist()
    assert np.abs(page.array("full.mass")[mine] / 255 - weight[sources]).max() <= 0.5 / 255 + 1e-5


def test_only_what_is_named_by_its_hash_may_run(page: Page) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page.html)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]
    assert "connect-src" not in policy[1]
    scripts = re.findall(r"<script>(.*?)</script>", page.html, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy[1]
    assert not re.search(r'\b(src|href)\s*=\s*"(?!#)', page.html)


def test_no_text_of_a_hostile_trace_is_markup(tmp_path: Path) -> None:
    trace = hostile_trace(tmp_path / "hostile.parquet")
    html = page_of(trace, replace(PLAIN, title=HOSTILE[0].decode()))
    assert html.count("<script") == 5
    assert "window.hacked" not in html.replace("&lt;script&gt;window.hacked", "")
    page = Page(html)
    assert page.texts[0] == HOSTILE[0].decode()
    assert page.texts[7:9] == ["😀", ""]
    assert page.texts[9].endswith("(10,000 characters)")


def test_a_redacted_page_holds_no_text(tmp_path: Path) -> None:
    made = make(length=60)
    made = replace(made, token_bytes=[f" secret{number}".encode() for number in range(60)])
    trace = made_trace(tmp_path / "confidential.parquet", made, prompt="secret plan", model={"id": "public"})
    page = Page(page_of(trace, replace(PLAIN, redact=True)))
    everything = page.html + json.dumps(page.plain) + bytes(page._buffer).decode("latin-1")
    assert "secret" not in everything
    assert "confidential" not in everything
    assert set(page.texts) == {" ▒▒▒"}


@pytest.mark.parametrize("length", [1, 2, 20])
def test_a_tiny_trace_makes_a_page(tmp_path: Path, length: int) -> None:
    layout = TraceLayout((LayerLayout(0, (0,), 1, 4, None),), "float32", 2)
    made = make(layout, length, prompt_length=1)
    made.layers[0].changes.clear()
    made.layers[0].evictions.clear()
    trace = made_trace(tmp_path / "tiny.parquet", made, prompt_length=1)
    page = Page(page_of(trace))
    assert page.plain["trace"]["length"] == length
    assert page.plain["revisits"] == []
    assert any("values" in line for line in page.plain["left_out"])


def test_the_weakest_attention_gives_way(trace: Trace) -> None:
    one = subject(trace)
    # Bytes are counted, not letters, of which a page has some that take several.
    whole = len(build_report([one], PLAIN).encode())
    for most in (whole - 1, whole - 2000):
        smaller = build_report([one], replace(PLAIN, max_bytes=most))
        assert len(smaller.encode()) <= most
        assert any("hits" in line for line in Page(smaller).plain["left_out"])
    with pytest.raises(BeaconScopeError, match="--max-size"):
        build_report([one], replace(PLAIN, max_bytes=1_000_000))
    with pytest.raises(UsageError):
        ReportOptions(max_bytes=10)


def test_two_traces_share_a_page(trace: Trace, tmp_path: Path) -> None:
    other = made_trace(tmp_path / "other.parquet", make(length=60, seed=5))
    html = build_report([subject(trace), subject(other)], PLAIN)
    assert Page(html, 0).plain["name"] == "made.parquet"
    assert Page(html, 1).plain["trace"]["length"] == 60


def test_the_same_trace_gives_the_same_data(trace: Trace, page: Page) -> None:
    again = Page(page_of(trace))
    assert again.plain == page.plain
    assert again._buffer == page._buffer


def test_an_analysis_of_another_trace_is_refused(trace: Trace, tmp_path: Path) -> None:
    other = made_trace(tmp_path / "other.parquet", make(length=60))
    from beaconscope.analyze import analyze
    from tests.report.made import QUICK

    analyze(other, QUICK).save(tmp_path / "analysis.parquet")
    with pytest.raises(BeaconScopeError, match="60 tokens"):
        load_findings(tmp_path / "analysis.parquet", trace)
    with pytest.raises(BeaconScopeError, match="no analysis"):
        load_findings(trace.path, trace)


def test_the_program_is_one_script_without_imports() -> None:
    script = bundle()
    assert "import {" not in script
    assert "export " not in re.sub(r"//.*|/\*.*?\*/", "", script, flags=re.DOTALL)
    assert "innerHTML" not in script
    assert "eval(" not in script
