"""Pages in Debian's Chromium. `make test-browser` installs what is missing; without it these tests are skipped."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from beaconscope import load_trace
from beaconscope.report import build_report
from beaconscope.report.page import write_page
from beaconscope.trace import Trace
from tests.report.made import PLAIN, hostile_trace, made_trace, subject
from tests.trace.made import make

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed; run `make test-browser`")

CHROMIUM = shutil.which("chromium")
BALCONY = Path(__file__).parents[2] / "traces" / "smollm2-balcony.parquet"
SETTINGS = [
    {"setting": f"{policy}:budget={budget}", "policy": policy, "budget": budget, "interval": 8, "params": params,
     "live": policy != "oracle", "seeds": 1, "mass": mass * budget / 64, "mass_trt": mass * budget / 80,
     "kv_bytes": 1000.0 * budget, "spread": 0.02, "hit_rate": 0.5, "output_error": 0.1, "regrets": 0.1, "pareto": True}
    for policy, mass, params in (("beacon", 0.8, {"beacons": 16}), ("random", 0.5, {}), ("oracle", 0.95, {}))
    for budget in (16, 32, 64)
]  # fmt: skip
REPLAY = {"schema_version": "1.0", "ranked_by": "mass_trt", "settings": SETTINGS, "answer": {"text": "Made up."}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CHROMIUM is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="Chromium is not installed; run `make test-browser`"))


def wait_until(page: Any, condition: str) -> None:
    """Wait until a condition holds. Playwright's own way evaluates it in the page, which the page's policy forbids."""
    end = time.monotonic() + 20
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(30)


@dataclass
class Watched:
    """A page of the browser, and everything that went wrong or out of it."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, path: Path, fragment: str = "") -> Any:
        self.page.goto(path.as_uri() + fragment)
        self.page.wait_for_selector("html[data-ready]")
        return self.page

    def clean(self) -> None:
        assert self.errors == []
        assert self.requests == []


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield opened
        opened.close()


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light", accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(20_000)
    watching = Watched(page)
    page.on("console", lambda m: watching.errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: watching.errors.append(str(error)))
    local = ("file:", "data:", "blob:")
    page.on("request", lambda r: None if r.url.startswith(local) else watching.requests.append(r.url))
    yield watching
    context.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="session")
def balcony() -> Trace:
    return load_trace(BALCONY)


@pytest.fixture(scope="session")
def balcony_page(balcony: Trace, folder: Path) -> Path:
    """The shipped trace of SmolLM2 under BeaconKV."""
    page = folder / "balcony.html"
    write_page(page, build_report([subject(balcony, replay=REPLAY)], PLAIN))
    return page


@pytest.fixture(scope="session")
def hostile_page(folder: Path) -> Path:
    page = folder / "hostile.html"
    write_page(page, build_report([subject(hostile_trace(folder / "hostile.parquet"))], PLAIN))
    return page


@pytest.fixture(scope="session")
def tiny_page(folder: Path) -> Path:
    """One token of one head, without beacons and evictions."""
    from beaconscope.trace import LayerLayout, TraceLayout

    made = make(TraceLayout((LayerLayout(0, (0,), 1, 4, None),), "float32", 2), 1, prompt_length=1)
    made.layers[0].changes.clear()
    made.layers[0].evictions.clear()
    page = folder / "tiny.html"
    write_page(page, build_report([subject(made_trace(folder / "tiny.parquet", made, prompt_length=1))], PLAIN))
    return page


@pytest.fixture(scope="session")
def pair_page(folder: Path) -> Path:
    traces = [made_trace(folder / f"{name}.parquet", make(length=60, seed=seed)) for seed, name in enumerate("ab")]
    page = folder / "pair.html"
    write_page(page, build_report([subject(trace) for trace in traces], PLAIN))
    return page
