"""What the examples speak of, made once with the bundled model."""

from __future__ import annotations

import random
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.docs.blocks import MODEL, QUICK, ROOT


def run(*arguments: str) -> str:
    """Run a command in this process and give what it prints."""
    from transformers.utils import logging

    from beaconscope.cli import app

    # In a process of its own a command sees to this before it imports the library.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, f"beaconscope {shlex.join(arguments)}\n{result.output}{result.exception or ''}"
    return result.output


@pytest.fixture(scope="session")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a question, prompts, traces, an analysis, a replay, and the traces of the repository."""
    from beaconscope.reasoner import SIZES, make_problem

    folder = tmp_path_factory.mktemp("given")
    problem = make_problem(SIZES["250"], random.Random(0)).text
    (folder / "beaconscope-demo").mkdir()
    for prompt in ("question.txt", "beaconscope-demo/problem.txt"):
        (folder / prompt).write_text(problem + "\n", encoding="utf-8")
    (folder / "prompts.jsonl").write_text('{"id": "a", "prompt": "given"}\n{"id": "b", "prompt": "plan"}\n', "utf-8")
    trace, analysis, replay = (str(folder / f"{name}.parquet") for name in ("trace", "analysis", "replay"))
    small = ("--budget", "96", "--interval", "16", "--layers", "all", "-n", "200", "-q")
    run("record", "--model", MODEL, "--prompt", str(folder / "question.txt"), *small, "-o", trace)
    run("analyze", trace, *QUICK["analyze"], "-o", analysis, "-q")
    run("replay", trace, "--analysis", analysis, "--budget", "96", "--no-controls", "-o", replay, "-q")
    for copy in ("a.parquet", "b.parquet"):
        shutil.copy(trace, folder / copy)
    shutil.copytree(ROOT / "traces", folder / "traces")
    return folder
