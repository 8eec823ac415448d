"""Every command in locales other than UTF-8, with names of files and texts that they cannot express."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from beaconscope import load_trace
from tests.conftest import ROOT
from tests.record.recording import save_tiny
from tests.trace.made import interrupted

TEXT = "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{CJK UNIFIED IDEOGRAPH-4E2D}"
NO_UTF8 = b"caf\xff \xc3\xa9"
C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ASCII_STREAMS = {**C, "LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"}
UTF8 = {"LC_ALL": "C.UTF-8"}
LATIN1_STREAMS = {**UTF8, "PYTHONIOENCODING": "latin-1"}

PLACES = [(C, NO_UTF8), (ASCII_STREAMS, TEXT.encode()), (LATIN1_STREAMS, NO_UTF8)]
"""Locales, and names of files in them."""

# All commands in one process, which is as a locale is: Python reads it when it starts.
SCRIPT = """
import os, sys
from beaconscope.cli import main

print(sys.getfilesystemencoding(), file=sys.stderr)
codes = []
for line in os.fsencode(sys.argv[1]).split(b"\\x1e"):
    sys.argv = ["beaconscope", *map(os.fsdecode, line.split(b"\\x1f"))]
    try:
        main()
    except SystemExit as ended:
        codes.append(ended.code or 0)
    sys.stderr.flush()
print("codes", *codes, file=sys.stderr)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are not bytes")


def run_in(locale: dict[str, str], folder: bytes, commands: Sequence[Sequence[bytes]]) -> tuple[list[int], str, str]:
    """Exit codes, stdout and stderr of commands that run after each other."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, b"\x1e".join(b"\x1f".join(command) for command in commands)],
        cwd=folder,
        env=environment | locale | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    out, err = done.stdout.decode(stream_encoding(locale)), done.stderr.decode(stream_encoding(locale))
    assert "Traceback" not in err, err
    first, *_, codes = err.splitlines()
    assert first == ("ascii" if "PYTHONUTF8" in locale else "utf-8")
    return [int(code) for code in codes.removeprefix("codes ").split()], out, err


def stream_encoding(locale: dict[str, str]) -> str:
    """That of what is written; click takes ASCII for a mistake and writes UTF-8."""
    return "latin-1" if locale is LATIN1_STREAMS else "utf-8"


@pytest.fixture
def folder(tmp_path, name) -> bytes:
    """A folder of the same name as its files."""
    path = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("locale", "name"), PLACES)
def test_every_command(locale, name, folder, tmp_path):
    """GIVEN files of any name WHEN commands read and write them THEN they do, and what they say can be read."""

    def at(ending: str) -> bytes:
        return os.path.join(folder, name + ending.encode())

    Path(os.fsdecode(at(".txt"))).write_text(f"{TEXT}?\n", encoding="utf-8")
    Path(os.fsdecode(at(".jsonl"))).write_text(
        json.dumps({"id": "a", "prompt": TEXT}, ensure_ascii=False), encoding="utf-8"
    )
    interrupted(Path(os.fsdecode(at("-cut.parquet"))))
    model = save_tiny(tmp_path)
    record = [b"record", b"--model", os.fsencode(model), b"-n", b"40", b"--budget", b"24", b"--interval", b"8"]
    record += [b"--recent", b"4", b"--system", TEXT.encode(), b"--think-open", TEXT.encode()]
    trace, analysis, replay = at(".parquet"), at("-a.parquet"), at("-r.parquet")
    known = [b"--analysis", analysis, b"--replay", replay]
    commands = [
        [*record, b"--prompt", at(".txt"), b"-o", trace],
        [*record, b"--prompts", at(".jsonl")],
        [b"info", trace, b"--verbose"],
        [b"info", trace, b"--json"],
        [b"analyze", trace, b"-o", analysis, b"--shifts", b"10", b"--cluster-heads", b"0"],
        [b"analyze", trace, trace, b"--shifts", b"10", b"--cluster-heads", b"0"],
        [b"replay", trace, b"-o", replay, b"--budget", b"24", b"--analysis", analysis, b"--per-token"],
        [b"report", trace, b"-o", at(".html"), b"--umap-heads", b"0", b"--title", TEXT.encode(), *known],
        [b"figures", trace, b"-o", at("-figures"), *known],
        [b"recover", at("-cut.parquet")],
        [b"policies"],
    ]
    codes, out, err = run_in(locale, folder, commands)
    assert codes == [0] * len(commands), err
    read = load_trace(os.fsdecode(trace))
    assert read.prompt == f"{TEXT}?"
    assert read.options["system"] == read.options["think_open"] == TEXT
    assert load_trace(os.fsdecode(os.path.join(folder, name + b"-traces", b"a.parquet"))).prompt == TEXT
    assert load_trace(os.fsdecode(at("-cut.parquet"))).length == 32
    assert (Path(os.fsdecode(at("-figures"))) / "overview.svg").read_text(encoding="utf-8")
    # What is said of a file is its name, as far as the stream can show it.
    shown, encoding = trace.decode("utf-8", "replace"), stream_encoding(locale)
    assert f"Wrote {shown}\n".encode(encoding, "replace").decode(encoding) in out
    # JSON has the name itself, and no half of a surrogate pair.
    assert json.dumps(shown) in out
    assert "\\udc" not in out


@pytest.mark.parametrize(("locale", "name"), PLACES)
def test_what_is_refused_is_one_line(locale, name, folder):
    Path(os.fsdecode(folder), "plan.txt").write_text("plan", encoding="utf-8")
    record = [b"record", b"--prompt", b"plan.txt", b"--model"]
    commands = [
        [b"info", name],
        [b"analyze", name],
        [b"replay", name],
        [b"report", name],
        [b"figures", name],
        [b"recover", name],
        [*record, b"tiny-reasoner", b"--prompt", name],
        [*record, name],
        [*record, folder],
        [*record, b"tiny-reasoner", b"--think-open", b"\xff"],
        [*record, b"tiny-reasoner", b"--template-option", b"\xff=1"],
        [*record, b"tiny-reasoner", b"--system", TEXT.encode()],
    ]
    codes, _, err = run_in(locale, folder, commands)
    assert codes == [1] * 9 + [2, 2, 1]
    lines = [line for line in err.splitlines()[1:-1] if not line.startswith("Loading")]
    assert len(lines) == len(commands)
    assert all(line.startswith("error: ") for line in lines)


@pytest.mark.parametrize(
    ("locale", "name", "remedy"),
    [(C, TEXT.encode(), "set PYTHONUTF8=1"), (UTF8, NO_UTF8, "which transformers needs; rename it")],
)
def test_a_model_where_the_libraries_cannot_find_it(locale, name, folder, remedy):
    Path(os.fsdecode(folder), "plan.txt").write_text("plan", encoding="utf-8")
    Path(os.fsdecode(folder), "config.json").write_text("{}", encoding="utf-8")
    command = [b"record", b"--prompt", b"plan.txt", b"-n", b"4", b"--model", folder]
    codes, _, err = run_in(locale, folder, [command])
    assert codes == [1]
    assert remedy in err
