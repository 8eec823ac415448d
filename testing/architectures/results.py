"""What a sweep found, and the file that keeps it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

RIGHT = "right"
NOTED = "right, with a note"
REFUSED = "refused"
WRONG = "WRONG"
TRACEBACK = "TRACEBACK"
UNBUILT = "not built"

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "architectures.json"


@dataclass(frozen=True)
class Result:
    """What one variant of an architecture gave."""

    architecture: str
    variant: str
    status: str
    details: list[str] = field(default_factory=list)
    """What is wrong, why it is refused, or what to know."""


def save(path: Path, version: str, results: Sequence[Result]) -> None:
    """Write results, with the version of transformers that they are of."""
    rows = [dataclasses.asdict(result) for result in results]
    path.write_text(json.dumps({"transformers": version, "results": rows}, indent=1) + "\n", encoding="utf-8")


def load(path: Path = FILE) -> tuple[str, list[Result]]:
    """Read the version of transformers and the results."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["transformers"], [Result(**row) for row in found["results"]]
