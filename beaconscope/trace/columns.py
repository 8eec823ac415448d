"""Columns of Arrow tables: in one piece, and whether they are what a trace's are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def one_chunk(table: pa.Table, name: str) -> pa.Array:
    """Give a column in one piece, without a copy where it is one already."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def text_bytes(column: pa.Array) -> int:
    """Bytes of a column of texts once each row has its own."""
    sizes = np.asarray(pc.binary_length(column.dictionary).fill_null(0)).astype(np.int64)
    return int(sizes[np.asarray(column.indices.fill_null(0))].sum()) if len(sizes) else 0


def same_kind(found: pa.DataType, expected: pa.DataType) -> bool:
    """Tell whether a column can be read as expected: lists of any kind by their items, dictionaries by their values."""
    if pa.types.is_dictionary(expected):
        expected = expected.value_type
        found = found.value_type if pa.types.is_dictionary(found) else found
    if _is_list(expected) and _is_list(found):
        return same_kind(found.value_type, expected.value_type)
    if pa.types.is_struct(expected) and pa.types.is_struct(found):
        return all(
            found.get_field_index(field.name) >= 0 and same_kind(found.field(field.name).type, field.type)
            for field in expected
        )
    return bool(found == expected)


def has_gaps(column: pa.Array, field: pa.Field) -> bool:
    """Tell whether something is null, in a column or within it, that ``field`` says never is."""
    if column.null_count and not field.nullable:
        return True
    if pa.types.is_dictionary(column.type):
        return bool(column.dictionary.null_count) and not field.nullable
    if _is_list(column.type):
        return has_gaps(column.flatten(), field.type.value_field)
    if pa.types.is_struct(column.type):
        present = column.drop_null()
        return any(has_gaps(present.field(part.name), part) for part in field.type)
    return False


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind))
