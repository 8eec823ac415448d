"""Every example in README and docs runs, with a small model in place of large ones, and prints what the page says.

Where a command prints otherwise and is right, ``REFRESH_DOCS=1 pytest tests/docs`` writes what it prints
into the page. What has to stay out of it, such as seconds, is then put as ``...`` by hand.
"""

from __future__ import annotations

import glob
import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import (
    MODEL,
    NOT_HERE,
    QUICK,
    ROOT,
    Block,
    alike,
    commands,
    is_example,
    pages,
    read_blocks,
    runnable,
    unused,
)
from tests.docs.conftest import run


@pytest.fixture
def here(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a page, with a copy of what is given."""
    shutil.copytree(given, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    # Modules that a page brought are no modules of the next page.
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


class Page:
    """Runs the blocks of a page, one after the other; names in Python hold for the whole page."""

    def __init__(self, path: Path, folder: Path, names: dict[str, Any]) -> None:
        self._path = path
        self._folder = folder
        self._names = names

    def run(self, block: Block) -> None:
        text = runnable(block)
        if block.title is not None:
            (self._folder / block.title).write_text(text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(text, str(block), "exec"), self._names)
        elif block.language == "sql":
            import duckdb

            duckdb.sql(text).fetchall()
        elif block.language == "toml":
            (self._folder / "grid.toml").write_text(text, encoding="utf-8")
        else:
            for command, told in commands(text):
                self._run_command(command, told, block)

    def _run_command(self, command: str, told: str, block: Block) -> None:
        words = [word for each in shlex.split(command, comments=True) for word in sorted(glob.glob(each)) or [each]]
        if not words or words[0] in NOT_HERE or " ".join(words[:2]) in NOT_HERE or "--address" in words:
            return
        assert words[0] == "beaconscope", f"{block}: nothing runs {words[0]}; mark the block as not run"
        quick = () if told else QUICK.get(words[1], ())
        if words[1] == "report" and "--analysis" not in words:
            # It would analyze the traces itself, and take its time.
            for trace in itertools.takewhile(lambda word: word.endswith(".parquet"), words[2:]):
                run("analyze", trace, *QUICK["analyze"], "-q", "-o", f"{trace}.analysis")
                quick += ("--analysis", f"{trace}.analysis")
        # Many processes are the tests' of engines.
        words = [word for before, word in zip(["", *words], words, strict=False) if "--jobs" not in (before, word)]
        printed = run(words[1], *quick, *words[2:])
        if told and not alike(told, printed):
            assert "REFRESH_DOCS" in os.environ, f"{block} prints otherwise now:\n\n$ {command}\n{printed}"
            page = self._path.read_text(encoding="utf-8")
            self._path.write_text(page.replace(told, printed.rstrip("\n") + "\n"), encoding="utf-8")


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_examples_of_a_page_run(path: Path, here: Path) -> None:
    examples = [block for block in read_blocks(path) if is_example(block)]
    names: dict[str, Any] = {"__name__": "example"}
    if any(block.language == "python" for block in examples):
        names |= what_readers_have()
    page = Page(path, here, names)
    # Files first: what uses them may stand before them.
    for block in sorted(examples, key=lambda block: block.title is None and block.language != "toml"):
        page.run(block)


def what_readers_have() -> dict[str, Any]:
    """What an example in Python may take as given: a model with its tokenizer, inputs, and a trace."""
    import beaconscope

    loaded = beaconscope.load_model(beaconscope.LoadOptions(MODEL))
    inputs = loaded.tokenizer("given f = 7 .", return_tensors="pt")
    return {
        "model": loaded.model,
        "tokenizer": loaded.tokenizer,
        "inputs": {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]},
        "trace": beaconscope.load_trace("trace.parquet"),
    }


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_the_table_replaces_is_there(path: Path) -> None:
    assert unused(path) == []


def test_the_policy_is_as_short_as_promised() -> None:
    (policy,) = (block for block in read_blocks(ROOT / "docs/howto/policy.md") if block.title == "value_norm.py")
    assert len(policy.text.splitlines()) <= 30


@pytest.mark.parametrize(
    ("told", "printed", "same"),
    [
        ("kept 98.1 % of it\n", "kept 98.2 %\nof it\n", True),
        ("took ... s, 1,024 tokens", "took 3 s, 1,030 tokens", True),
        ("1,024 tokens", "2,048 tokens", False),
        ("all is kept", "nothing is kept", False),
    ],
)
def test_what_is_printed_is_held_against_the_page(told: str, printed: str, same: bool) -> None:
    assert alike(told, printed) is same
