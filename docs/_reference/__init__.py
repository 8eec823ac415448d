"""The reference pages, written from the code: ``python -m docs._reference`` writes them to ``docs/reference``.

They are kept in the repository, so that they can be read where the site is not built; a test fails when one of them no
longer says what the code says. ``measures.md`` beside them is written by hand, because formulas are nowhere in the code
but as code; the same test holds its names against what the commands give.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "reference"


def pages() -> dict[str, str]:
    """The text of every page by the name of its file."""
    from docs._reference import columns, commands, policies, python

    return {
        "commands.md": commands.page(),
        "policies.md": policies.page(),
        "columns.md": columns.page(),
        "python.md": python.page(),
    }
