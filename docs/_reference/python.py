"""The public Python interface: what ``beaconscope.__all__`` lists, from signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing

import beaconscope
from docs._reference.text import code, default_of, fields_of, kind_of, plain, table, title


def page() -> str:
    """The page."""
    lines = title(
        "Python",
        "What `import beaconscope` offers. Names are loaded when they are first used, so that the import itself costs "
        "next to nothing. The subpackages (`beaconscope.replay`, `beaconscope.trace`, `beaconscope.kv.policies`, ...) "
        "hold more; their docstrings say what. Errors that a user can mend are `BeaconScopeError`, options that cannot "
        "hold together `UsageError`.",
    )
    for name in sorted(beaconscope.__all__, key=str.casefold):
        lines += _described(name, getattr(beaconscope, name))
    return "\n".join(lines)


def _described(name: str, value: object) -> list[str]:
    lines = [f"## {name}", "", "```text", f"{name}{_signature(value)}", "```", ""]
    lines += _docstring(inspect.getdoc(value) or "")
    if not isinstance(value, type):
        return lines
    if dataclasses.is_dataclass(value):
        lines += _fields(value)
    rows = [
        [code(f"{each}{_signature(member)}"), _first_paragraph(member)]
        for each, member in _members(value)
        if _first_paragraph(member)
    ]
    return [*lines, *(table(["member", "what it gives"], rows) if rows else [])]


def _signature(value: object) -> str:
    """The parameters with their defaults and without their types; nothing where there are none to give."""
    if isinstance(value, property) or (isinstance(value, type) and issubclass(value, Exception)):
        return ""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    bare = [each for each in bare if each.name != "self"]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return text.replace("<factory>", "...")


def _members(cls: type) -> list[tuple[str, object]]:
    """Public methods and properties of a class and of its bases here, in order."""
    found: dict[str, object] = {}
    for each in reversed(cls.__mro__):
        if each.__module__.startswith("beaconscope"):
            found |= {
                name: member.__func__ if isinstance(member, classmethod) else member
                for name, member in vars(each).items()
                if not name.startswith("_")
                and (inspect.isfunction(member) or isinstance(member, property | classmethod))
            }
    return list(found.items())


def _fields(cls: type) -> list[str]:
    hints, docs = typing.get_type_hints(cls), fields_of(cls)
    fields = [field for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    documented = [field for field in fields if field.name in docs]
    if not documented:
        return []
    rows = [[code(each.name), kind_of(hints[each.name]), default_of(each), docs.get(each.name, "")] for each in fields]
    return table(["field", "type", "default", "meaning"], rows)


def _first_paragraph(member: object) -> str:
    """What a member's docstring begins with; nothing where it only names what it overrides."""
    doc = inspect.getdoc(member.fget if isinstance(member, property) else member) or ""
    return "" if doc.startswith("See :") else plain(doc).split("\n\n")[0]


def _docstring(doc: str) -> list[str]:
    """A docstring of numpy's style as Markdown: its sections become lists."""
    parts = re.split(r"^(\w+)\n-+$\n", plain(doc), flags=re.MULTILINE)
    lines = [parts[0].strip(), ""]
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        lines += [f"**{name}**", "", *_terms(body), ""]
    return lines


def _terms(body: str) -> list[str]:
    """Terms and their indented explanations as list items; what is no such list stays as it is."""
    items: list[list[str]] = []
    for line in body.strip("\n").splitlines():
        if line[:1].strip():
            items.append([line.strip(), ""])
        elif line.strip() and items:
            items[-1][1] += f" {line.strip()}"
    if not any(text for _, text in items):
        return [body.strip()]
    return [f"- `{term}`:{text}" if text else f"- `{term}`" for term, text in items]
