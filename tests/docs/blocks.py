"""The examples in the documentation: fenced blocks, and what is put in place of what cannot be run as it stands.

1. A block with ``title="name"`` is a file of that name. Other blocks are run by their language: ``python``, ``sql``,
   ``toml`` as a grid, ``console`` (lines after ``$`` are commands, the rest is what they print) and shell. A block
   without a language is shell where a line of it is a command of ours, else text.
2. A block after ``<!-- not run: why -->`` is left out.
3. The table ``INSTEAD`` puts small things in place of large ones: the bundled model for a model of the hub, a layer
   that the small trace has for one that it lacks. A replacement that finds nothing is an error, so that the table stays
   true.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MODEL = "tiny-reasoner"
HUB_MODEL = "Qwen/Qwen3-4B"

INSTEAD: Mapping[str, tuple[tuple[str, str], ...]] = {
    # A generation as long as the question deserves takes the small model, which does not understand it, too long.
    "README.md": (
        ("beaconscope.RecordOptions()", "beaconscope.RecordOptions(max_new_tokens=24)"),
        # The commands before it have written that file.
        ('output="trace.parquet"', 'output="again.parquet"'),
        ("=8000", "=24"),
    ),
    "docs/analysis.md": (("--model M ", f"--model {MODEL} "), ("(min_z=4)", "(min_z=4, cluster_heads=0)")),
    "docs/replay.md": (("256,512,1024 ", "72,96 "), ("--budget 256,512 --live", "--budget 64,96 --live")),
    "docs/report.md": (("first.parquet second.parquet", "a.parquet b.parquet"),),
    "docs/scale.md": (("traces/*.parquet --policy beacon,snapkv --budget 512,1024", "?.parquet --budget 64"),),
    "docs/trace-format.md": (("trace.head(12,", "trace.head(1,"), ("(12, 0", "(1, 0"), ("0, 500)", "0, 200)")),
    "docs/howto/record.md": (("max_new_tokens=4000", "max_new_tokens=24"), ('"8,16,24"', '"0,1"')),
    "docs/howto/beacon-cache.md": (
        (f'from_pretrained("{HUB_MODEL}"', f'from_pretrained("{ROOT / "beaconscope/reasoner/model"}"'),
        ("=8000", "=24"),
        ("=200", "=24"),
    ),
    "docs/howto/many-prompts.md": (("analyze(trace)", "analyze(trace, beaconscope.AnalyzeOptions(cluster_heads=0))"),),
    "docs/open-questions.md": (
        ("SmolLM2-135M-Instruct.Q4_1.gguf", MODEL),
        ("--prompt docs/examples/", f"--prompt {ROOT}/docs/examples/"),
        ("--completion docs/examples/", f"--completion {ROOT}/docs/examples/"),
        ("--prompts problems.jsonl", "--prompts prompts.jsonl"),
        ("-n 900", "-n 40"),
        # It is driven step by step.
        ("snapkv,h2o ", "snapkv "),
        ("traces/500-0.parquet traces/500-1.parquet traces/500-2.parquet traces/500-3.parquet", "a.parquet b.parquet"),
    ),
    "docs/howto/policy.md": (("max_new_tokens=200", "max_new_tokens=80"),),
}
"""By page: what stands there, and what is run in its place."""

NOT_HERE = {
    "beaconscope figures": "lays queries out by UMAP, whose first use takes long; tests/report does it",
    "make": "the tests run inside of it",
    "dask": "needs a cluster",
    "ray": "needs a cluster",
    "python": "trains or measures for minutes",
    "pip": "installs",
}
"""What is not run, and why."""


QUICK: Mapping[str, tuple[str, ...]] = {
    "record": ("--max-new-tokens", "40", "--force"),
    "analyze": ("--cluster-heads", "0", "--shifts", "20", "--force"),
    "replay": ("--layers", "1", "--live-settings", "1", "--force"),
    "report": ("--umap-heads", "0", "--force"),
}
"""What makes commands quick where the page does not show what they print; what the page itself says comes after it."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    title: str | None
    text: str
    why_not: str | None
    """Why it is not run, where a comment says so."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->\s*\Z")


def pages() -> list[Path]:
    """Every page with examples that are written by hand."""
    written_by_hand = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reference")
    return [ROOT / "README.md", *written_by_hand]


def read_blocks(path: Path) -> list[Block]:
    """The blocks of a page, in order."""
    page = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(page):
        before = page[: match.start()]
        comment = _NOT_RUN.search(before)
        found.append(
            Block(
                page=path.relative_to(ROOT).as_posix(),
                line=before.count("\n") + 1,
                language=match["language"],
                title=match["title"],
                text=textwrap.dedent(match["text"]),
                why_not=None if comment is None else comment[1],
            )
        )
    return found


_RUN = ("python", "sql", "toml", "console", "sh")
_OURS = re.compile(r"^(\$ )?beaconscope ", re.MULTILINE)


def is_example(block: Block) -> bool:
    """Whether a block is to be run, or is a file that others need.

    Raises
    ------
    ValueError
        For a language that nothing runs.
    """
    if block.why_not is not None:
        return False
    if block.title is not None:
        return True
    if block.language in ("", "text", "json"):
        return _OURS.search(block.text) is not None
    if block.language not in _RUN:
        raise ValueError(f"{block}: nothing runs {block.language}; mark the block as not run")
    return True


def runnable(block: Block) -> str:
    """The text of a block with small things in place of large ones."""
    text = block.text
    for large, small in (*INSTEAD.get(block.page, ()), (HUB_MODEL, MODEL)):
        text = text.replace(large, small)
    return text


def unused(path: Path) -> list[str]:
    """What the table replaces on a page where it does not stand."""
    text = path.read_text(encoding="utf-8")
    return [large for large, _ in INSTEAD.get(path.relative_to(ROOT).as_posix(), ()) if large not in text]


def commands(text: str) -> list[tuple[str, str]]:
    """The commands of a shell block with what each prints, which is nothing unless they stand after ``$``."""
    lines = text.replace("\\\n", " ").splitlines()
    if not any(line.startswith("$ ") for line in lines):
        return [(line, "") for line in lines if line.strip()]
    found: list[tuple[str, str]] = []
    for line in lines:
        if line.startswith("$ "):
            found.append((line[2:], ""))
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return found


_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def alike(told: str, printed: str) -> bool:
    """Whether a command prints what the page tells.

    White space does not count, ``...`` stands for anything, and numbers may differ by 5 % or by 0.05: the last digits
    depend on the machine.
    """
    pattern, numbers = "", []
    for piece in re.split(r"(\.\.\.|\d[\d,]*(?:\.\d+)?)", told):
        if piece == "...":
            pattern += ".*?"
        elif _NUMBER.fullmatch(piece):
            numbers.append(_value(piece))
            pattern += r"(\d[\d,]*(?:\.\d+)?)"
        else:
            pattern += r"\s*".join(re.escape(word) for word in re.split(r"\s+", piece))
    found = re.fullmatch(rf"\s*{pattern}\s*", printed, re.DOTALL)
    return found is not None and all(
        abs(one - _value(other)) <= max(0.05, 0.05 * abs(one))
        for one, other in zip(numbers, found.groups(), strict=True)
    )


def _value(number: str) -> float:
    return float(number.replace(",", "").rstrip("."))
