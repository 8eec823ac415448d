"""What a recording is going to hold, how large it will be, and whether it can be made at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.policies import BeaconKV, Full
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
    known = _rotary_limit(tapped, options)
    # The whole batch goes on until its last sequence is done, and the longest decides the frequencies of all.
    if known is not None and max(prompt_lengths) + max(limits) > known:
        raise BeaconScopeError(
            f"together these prompts go past the {known} tokens after which this model changes its rotary frequencies; "
            "give --batch-size 1"
        )
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
    return Plan(layout, limits, tuple(dict.fromkeys(notes)))


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
    context = getattr(tapped.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
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
    known = _rotary_limit(tapped, options)
    if known is not None and prompt + limit > known:
        other = ", or --query-space post-rope" if isinstance(options.policy, BeaconKV | Full) else ""
        raise BeaconScopeError(
            f"past {known} tokens this model changes its rotary frequencies, so its pre-RoPE queries are not known; "
            f"give --max-new-tokens at most {max(known - prompt, 0)}{other}"
        )
    return limit


def _rotary_limit(tapped: TappedModel, options: RecordOptions) -> int | None:
    """Tokens up to which the pre-RoPE queries are known, where they are needed and there is such a limit."""
    if not options.policy.needs_rotary:
        return None
    limits = [info.rotary.limit for info in tapped.layers if info.rotary is not None and info.rotary.limit is not None]
    return min(limits, default=None)
