"""Which variants of an architecture are tried: windows, chunks, shared keys, sparse attention, rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from testing.architectures.configs import text_fields

AS_IT_IS = "default"
WINDOW = 12
CHUNK = 16

_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "window_size",
    "local_attention",
    "keep_window_size",
)
_SPARSE = {"index_topk": 16, "indexer_budget": 16, "index_topk_blocks": 2}
"""Queries see so many entries, or blocks of them."""
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_TEMPERATURE = {"floor_scale": 8, "log_scaling_n_floor": 8}
"""Queries are scaled by their position from this length on."""
_SWITCHES: Mapping[str, tuple[str, Any]] = {
    "is_decoder": ("as a decoder", True),
    "alibi": ("alibi", True),
    "new_decoder_architecture": ("new decoder", True),
    "use_bidirectional_attention": ("bidirectional", True),
    "scale_attn_by_inverse_layer_idx": ("scaled by layer", True),
    "reorder_and_upcast_attn": ("reordered attention", True),
    "multi_query": ("a KV head for each query head", False),
    "attention_k_eq_v": ("values are keys", True),
    "prefix_lm": ("no prefix", False),
    "attn_logit_softcapping": ("soft cap", 20.0),
}
"""Fields that change attention: what the variant is called, and the value other than the usual one."""

_ROTARY: Mapping[str, Mapping[str, Any]] = {
    "linear rope": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3 rope": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "dynamic rope": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5],
        "original_max_position_embeddings": 1024,
    },
}
_ROTARY_TRIED: Mapping[str, Callable[[str], bool]] = {
    "llama": lambda kind: True,
    "qwen3": lambda kind: True,
    "phi3": lambda kind: kind == "longrope",
    "deepseek_v3": lambda kind: kind != "longrope",  # its factors are for more dimensions
}
_PAST = "past its switch"


def variants(architecture: str) -> dict[str, dict[str, Any]]:
    """Overrides of the config by the name of the variant; the first is the architecture as it is."""
    fields = text_fields(architecture)
    found: dict[str, dict[str, Any]] = {AS_IT_IS: {}}
    windows = {name: WINDOW for name in _WINDOWS if name in fields}
    if windows:
        on = windows | ({"use_sliding_window": True} if "use_sliding_window" in fields else {})
        if "max_window_layers" in fields:
            on["max_window_layers"] = 2
        found["short window"] = on
        kinds = set(fields.get("layer_types") or ())
        if kinds and kinds <= {"sliding_attention", "full_attention"}:
            found["short window in every other layer"] = {**on, "layer_types": _ALTERNATING}
    if "attention_chunk_size" in fields:
        found["short chunks"] = {"attention_chunk_size": CHUNK}
    if "llama_4_scaling_beta" in (fields.get("rope_parameters") or {}):
        scaled = {**fields["rope_parameters"], "original_max_position_embeddings": 8}
        found["temperature by position"] = {"rope_parameters": scaled}
    temperature = {name: value for name, value in _TEMPERATURE.items() if name in fields}
    if temperature:
        found["temperature by position"] = temperature
    if "num_kv_shared_layers" in fields:
        found["shared keys and values"] = {"num_kv_shared_layers": 2, "layer_types": _ALTERNATING}
    if any(name in fields for name in _SPARSE):
        found["sparse attention"] = {name: value for name, value in _SPARSE.items() if name in fields}
    for name, (variant, value) in _SWITCHES.items():
        if fields.get(name, value) in (None, False, True) and name in fields and fields[name] != value:
            found[variant] = {name: "all" if fields["model_type"].startswith("gemma4") and "bidir" in name else value}
    if architecture in _ROTARY_TRIED:
        found |= _rotary(fields, _ROTARY_TRIED[architecture])
    return found


def _rotary(fields: Mapping[str, Any], allowed: Callable[[str], bool]) -> dict[str, dict[str, Any]]:
    base = {"rope_theta": 10000.0}
    if "partial_rotary_factor" in (fields.get("rope_parameters") or {}):
        base["partial_rotary_factor"] = fields["rope_parameters"]["partial_rotary_factor"]
    found = {}
    for name, parameters in _ROTARY.items():
        if not allowed(parameters["rope_type"]):
            continue
        found[name] = {"rope_parameters": {**base, **parameters}}
        if parameters["rope_type"] == "dynamic":
            found[f"{name} {_PAST}"] = {**found[name], "max_position_embeddings": 128}
        if parameters["rope_type"] == "longrope":
            past = {**base, **parameters, "original_max_position_embeddings": 128}
            found[f"{name} {_PAST}"] = {"rope_parameters": past, "original_max_position_embeddings": 128}
            found[name]["original_max_position_embeddings"] = 1024
    return found
