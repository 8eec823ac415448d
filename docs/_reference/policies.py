"""Every eviction policy with its rule, parameters and source, from its module and its dataclass."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing

from beaconscope.kv.policies import POLICIES, Policy
from docs._reference.text import code, default_of, fields_of, kind_of, plain, table, title


def page() -> str:
    """The page."""
    lines = title(
        "Policies",
        "What a KV cache can evict by: `record --cache NAME:parameter=value,...`, `replay --policy "
        "NAME:parameter=value,...`, and `beaconscope.parse_policy`. One policy object serves the live cache and the "
        "replay. Sizes are entries of a KV head; B is `budget`, I `interval`. A cache compresses when it holds B + I "
        "entries and keeps B, unless the rule says otherwise. Where the sources of a rule leave a doubt, [method and "
        "choices](../method.md) says how it is read here.",
    )
    lines += table(
        ["policy", "keeps", "works in", "source"],
        [[f"[`{name}`](#{name})", plain(kind.summary), _where(kind), kind.source] for name, kind in POLICIES.items()],
    )
    for name, kind in POLICIES.items():
        lines += _policy(name, kind)
    return "\n".join(lines)


def _where(kind: type[Policy]) -> str:
    return "cache and replay" if kind.live else "replay only"


def _policy(name: str, kind: type[Policy]) -> list[str]:
    rule = inspect.getdoc(sys.modules[kind.__module__])
    assert rule is not None
    lines = [f"## {name}", "", plain(rule), "", f"Source: {kind.source}. Works in: {_where(kind)}.", ""]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints, docs = typing.get_type_hints(kind), fields_of(kind)
    rows = [
        [code(each), kind_of(hints[each]), default_of(fields[each]), docs.get(each, "")] for each in kind.parameters()
    ]
    return [*lines, *(table(["parameter", "value", "default", "meaning"], rows) if rows else ["No parameters.", ""])]
