"""Take the README's picture of the report: ``python -m docs._reference.picture beaconscope-demo/report.html``.

Needs Chromium and Playwright, as ``make test-browser`` installs them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parents[1] / "images" / "report.png"
TOKEN = 329
"""A revisit of the demo that recalls a letter of the plan."""


def main(page_file: Path) -> None:
    """Open the page at that token and write what a window of 1440 x 900 shows."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{page_file.resolve().as_uri()}#t={TOKEN}")
        page.wait_for_selector("html[data-ready]")
        page.wait_for_timeout(1500)  # until the charts have come to rest
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
