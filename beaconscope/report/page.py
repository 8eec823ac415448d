"""Put the page together: one HTML file of template, style, program and data.

The program is written as small ES modules that node can test and a browser can read. Here they become one inline
script: modules in the order of their imports, without the import and export words. So every top-level name must be
unique over all modules, which is checked.

What may run is named by its SHA-256 in a content-security-policy: the page's own program, and Plotly, which is kept
compressed and unpacked when the first series is drawn. Nothing else may, neither by network nor by eval, and no byte of
a trace stands in the page but in base64 or escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from beaconscope.files import whole_file
from beaconscope.report.pack import compressed

_IMPORT = re.compile(r'^import\s*\{[^}]*\}\s*from\s*"\./([\w.-]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|let|function|class)\b)", re.MULTILINE)
_TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:const|let|function|class) +(\w+)", re.MULTILINE)


def asset(name: str) -> str:
    """A file of the front end."""
    return (files("beaconscope.report") / "assets" / name).read_text(encoding="utf-8")


def bundle(entry: str = "main.js") -> str:
    """The modules that ``entry`` needs as one script.

    Raises
    ------
    ValueError
        Where two modules have a top-level name in common, or import in another way than ``import {a} from "./b.js";``.
    """
    parts: list[str] = []
    home: dict[str, str] = {}
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        source = asset(name)
        for match in _IMPORT.finditer(source):
            visit(match[1])
        for match in _TOP_LEVEL.finditer(source):
            if other := home.get(match[1]):
                raise ValueError(f"{name} and {other} both have {match[1]} at their top level")
            home[match[1]] = name
        plain = _EXPORT.sub("", _IMPORT.sub("", source))
        if re.search(r"^(import|export)\b", plain, re.MULTILINE):
            raise ValueError(f"{name} imports or exports in a way that cannot be put into the page")
        parts.append(plain.strip())

    visit(entry)
    script = '"use strict";\n(() => {\n' + "\n\n".join(parts) + "\n})();\n"
    if "</script" in script.lower() or "<!--" in script:
        raise ValueError("the program has words in it that would end its element")
    return script


def render(title: str, traces: Sequence[tuple[dict[str, Any], str]], about: dict[str, Any]) -> str:
    """The page.

    Parameters
    ----------
    title
        Plain text.
    traces
        What is shown of each trace: plain values, and the encoded pack.
    about
        What concerns the report as a whole.
    """
    import jinja2
    import plotly.offline

    plotly = plotly.offline.get_plotlyjs()
    script = bundle()
    # Only what comes of this package is marked as safe; titles and all else are escaped.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(asset("page.html.j2"))
    # Line ends are normalised by the browser's parser before it hashes.
    return template.render(
        title=title,
        script=_Safe(script),
        style=_Safe(asset("style.css")),
        script_hash=_hash(script),
        plotly_hash=_hash(plotly),
        plotly=compressed(plotly.encode()),
        about=_json(about),
        traces=[(_json(plain), packed) for plain, packed in traces],
    )


class _Safe(str):
    """Text of this package that stands in the page as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")


def _json(value: Any) -> str:
    """JSON, compressed, in base64: no byte of it can be taken for markup."""
    return compressed(json.dumps(value, allow_nan=False, separators=(",", ":")).encode("utf-8"))


def write_page(path: Path, html: str) -> None:
    """Write a page so that ``path`` is whole or as it was."""
    with whole_file(path) as partial:
        # Bytes, so that no line end is changed and the hashes in the page stay true.
        partial.write_bytes(html.encode("utf-8"))
