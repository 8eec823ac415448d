"""Markdown from values and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence

NOTE = "<!-- Written by `make reference` from the code. Do not edit. -->"


def title(text: str, *intro: str) -> list[str]:
    """The head of a page."""
    return [NOTE, "", f"# {text}", "", *(line for part in intro for line in (part, ""))]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table, and the empty line after it."""
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(cell(each) for each in row)} |" for row in lines), ""]


def cell(text: str) -> str:
    """A text that can stand in a table."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: object) -> str:
    """A text as code; nothing where there is none."""
    return f"`{text}`" if str(text) else ""


def plain(doc: str) -> str:
    """A docstring's text with its roles and double backticks as Markdown code, on one line for each paragraph."""
    doc = re.sub(r":\w+:`~?\.{0,2}([^`]+)`", lambda found: f"`{found[1].rpartition('.')[2]}`", doc)
    return doc.replace("``", "`")


def kind_of(hint: object) -> str:
    """An annotated type in words."""
    if isinstance(hint, types.UnionType):
        return " or ".join(dict.fromkeys(kind_of(each) for each in typing.get_args(hint)))
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(code(each) for each in typing.get_args(hint))
    words: Mapping[object, str] = {
        int: "whole number",
        float: "number",
        str: "text",
        bool: "true or false",
        type(None): "none",
    }
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def fields_of(cls: type) -> dict[str, str]:
    """What the docstrings below a class's attributes say, base classes included; the nearest class counts."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if each.__module__.startswith("beaconscope"):
            found |= _own_fields(each)
    return found


def _own_fields(cls: type) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            doc = ast.literal_eval(after.value) if isinstance(after.value, ast.Constant) else None
            if isinstance(doc, str):
                found[before.target.id] = plain(inspect.cleandoc(doc))
    return found


def default_of(field: dataclasses.Field[object]) -> str:
    """The default of a dataclass's field; nothing where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return code(f"{getattr(field.default_factory, '__name__', 'list')}()")
    return "" if field.default is dataclasses.MISSING else code(field.default)
