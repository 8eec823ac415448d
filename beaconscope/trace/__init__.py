"""The trace: a recording on disk, written through a journal and read head by head. Knows no model."""

from beaconscope.trace.folder import journal_path
from beaconscope.trace.info import summarize
from beaconscope.trace.journal import Journal, check_no_journal
from beaconscope.trace.metadata import TraceMetadata
from beaconscope.trace.phases import split_phases
from beaconscope.trace.reader import HeadTrace, Trace, load_trace
from beaconscope.trace.recover import recover
from beaconscope.trace.schema import (
    FORMAT_VERSION,
    BeaconChange,
    Eviction,
    HeadBlock,
    LayerLayout,
    Phase,
    TokenBlock,
    TraceLayout,
    VectorType,
    parquet_schema,
)
from beaconscope.trace.size import disk_bytes, estimate_bytes, free_bytes, raw_bytes, vector_bytes
from beaconscope.trace.vectors import to_vector_type

__all__ = [
    "FORMAT_VERSION",
    "BeaconChange",
    "Eviction",
    "HeadBlock",
    "HeadTrace",
    "Journal",
    "LayerLayout",
    "Phase",
    "TokenBlock",
    "Trace",
    "TraceLayout",
    "TraceMetadata",
    "VectorType",
    "check_no_journal",
    "disk_bytes",
    "estimate_bytes",
    "free_bytes",
    "journal_path",
    "load_trace",
    "parquet_schema",
    "raw_bytes",
    "recover",
    "split_phases",
    "summarize",
    "to_vector_type",
    "vector_bytes",
]
