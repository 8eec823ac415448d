"""What a report costs: size of the page, time and memory to build it, and how fast it is in Chromium.

    python benchmarks/report.py              # 32 K tokens, 6 layers x 8 KV heads of one query head each
    python benchmarks/report.py --group 4    # four query heads each
    python benchmarks/report.py --curve      # building alone, 4 K to 32 K tokens
    python benchmarks/report.py --quick      # 2 K tokens, to keep the script alive

The trace and what an analysis would find in it are made up: the page's cost hangs on their size alone. Times in the
browser are by its performance clock, drawn without a GPU; frames are those of requestAnimationFrame while the text is
scrolled and the minimap is dragged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from beaconscope import load_trace
from beaconscope.report import Findings, ReportOptions, Subject, build_report
from beaconscope.report.page import write_page
from beaconscope.trace import (
    BeaconChange,
    Eviction,
    HeadBlock,
    Journal,
    LayerLayout,
    TokenBlock,
    TraceLayout,
)
from benchmarks.growth import exponent
from benchmarks.memory import peak_bytes

SIZE, HITS, BUDGET, INTERVAL, BEACONS, PROMPT, WINDOW = 64, 8, 1024, 128, 16, 256, 128
WORDS = [" the", " so", " we", " need", " to", " check", " step", " again", ".", "\n", " which", " gives", " then"]


def made_trace(path: Path, length: int, layers: int, kv_heads: int, group: int) -> Path:
    """Write a trace of noise in the shape of a recording with a compressing cache."""
    random = np.random.default_rng(0)
    layout = TraceLayout(
        tuple(LayerLayout(4 * layer, tuple(range(kv_heads)), group, SIZE, None) for layer in range(layers)),
        "float16",
        HITS,
    )
    words = [word.encode() for word in WORDS] + [f" w{number}".encode() for number in range(5000)]
    known = np.arange(length) >= PROMPT
    metadata: dict[str, Any] = {
        "model": {"id": "made-up", "dtype": "float16", "parameters": 1}, "tokenizer": {"id": "none"}, "prompt": "",
        "prompt_length": PROMPT, "options": {}, "policy": {"name": "beacon", "params": {"budget": BUDGET}},
        "versions": {}, "device": "cpu", "attention_over": "what the cache held",
    }  # fmt: skip
    left = {(layer, head): list(range(0)) for layer in range(layers) for head in range(kv_heads)}
    with Journal.create(path, layout, metadata) as journal:
        for first in range(0, length, INTERVAL):
            stop = min(length, first + INTERVAL)
            size, rows = stop - first, slice(first, stop)
            chosen = np.where(random.random(size) < 0.6, random.integers(0, len(WORDS), size), 0)
            chosen = np.where(random.random(size) < 0.4, random.integers(0, len(words), size), chosen)
            drawn = random.random(size).astype(np.float32)
            journal.append_tokens(
                TokenBlock(
                    first,
                    chosen.astype(np.int32),
                    [words[index] for index in chosen],
                    np.where(known[rows], -drawn, np.nan).astype(np.float32),
                    np.where(known[rows], drawn, np.nan).astype(np.float32),
                )
            )
            past = np.arange(first, stop)[:, None, None, None]
            for number, layer in enumerate(layout.layers):
                shape = (size, kv_heads, group)
                # Most attention is near, some far, as in a model.
                near = past - random.integers(0, 64, (*shape, HITS))
                far = (random.random((*shape, HITS)) * (past + 1)).astype(np.int64)
                where = np.maximum(0, np.where(random.random((*shape, HITS)) < 0.7, near, far))
                changes, evictions = [], []
                for head in range(kv_heads):
                    held = left[number, head]
                    held.extend(range(first, stop))
                    if len(held) > BUDGET and stop - first == INTERVAL:
                        gone = np.sort(random.choice(len(held) - 16, len(held) - BUDGET, replace=False))
                        evictions.append(Eviction(stop - 1, head, np.array([held[i] for i in gone], np.int32)))
                        left[number, head] = [p for i, p in enumerate(held) if i not in set(gone.tolist())]
                        query_head = np.repeat(np.arange(group, dtype=np.int16), BEACONS)
                        changes.append(
                            BeaconChange(
                                stop - 1, head, query_head, random.integers(0, stop, len(query_head)).astype(np.int32),
                                random.integers(0, 20, len(query_head)).astype(np.int32), None,
                            )
                        )  # fmt: skip
                beacon = np.where(first >= BUDGET + INTERVAL, random.integers(0, BEACONS, shape), -1).astype(np.int16)
                mass = -np.sort(-random.dirichlet(np.full(HITS + 4, 0.3), shape)[..., :HITS], axis=-1)
                journal.append(
                    HeadBlock(
                        layer=layer.layer,
                        first_position=first,
                        query=random.standard_normal((*shape, SIZE)).astype(np.float16),
                        key=random.standard_normal((size, kv_heads, SIZE)).astype(np.float16),
                        value=None,
                        beacon=beacon,
                        beacon_similarity=np.where(beacon < 0, np.nan, random.random(shape)).astype(np.float32),
                        mass_sink=random.random(shape).astype(np.float32),
                        mass_local=random.random(shape).astype(np.float32),
                        mass_distant=random.random(shape).astype(np.float32),
                        hit_position=where.astype(np.int32),
                        hit_mass=mass.astype(np.float32),
                        beacon_changes=changes,
                        evictions=evictions,
                    ),
                )
        return journal.finalize({})


def made_findings(length: int, layers: int, kv_heads: int, group: int) -> Findings:
    """What an analysis might have found: a revisit every twenty tokens."""
    random = np.random.default_rng(1)
    positions = np.sort(random.choice(np.arange(2 * WINDOW, length - 1), length // 20, replace=False)).tolist()
    names = [f"{4 * layer}.{head}.{g}" for layer in range(layers) for head in range(kv_heads) for g in range(group)]
    revisits, targets = [], []
    for position in positions:
        start = int(random.integers(0, position - WINDOW))
        revisits.append({
            "position": position, "phase": "think", "sentence": position // 16, "score": float(random.random() * 5),
            "p": 0.001, "q": 0.01, "reason": "together", "heads": names[:3], "target_start": start,
            "target_stop": start + 4, "target_share": 0.8, "target_period": "early", "distance": position - start,
        })  # fmt: skip
        targets.append({"position": position, "start": start, "stop": start + 4, "share": 0.8, "distance": 9,
                        "sentence": start // 16, "phase": "think", "period": "early"})  # fmt: skip
    heads = []
    for name in names:
        layer, head, number = map(int, name.split("."))
        heads.append({
            "layer": layer, "kv_head": head, "query_head": number, "events": 9, "kurtosis": 1.0, "retrieval": 0.1,
            "event_rate": float(random.random() / 9), "distant_share": float(random.random()), "kind": "revisiting",
            "revisits": int(random.integers(0, 99)), "revisit_share": 0.1, "sinks": [0],
        })  # fmt: skip
    flagged = np.zeros(length, bool)
    flagged[positions] = True
    tokens = pd.DataFrame({
        "position": np.arange(length), "sentence": np.arange(length) // 16, "distant_share": random.random(length),
        "distant_share_max": random.random(length), "global_heads": random.integers(0, 9, length),
        "q": random.random(length), "revisit": flagged, "lost_share": random.random(length) * 0.4,
    })  # fmt: skip
    result = {
        "options": {"fdr": 0.05}, "verdict": {"answer": "no", "text": "Made up.", "would_change": None},
        "summary": {"window": WINDOW, "sinks": [{"position": 0, "heads": 9}], "steps": length - 2 * WINDOW,
                    "revisits": len(positions), "revisit_rate": 0.05, "attention": "made up", "missing_vectors": 0,
                    "periods": {"prompt": 1, "early": 1, "later": 1, "answer": 0}},
        "revisits": sorted(revisits, key=lambda row: -row["score"]), "targets": targets, "anchors": [], "lost": [],
        "heads": heads, "clusters": [], "beacons": [], "causal": None,
        "cache": {"evicts": True, "distant_lost": 0.2, "revisit_lost": 0.3, "revisits_hit": 5},
    }  # fmt: skip
    return Findings(result, tokens)


FRAMES = """async ([from, to, kind]) => {
  const pane = document.getElementById("pane");
  const { reading, minimap } = window.beaconscope.views;
  const frames = [];
  let last = performance.now();
  const count = 90;
  for (let frame = 0; frame < count; frame++) {
    const at = from + (to - from) * frame / count;
    if (kind === "scroll") pane.scrollTop = at * pane.scrollHeight;
    else { reading.reveal(Math.floor(at * window.beaconscope.traces[0].length)); minimap.redraw(); }
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last);
    last = now;
  }
  frames.sort((a, b) => a - b);
  return { frames_per_second: 1000 * count / frames.reduce((a, b) => a + b, 0), slowest_frame_ms: frames.at(-1) };
}"""
SELECT = """async () => {
  const took = [];
  const { length } = window.beaconscope.traces[0];
  for (let number = 1; number <= 12; number++) {
    const start = performance.now();
    window.beaconscope.store.set({ token: Math.floor(length * number / 13) });
    await new Promise(requestAnimationFrame);
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    took.push(performance.now() - start);
  }
  took.sort((a, b) => a - b);
  return { median_ms: took[6], most_ms: took.at(-1) };
}"""


def in_browser(page_path: Path) -> dict[str, Any]:
    """Times of a page in Chromium at 1440 x 900."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(page_path.as_uri())
        page.wait_for_selector("#view-minimap canvas[data-painted]")
        found = {
            "first_view_ms": page.evaluate("performance.now()"),
            "of_it_the_program_ms": float(page.evaluate("document.documentElement.dataset.ready")),
        }
        page.wait_for_timeout(500)
        found["selection"] = page.evaluate(SELECT)
        found["scrolling_text"] = page.evaluate(FRAMES, [0.1, 0.4, "scroll"])
        found["dragging_minimap"] = page.evaluate(FRAMES, [0.2, 0.9, "drag"])
        page.evaluate("document.getElementById('view-attention').scrollIntoView()")
        page.wait_for_timeout(800)
        found["selection_with_attention_map"] = page.evaluate(SELECT)
        browser.close()
    return found


