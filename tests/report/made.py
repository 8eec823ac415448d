"""Reports of made-up traces, and how to read back what a page holds."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from beaconscope import AnalyzeOptions, load_trace
from beaconscope.analyze import analyze
from beaconscope.report import ReportOptions, Subject, build_report, findings_of
from beaconscope.trace import LayerLayout, Trace, TraceLayout
from tests.trace.made import Made, make

LAYOUT = TraceLayout(
    layers=(LayerLayout(0, (0, 1), 2, 8, 8), LayerLayout(3, (1,), 2, 8, 8)), vector_type="float32", hits=3
)
QUICK = AnalyzeOptions(cluster_heads=0, shifts=20)
# UMAP compiles for half a minute; one slow test has it.
PLAIN = ReportOptions(space_heads=0)

HOSTILE = [
    b"</script><script>window.hacked = 1</script>",
    b"<img src=x onerror='window.hacked = 2'>",
    b'"><svg onload="window.hacked = 3">',
    b"' onmouseover='window.hacked = 4' x='",
    b"\x00\x01\x1b[31m\x7f",
    "\u202egnol\u202c \u2066x\u2069 \u200f".encode(),
    b"\xed\xa0\x80",  # half of a surrogate pair
    b"\xf0\x9f",  # half of an emoji ...
    b"\x98\x80",  # ... and the other half
    b"x" * 10_000,
    b"]]><!-- --><style>*{display:none}</style>",
    b"javascript:alert(1)",
    b"{{ 7*7 }}{% raw %}",
    b"=cmd|' /C calc'!A0",
    b"\n",
    b"",
]


def made_trace(path: Path, made: Made | None = None, *, length: int = 90, **metadata: Any) -> Trace:
    """A trace of noise with beacons and evictions."""
    made = made or make(LAYOUT, length)
    return load_trace(made.record(path, metadata={"rotary": {}, **metadata}))


def hostile_trace(path: Path) -> Trace:
    """A trace of which every text would do harm if it were read as anything but text."""
    made = make(LAYOUT, len(HOSTILE) * 4)
    made = replace(made, token_bytes=HOSTILE * 4)
    evil = HOSTILE[0].decode()
    return made_trace(
        path,
        made,
        prompt=evil,
        model={"id": evil, "revision": evil, "dtype": evil, "parameters": 1},
        policy={"name": evil, "params": {evil: evil}},
        device=evil,
        versions={evil: evil},
        cut_reason=evil,
    )


def subject(trace: Trace, **known: Any) -> Subject:
    return Subject(trace, findings_of(analyze(trace, QUICK)), **known)


def page_of(trace: Trace, options: ReportOptions = PLAIN, **known: Any) -> str:
    return build_report([subject(trace, **known)], options, command="beaconscope report made.parquet")


class Page:
    """What a page holds of a trace, read from its HTML alone."""

    def __init__(self, html: str, number: int = 0) -> None:
        self.html = html
        self.plain: dict[str, Any] = json.loads(self._block(f"plain-{number}"))
        self._buffer = self._block(f"pack-{number}")

    def _block(self, name: str) -> bytes:
        found = re.search(rf'<script type="application/octet-stream" id="{name}">([A-Za-z0-9+/=]*)</script>', self.html)
        assert found, name
        return gzip.decompress(base64.b64decode(found[1]))

    def array(self, name: str) -> npt.NDArray[Any]:
        entry = self.plain["manifest"][name]
        count = math.prod(entry["shape"])
        return np.frombuffer(self._buffer, np.dtype(entry["type"]), count, entry["at"])

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        entry, raw = self.plain["manifest"][name], self.array(name)
        missing = raw == np.iinfo(raw.dtype).max
        return np.where(missing, np.nan, entry["low"] + entry["step"] * raw.astype(float))

    @property
    def texts(self) -> list[str]:
        return [self.plain["dictionary"][index] for index in self.array("text")]
