"""Every column of a trace: types from the schema, meanings from the specification of the format."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from beaconscope.trace import FORMAT_VERSION, LayerLayout, TraceLayout, parquet_schema
from beaconscope.trace.schema import BEACON_TYPE
from docs._reference.text import code, table, title

_SPECIFICATION = Path(__file__).resolve().parents[1] / "trace-format.md"
_SIZES = {3: "G", 5: "D", 7: "Dv", 15: "G·D"}
"""Sizes of the layout that the schema is asked for, which tell the lists apart."""


def page() -> str:
    """The page."""
    layer = LayerLayout(layer=0, kv_heads=(0,), group_size=3, key_size=5, value_size=7)
    schema = parquet_schema(TraceLayout((layer,), "float32", hits=8))
    lines = title(
        "Columns of a trace",
        f"The schema of `beaconscope.trace.parquet_schema`, format {FORMAT_VERSION}: one row for each (layer, KV head, "
        "position), in that order. G is the number of query heads of a KV head, D the size of a query or key, Dv that "
        "of a value; the vector type is float32 or float16. [The trace format](../trace-format.md) specifies rows, "
        "phases, encoding and metadata; what `analyze` and `replay` write is under [measures](measures.md).",
    )
    lines += table(["column", "Arrow type", "may be null", "meaning"], _rows(schema, specified("Columns")))
    lines += ["## An entry of `beacons`", ""]
    lines += table(["field", "Arrow type", "may be null", "meaning"], _rows(BEACON_TYPE, specified("Beacons")))
    return "\n".join(lines)


def specified(section: str) -> dict[str, list[str]]:
    """The rows of the table in a section of the specification, by the names in their first cells."""
    text = _SPECIFICATION.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [[each.strip() for each in line.strip("|").split(" | ")] for line in text.splitlines() if line[:3] == "| `"]
    return {row[0].strip("`"): row for row in rows}


def _rows(fields: pa.Schema | pa.StructType, row_of: dict[str, list[str]]) -> list[list[str]]:
    return [
        [code(field.name), _in_words(field.type), "yes" if field.nullable else "no", row_of[field.name][-1]]
        for field in fields
    ]


def _in_words(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return f"dictionary of {kind.value_type}"
    if pa.types.is_struct(kind):
        return "struct"
    if pa.types.is_fixed_size_list(kind):
        item = _in_words(kind.value_type) if _SIZES[kind.list_size] == "G" else "vector type"
        return f"list [{_SIZES[kind.list_size]}] of {item}{_gaps(kind)}"
    if pa.types.is_list(kind):
        return f"list of {_in_words(kind.value_type)}{_gaps(kind)}"
    return {"float": "float32"}.get(str(kind), str(kind))


def _gaps(kind: pa.DataType) -> str:
    return ", which may be null" if kind.value_field.nullable else ""