def built(folder: Path, length: int, layers: int, kv_heads: int, group: int) -> tuple[dict[str, Any], Path]:
    """What it takes to build a page, and the page."""
    path = folder / f"made-{length}-{group}.parquet"
    if not path.exists():
        made_trace(path, length, layers, kv_heads, group)
    subject = Subject(load_trace(path), made_findings(length, layers, kv_heads, group))
    wall, processor = time.perf_counter(), time.process_time()
    html = build_report([subject], ReportOptions())
    figures: dict[str, Any] = {
        "tokens": length,
        "query_heads": layers * kv_heads * group,
        "seconds": time.perf_counter() - wall,
        "processor_seconds": time.process_time() - processor,
        "peak_gigabytes": peak_bytes() / 1e9,
        "page_megabytes": len(html.encode()) / 1e6,
    }
    page = folder / f"made-{length}-{group}.html"
    write_page(page, html)
    return figures, page


def curve(folder: Path, group: int) -> list[dict[str, Any]]:
    """Print how building grows with the length."""
    built(folder, 1024, 6, 8, group)  # the first layout of all is compiled
    rows = []
    for length in (4096, 8192, 16384, 32768):
        rows.append(built(folder, length, 6, 8, group)[0])
        said = rows[-1]
        print(f"{length:6} tokens: {said['seconds']:6.1f} s, page {said['page_megabytes']:.2f} MB", flush=True)
    growth = {
        name: exponent([row["tokens"] for row in rows], [row[name] for row in rows])
        for name in ("seconds", "page_megabytes")
    }
    print(f"seconds grow with the length to the power of {growth['seconds']:.2f}, ", end="")
    print(f"the page of {growth['page_megabytes']:.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder where trace and page are left, and found again")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    length, layers, kv_heads = (2048, 2, 2) if args.quick else (32768, 6, 8)
    figures: Any
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        if args.curve:
            figures = curve(folder, args.group)
        else:
            figures, page = built(folder, length, layers, kv_heads, args.group)
            figures["browser"] = in_browser(page)
    text = json.dumps(figures, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
