"""What a trace says of itself: the JSON under the key ``beaconscope``, written, read and checked here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, get_args, get_origin, get_type_hints

import numpy as np

from beaconscope.errors import BeaconScopeError
from beaconscope.files import valid_unicode
from beaconscope.trace.schema import FORMAT_VERSION, LayerLayout, TraceLayout

METADATA_KEY = b"beaconscope"


class TraceMetadata(TypedDict, total=False):
    """The keys of a trace's metadata, with the types that a reader insists on; others may be added.

    ``docs/trace-format.md`` is their specification.
    """

    format_version: str
    """``major.minor``; written by the journal."""
    recording_id: str
    """Random, one per recording; written by the journal."""
    layout: dict[str, Any]
    """What is recorded of which layer; written by the journal from the `TraceLayout`."""
    created: str
    """ISO 8601 with time zone; the journal writes the time at which it was made unless given."""
    whole: bool
    """False where the recording was cut short."""
    cut_reason: str | None
    model: dict[str, Any]
    """``id``, ``revision``, ``config``, ``dtype``, ``parameters``."""
    tokenizer: dict[str, Any]
    """``id``, ``special_ids``."""
    rotary: dict[str, Any]
    """``kinds``, ``layers``: enough to undo and redo RoPE without the model."""
    attention: dict[str, Any]
    """By layer: ``scaling``, ``softcap``, ``sink_logit``, ``window``, ``kv_heads``."""
    shared_layers: list[int]
    """Layers whose heads share one stored entry (latent attention)."""
    prefill_passes: list[int]
    """Tokens of each forward pass of the prompt."""
    ended: bool
    """The model ended the text by itself."""
    prompt: str
    """As the user gave it, before the chat template."""
    prompt_id: str | None
    right_answer: str | None
    """Of one of many prompts, where given."""
    text: str
    """Prompt and generation as the model saw them."""
    prompt_length: int
    """Tokens of the prompt, chat template included. Required."""
    think_open: str
    think_close: str
    options: dict[str, Any]
    """Every option of the recording."""
    policy: dict[str, Any]
    """``name``, ``params``."""
    versions: dict[str, Any]
    """Version of each library that took part."""
    device: str
    timings: dict[str, Any]
    """Seconds."""
    peak_memory: dict[str, Any]
    """Bytes."""
    attention_over: str
    """``everything``, or ``what the cache held``: over what hits and masses are taken."""


def _kinds(hint: Any) -> tuple[type, ...]:
    """The types that ``isinstance`` can tell of a hint such as ``dict[str, Any]`` or ``str | None``."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(get_origin(part) or part for part in parts)


_TYPES = {key: _kinds(hint) for key, hint in get_type_hints(TraceMetadata).items()}
# Of what is shown or computed with. Of a model something may not be known, which is null.
_INNER: dict[str, dict[str, tuple[type, ...]]] = {
    "model": {"id": (str,), "revision": (str,), "dtype": (str,), "parameters": (int,), "config": (dict,)},
    "tokenizer": {"special_ids": (list,)},
    "policy": {"name": (str,), "params": (dict,)},
    "options": {"sampling": (dict,), "layers": (str,), "heads": (str,)},
}
_NUMBERS = ("timings", "peak_memory")
_REQUIRED = ("format_version", "recording_id", "layout", "whole", "prompt_length")

# No model comes near these; a file that claims more is nonsense and would only cost memory.
_MOST_LAYERS = 4096
_MOST_HEADS = 4096
_MOST_SIZE = 1 << 16
_MOST_HITS = 1024


def plain(value: Any) -> Any:
    """Reduce a value to what JSON can say.

    A recording of hours must not fail at its end over its metadata, so nothing is refused: numbers that are not finite
    become null, sets and tuples lists, lone surrogates the characters that their bytes are, and what JSON does not know
    becomes its text.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return valid_unicode(value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {valid_unicode(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, set | frozenset):
        return [plain(item) for item in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return valid_unicode(str(value))


def dump_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Write metadata as JSON, in ASCII."""
    return json.dumps(plain(metadata), allow_nan=False).encode("ascii")


