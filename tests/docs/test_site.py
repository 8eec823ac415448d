"""The site builds, and a browser that opens it asks the network for nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    # A link that a reader follows may lead anywhere; what a page loads by itself may not.
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert {page.name: loads.findall(page.read_text(encoding="utf-8")) for page in pages} == {
        page.name: [] for page in pages
    }


def test_the_generator_is_no_part_of_it(site: Path) -> None:
    assert not list(site.rglob("*.py"))
