"""What is in a trace, in plain types."""

from __future__ import annotations

from typing import Any

from beaconscope.files import valid_unicode
from beaconscope.trace.reader import Trace
from beaconscope.trace.size import vector_bytes


def summarize(trace: Trace) -> dict[str, Any]:
    """Sum up a trace for ``beaconscope info``: JSON types only; sizes in bytes, phases in tokens."""
    metadata = trace.metadata
    phases = trace.tokens["phase"].value_counts()
    model = metadata.get("model", {})
    return {
        "path": valid_unicode(trace.path),
        "format_version": metadata["format_version"],
        "created": metadata.get("created"),
        "whole": trace.whole,
        "cut_reason": trace.cut_reason,
        "model": {key: model.get(key) for key in ("id", "revision", "dtype", "parameters")},
        "device": metadata.get("device"),
        "prompt": trace.prompt,
        "length": trace.length,
        "phases": {phase: int(phases.get(phase, 0)) for phase in ("prompt", "think", "answer")},
        "layers": [
            {
                "layer": layer.layer,
                "kv_heads": list(layer.kv_heads),
                "query_heads_per_kv_head": layer.group_size,
                "key_size": layer.key_size,
                "value_size": layer.value_size,
            }
            for layer in trace.layout.layers
        ],
        "hits": trace.layout.hits,
        "vector_type": trace.layout.vector_type,
        "attention_over": trace.attention_over,
        "policy": trace.policy,
        "options": trace.options,
        # The heads of a layer compress together; a sliding layer never does.
        "compressions": max(len(trace.evictions(layer.layer, layer.kv_heads[0])) for layer in trace.layout.layers),
        "file_bytes": trace.path.stat().st_size,
        "vector_bytes": vector_bytes(trace.layout, trace.length),
        "timings": metadata.get("timings", {}),
        "peak_memory": metadata.get("peak_memory", {}),
        "versions": metadata.get("versions", {}),
    }