def parse_metadata(data: bytes, path: Path) -> tuple[dict[str, Any], TraceLayout]:
    """Read and check the metadata of the trace or journal at ``path``.

    Raises
    ------
    BeaconScopeError
        For a newer major version of the format, missing keys, or values that make no sense.
    """
    try:
        # What JSON should not know, such as NaN, is null from here on.
        metadata = plain(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise _nonsense(path, "they are no JSON") from error
    if not isinstance(metadata, dict):
        raise _nonsense(path, "they are no JSON object")
    _check_version(metadata.get("format_version"), path)
    for key in _REQUIRED:
        if key not in metadata:
            raise _nonsense(path, f"{key} is missing")
    check_types(metadata, path)
    _check_inner(metadata, path)
    if metadata["prompt_length"] < 0:
        raise _nonsense(path, "prompt_length is negative")
    return metadata, layout_from_json(metadata["layout"], path)


def check_types(metadata: Mapping[str, Any], path: Path) -> None:
    """Refuse a known key whose value has the wrong type.

    Raises
    ------
    BeaconScopeError
        Naming the first such key.
    """
    for key, types in _TYPES.items():
        if key not in metadata:
            continue
        value = metadata[key]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            raise _nonsense(path, f"{key} is no {expected}")


def _check_inner(metadata: Mapping[str, Any], path: Path) -> None:
    """Refuse known keys within known keys whose values have the wrong type, likewise."""
    for key, inner in _INNER.items():
        for name, types in inner.items():
            if name not in metadata.get(key, {}):
                continue
            value = metadata[key][name]
            known = value is not None or key != "model"
            if known and (not isinstance(value, types) or isinstance(value, bool)):
                raise _nonsense(path, f"{key}.{name} is no {types[0].__name__}")
    for key in _NUMBERS:
        for name, value in metadata.get(key, {}).items():
            if value is not None and not is_number(value):
                raise _nonsense(path, f"{key}.{name} is no number")
    special = metadata.get("tokenizer", {}).get("special_ids", [])
    if not all(isinstance(index, int) for index in special):
        raise _nonsense(path, "tokenizer.special_ids are no whole numbers")


def is_number(value: Any) -> bool:
    """Tell whether a value of JSON is a number that can be computed with; a whole one may be larger than any float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _check_version(version: Any, path: Path) -> None:
    major, dot, minor = version.partition(".") if isinstance(version, str) else ("", "", "")
    if not (dot and major.isdecimal() and minor.isdecimal() and len(version) < 20):
        raise _nonsense(path, "format_version is no version")
    known = int(FORMAT_VERSION.partition(".")[0])
    if int(major) > known:
        raise BeaconScopeError(
            f"{path} has trace format {version}, newer than this beaconscope reads ({known}.x); upgrade beaconscope"
        )
    if int(major) < known:
        raise BeaconScopeError(
            f"{path} has trace format {version}, which this beaconscope no longer reads; record again"
        )


def layout_to_json(layout: TraceLayout) -> dict[str, Any]:
    """Say a layout in JSON's types."""
    return {
        "vector_type": layout.vector_type,
        "hits": layout.hits,
        "layers": [
            {
                "layer": layer.layer,
                "kv_heads": list(layer.kv_heads),
                "group_size": layer.group_size,
                "key_size": layer.key_size,
                "value_size": layer.value_size,
            }
            for layer in layout.layers
        ],
    }


def layout_from_json(value: Any, path: Path) -> TraceLayout:
    """Read a layout back and check that it can be one.

    Raises
    ------
    BeaconScopeError
        For anything that is no layout, naming ``path``.
    """
    try:
        layout = TraceLayout(
            layers=tuple(
                LayerLayout(
                    layer=_whole_number(layer["layer"], 0, _MOST_LAYERS),
                    kv_heads=tuple(_whole_number(head, 0, _MOST_HEADS) for head in layer["kv_heads"]),
                    group_size=_whole_number(layer["group_size"], 1, _MOST_HEADS),
                    key_size=_whole_number(layer["key_size"], 1, _MOST_SIZE),
                    value_size=None
                    if layer["value_size"] is None
                    else _whole_number(layer["value_size"], 1, _MOST_SIZE),
                )
                for layer in value["layers"]
            ),
            vector_type=value["vector_type"],
            hits=_whole_number(value["hits"], 0, _MOST_HITS),
        )
        check_layout(layout)
    except (KeyError, TypeError, ValueError) as error:
        raise _nonsense(path, "layout is no layout") from error
    return layout


def check_layout(layout: TraceLayout) -> None:
    """Refuse a layout that no trace can have.

    Raises
    ------
    ValueError
        Saying what is wrong.
    """
    if layout.vector_type not in ("float16", "float32"):
        raise ValueError(f"vector_type is {layout.vector_type!r}, neither float16 nor float32")
    if not layout.layers:
        raise ValueError("no layer is recorded")
    if layout.hits < 0:
        raise ValueError("hits is negative")
    numbers = [layer.layer for layer in layout.layers]
    if sorted(set(numbers)) != numbers:
        raise ValueError("layers must ascend")
    for layer in layout.layers:
        if not layer.kv_heads or sorted(set(layer.kv_heads)) != list(layer.kv_heads):
            raise ValueError(f"kv_heads of layer {layer.layer} must be there and ascend")
        if min(layer.group_size, layer.key_size, 1 if layer.value_size is None else layer.value_size) < 1:
            raise ValueError(f"sizes of layer {layer.layer} must be positive")


def _whole_number(value: Any, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(value)
    return value


def _nonsense(path: Path, what: str) -> BeaconScopeError:
    return BeaconScopeError(f"{path} is no usable trace: in its metadata {what}; record it again")
