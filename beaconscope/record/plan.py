"""What a recording is going to hold, how large it will be, and whether it can be made at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.cache import sliding_note
from beaconscope.models import TappedModel
from beaconscope.record.options import RecordOptions
from beaconscope.selection import select
from beaconscope.trace import LayerLayout, TraceLayout, disk_bytes, estimate_bytes, free_bytes
from beaconscope.units import in_bytes

_WORTH_A_HINT = 256 << 20


@dataclass(frozen=True)
class Plan:
    """What a recording will hold."""

    layout: TraceLayout
    limits: tuple[int, ...]
    """New tokens of each prompt at most; less than was asked for where the model's context ends."""
    max_length: int
    """Most tokens of a sequence of the batch, prompt and new ones; decides which sliding layers see everything."""
    notes: tuple[str, ...]
    """What the user should know before it starts."""


def make_plan(
    tapped: TappedModel, options: RecordOptions, prompt_lengths: list[int], forced: int | None, folder: Path
) -> Plan:
    """Plan a batch of recordings.

    Parameters
    ----------
    tapped
        The model.
    options
        Of the recording.
    prompt_lengths
        Tokens of each prompt.
    forced
        Tokens of a given completion, else None.
    folder
        Where the traces go.

    Raises
    ------
    BeaconScopeError
        When the prompt does not fit into the model's context, or the traces not onto the disk.
    UsageError
        For layers or heads that the model does not have.
    """
    layout = make_layout(tapped, options)
    notes: list[str] = []
    limits = tuple(_fit_context(tapped, options, length, forced, notes) for length in prompt_lengths)
    totals = [length + limit for length, limit in zip(prompt_lengths, limits, strict=True)]
    # The whole batch goes on until its last sequence is done.
    max_length = max(prompt_lengths) + max(limits)
    if tapped.rotary_limit is not None and max_length > tapped.rotary_limit:
        raise BeaconScopeError(
            f"together these prompts go past the {tapped.rotary_limit} tokens after which this model changes its "
            "rotary frequencies; give --batch-size 1"
        )
    notes += _check_windows(tapped, options, prompt_lengths, max_length)
    dtype = str(tapped.model.dtype)
    size = estimate_bytes(layout, max(totals), model_dtype=dtype)
    needed = sum(disk_bytes(layout, total, model_dtype=dtype) for total in totals)
    free = free_bytes(folder)
    remedy = "fewer --layers or --heads, or --no-values, make it smaller"
    if needed > free:
        raise BeaconScopeError(
            f"the trace may need {in_bytes(needed)} with its journal, but {folder} has {in_bytes(free)} free; {remedy}"
        )
    heads = sum(len(layer.kv_heads) for layer in layout.layers)
    longest = totals.index(max(totals))
    text = (
        f"The trace takes at most about {in_bytes(size)}: {len(layout.layers)} layers, {heads} KV heads in all, "
        f"{prompt_lengths[longest]} + {limits[longest]} tokens"
    )
    notes.append(text + (f"; {remedy}." if size > _WORTH_A_HINT else "."))
    return Plan(layout, limits, max_length, tuple(dict.fromkeys(notes)))


def make_layout(tapped: TappedModel, options: RecordOptions) -> TraceLayout:
    """Which layers and heads are recorded, and in which type.

    Raises
    ------
    UsageError
        For layers or heads that the model does not have.
    """
    layers = []
    for index in select(options.layers, len(tapped.layers), "layers"):
        info = tapped.layers[index]
        heads = select("all" if options.heads == "auto" else options.heads, info.kv_heads, "heads")
        layers.append(
            LayerLayout(
                layer=index,
                kv_heads=heads,
                group_size=info.group_size,
                key_size=info.key_size,
                value_size=info.value_size if options.values else None,
            )
        )
    # float32 holds what any model computes, and what bfloat16 leaves empty in it compresses to less than float16 takes.
    vector_type = "float32" if options.vector_type == "auto" else options.vector_type
    return TraceLayout(tuple(layers), vector_type, options.hits)


def _fit_context(tapped: TappedModel, options: RecordOptions, prompt: int, forced: int | None, notes: list[str]) -> int:
    """New tokens at most."""
    wanted = options.max_new_tokens if forced is None else forced
    context = tapped.context
    if context is not None and prompt + (forced or 1) > context:
        what = (
            f"the prompt has {prompt} tokens"
            if forced is None
            else f"prompt and completion have {prompt + forced} tokens"
        )
        raise BeaconScopeError(f"{what}, but the model's context is {context}; shorten the text")
    limit = wanted if context is None else min(wanted, context - prompt)
    if limit < wanted:
        notes.append(f"The model's context of {context} tokens leaves room for {limit} new ones, not {wanted}.")
    known = tapped.rotary_limit
    if known is not None and prompt + limit > known:
        remedy = (
            f"give --max-new-tokens at most {known - prompt}" if forced is None and prompt < known else "shorten it"
        )
        raise BeaconScopeError(
            f"past {known} tokens this model changes its rotary frequencies and starts again without its cache, which "
            f"cannot be recorded, and the text may reach {prompt + limit}; {remedy}"
        )
    return limit


def _check_windows(tapped: TappedModel, options: RecordOptions, prompt_lengths: list[int], length: int) -> list[str]:
    """Refuse a text of ``length`` tokens that could not be recorded or compressed; return what to know of it."""
    bounded = [info for info in tapped.layers if info.is_bounded(length)]
    if not bounded:
        return []
    name = type(tapped.model).__name__
    chunked = next((info for info in bounded if info.chunk is not None), None)
    if chunked is not None:
        raise BeaconScopeError(
            f"layer {chunked.layer} of {name} attends in chunks of {chunked.chunk} tokens, which can be recorded only "
            f"up to the end of the first, and the text may reach {length}; {_shorter(chunked.chunk, prompt_lengths)}"
        )
    if not options.policy.evicts:
        return []
    if len(bounded) == len(tapped.layers):
        widest = max(info.window or 0 for info in bounded)
        raise BeaconScopeError(
            f"every layer of {name} has a sliding window, the widest of {widest} tokens, and the text may reach "
            f"{length}, so there is nothing for {options.policy.name} to compress; {_shorter(widest, prompt_lengths)}, "
            "or --cache full"
        )
    return [sliding_note(tapped.layers, length)]


def _shorter(length: int | None, prompt_lengths: list[int]) -> str:
    """Return what keeps prompts and new tokens within ``length``."""
    room = (length or 0) - max(prompt_lengths)
    return f"give --max-new-tokens at most {room}" if room > 0 else "shorten the text"
