"""What a trace says of its layers' attention, checked before anything is computed from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from beaconscope.errors import BeaconScopeError
from beaconscope.trace.metadata import is_number
from beaconscope.trace.reader import Trace

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_FAR = 1 << 31


def attention_of(trace: Trace, layer: int) -> Mapping[str, Any] | None:
    """What the trace says of how a recorded layer attends; None where it says nothing.

    Returns
    -------
    mapping or None
        ``scaling``, ``softcap``, ``sink_logit``, ``window`` and ``compressible``, as ``docs/trace-format.md`` has them.

    Raises
    ------
    BeaconScopeError
        Where it is no such thing, or of another shape than the layer.
    """
    facts = trace.metadata.get("attention", {}).get(str(layer))
    if facts is None:
        return None
    shape = trace.layout.of(layer)
    if not (
        isinstance(facts, Mapping)
        and is_number(facts.get("scaling"))
        and {"softcap", "sink_logit", "window"} <= facts.keys()
        and (facts["softcap"] is None or (is_number(facts["softcap"]) and facts["softcap"] > 0))
        and (facts["window"] is None or _is_whole(facts["window"], 1, _FAR))
        and isinstance(facts.get("compressible", True), bool)
        and (facts["sink_logit"] is None or _are_logits(facts["sink_logit"], max(shape.kv_heads) + 1, shape.group_size))
    ):
        raise BeaconScopeError(f"{trace.path} does not say how layer {layer} attends; record it again")
    # Recordings of version 0.1 compressed every layer without a window and no other.
    return {"compressible": facts["window"] is None, **facts}


def rotary_of(trace: Trace, layer: int) -> dict[str, Any] | None:
    """What the trace says of a recorded layer's rotary embedding; None where it has none or nothing is said.

    Raises
    ------
    BeaconScopeError
        Where it is no such thing, or of another size than the layer's keys.
    """
    rotary = trace.metadata.get("rotary", {})
    layers = rotary.get("layers", {})
    number = layers.get(str(layer)) if isinstance(layers, Mapping) else layers
    if number is None:
        return None
    kinds = rotary.get("kinds")
    size = trace.layout.of(layer).key_size
    if isinstance(kinds, list) and _is_whole(number, 0, len(kinds) - 1) and _is_rotary(kinds[number], size):
        found: dict[str, Any] = kinds[number]
        return found
    raise BeaconScopeError(f"{trace.path} does not say how layer {layer} is rotated; record it again")


def prefill_passes(trace: Trace) -> tuple[int, ...]:
    """Tokens of each forward pass of the prompt; one pass where the trace does not say.

    Raises
    ------
    BeaconScopeError
        Where together they are not the prompt.
    """
    passes = trace.metadata.get("prefill_passes") or [trace.prompt_length]
    kept, left = [], trace.prompt_length
    for size in passes:
        if not _is_whole(size, 0, _FAR):
            left = -1
            break
        # A trace may have been cut within its prompt.
        if left:
            kept.append(min(size, left))
            left -= kept[-1]
    if left:
        raise BeaconScopeError(f"{trace.path} does not say in which passes its prompt was fed; record it again")
    return tuple(size for size in kept if size)


def _is_rotary(kind: Any, size: int) -> bool:
    if not isinstance(kind, Mapping):
        return False
    frequencies = kind.get("inv_freq")
    return (
        isinstance(frequencies, list)
        and _is_list(frequencies, len(frequencies), is_number)
        and _is_list(kind.get("partner"), size, lambda value: _is_whole(value, 0, size - 1))
        and _is_list(kind.get("sign"), size, is_number)
        and _is_list(kind.get("frequency"), size, lambda value: _is_whole(value, -1, len(frequencies) - 1))
        and is_number(kind.get("scaling"))
        and kind.get("dtype") in _DTYPES
        and "limit" in kind
        and (kind["limit"] is None or _is_whole(kind["limit"], 0, _FAR))
    )


def _are_logits(value: Any, heads: int, groups: int) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) >= heads
        and all(_is_list(of_head, groups, is_number) for of_head in value)
    )


def _is_list(value: Any, length: int, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) == length and all(map(holds, value))


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
