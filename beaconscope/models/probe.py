"""Read each layer's facts off a model, and prove them: recording and replay rest on nothing else.

Two probes are fed to the model:

1. *One token at several positions*, each alone in its row, where every attention module is given the same hidden state
   in all rows. What differs between the rows is the rotary embedding, which :mod:`.rotary` reads off.
2. *A random text* that is longer than every window, chunk and similar bound of the model, which are made small for as
   long as it runs. The masks that the layers get say what a query sees. Then the attention is computed again from the
   queries and keys, with the facts that a trace will hold. It must give the output of the model's own attention
   function, with the backend in use and with the eager one, and the weights of the eager one.

A model for which it does not is refused, with what disagrees. So an architecture that nobody has thought of is either
recorded right or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.rotary import Rotary
from beaconscope.kv.step import AttentionStep, attention_weights, scaled_products
from beaconscope.models.compat import cache_argument
from beaconscope.models.finite import finite_logits, finite_remedy
from beaconscope.models.hooks import PREFIX, AttentionInputs, LayerCall, TappedCache, function_beside
from beaconscope.models.rotary import PROBE_POSITIONS, RotaryMismatch, derive_rotary

_TEXT = 64
"""Tokens of the random text."""
_SMALL = 20
"""Bounds of up to this many tokens are left as they are: the random text is three times as long."""
_BOUND = re.compile(r"window|chunk|(^|_)local(_|$)|index_topk|(^|_)block_size")
"""Names of settings that may bound what a query sees."""
_APART = 1e-3
"""Largest difference of attention weights in float32, and of outputs relative to the largest one."""
_APART_HALF = 0.1
"""Largest relative difference of outputs in a type of 16 bits."""


@dataclass(frozen=True)
class LayerInfo:
    """What a layer's attention looks like."""

    layer: int
    kv_heads: int
    group_size: int
    key_size: int
    value_size: int
    scaling: float
    softcap: float | None
    sink_logit: Tensor | None  # [H, G]
    rotary: Rotary | None
    """None where the rotary embedding could not be undone; ``rotary_problem`` says why."""
    rotary_problem: str | None
    window: int | None = None
    """Positions that a query sees, its own included; None for a layer without a sliding window."""
    chunk: int | None = None
    """Tokens of a chunk, where a query sees only positions of its own chunk; None for a layer without chunks."""

    @property
    def sees_all_of(self) -> int | None:
        """Tokens of the longest text of which every query sees all that is before it; None for any text."""
        return self.window if self.chunk is None else self.chunk

    def is_bounded(self, length: int | None) -> bool:
        """Return whether a window or chunk hides something in a text of ``length`` tokens; None is any length."""
        return self.sees_all_of is not None and (length is None or self.sees_all_of < length)


@dataclass(frozen=True)
class _Seen:
    """What one layer did in a probe."""

    call: LayerCall
    attention: AttentionInputs
    stored_heads: int | None
    """Heads whose keys were put into the cache; None where the layer put none."""


class _ProbeCache(TappedCache):
    """Remembers what each layer attended with, and stores nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen: dict[int, _Seen] = {}
        self._stored: dict[int, int] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self._stored:
            raise BeaconScopeError(
                f"layer {layer_idx} stores keys and values twice in one pass, which cannot be recorded"
            )
        self._stored[layer_idx] = key_states.shape[1]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        # transformers 5.2 hands over the positions, newer ones their number.
        return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def attended(self, call: LayerCall, attention: AttentionInputs) -> None:
        if call.layer in self.seen:
            raise BeaconScopeError(f"layer {call.layer} attends twice in one pass, which cannot be recorded")
        self.seen[call.layer] = _Seen(call, attention, self._stored.get(call.layer))


def probe(model: PreTrainedModel, backend: str, modules: Mapping[int, nn.Module]) -> tuple[LayerInfo, ...]:
    """Return the facts of every layer of a tapped model, proved.

    Parameters
    ----------
    model
        With the hooks in place, and the tapped twin of ``backend`` as its attention implementation.
    backend
        The attention backend in use.
    modules
        The attention module of each layer.

    Raises
    ------
    BeaconScopeError
        Where a layer does something else than attention with these facts, or computes numbers that are not finite.
    """
    with torch.no_grad(), _evaluating(model):
        positions = _feed_positions(model, modules)
        # Without a mask, where nothing is hidden, a backend may do something else than with one.
        unbounded = _feed_text(model, modules)
        with _small_bounds(model) as bounds:
            native = _feed_text(model, modules) if bounds else unbounded
            eager = native
            if backend != "eager":
                model.set_attn_implementation(PREFIX + "eager")
                try:
                    eager = _feed_text(model, modules)
                finally:
                    model.set_attn_implementation(PREFIX + backend)
        seen = zip(positions, eager, native, unbounded, strict=True)
        infos = tuple(_layer_info(model, *of_layer, bounds) for of_layer in seen)
    _check_own_cache(model, infos)
    return infos


def _check_own_cache(model: PreTrainedModel, infos: Sequence[LayerInfo]) -> None:
    """Refuse a model whose own cache forgets what its masks let it see, so that ``generate`` is not its forward."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for info, layer in zip(infos, DynamicCache(config=model.config).layers, strict=False):
        kept = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
        if kept is None or info.sees_all_of is not None or (context is not None and kept >= context):
            continue
        raise BeaconScopeError(
            f"layer {info.layer} of {type(model).__name__} sees everything by its mask, but transformers' cache keeps "
            f"only {kept} positions for it, so what it does depends on the cache and cannot be recorded"
        )


def _feed_positions(model: PreTrainedModel, modules: Mapping[int, nn.Module]) -> list[_Seen]:
    """Feed one token at several positions, each alone in its row; attention modules see the first row's hidden state.

    Without that, the rows of a model with learned positions would differ by more than a rotation.
    """
    hooks = [module.register_forward_pre_hook(_repeat_first_row, with_kwargs=True) for module in modules.values()]
    token = min(1, model.config.get_text_config(decoder=True).vocab_size - 1)
    positions = torch.tensor(PROBE_POSITIONS, device=model.device)
    try:
        return _feed(model, modules, torch.full((len(positions), 1), token), positions[:, None])
    finally:
        for hook in hooks:
            hook.remove()


def _repeat_first_row(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward hook: give every row of the batch the hidden state of the first."""
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    assert isinstance(hidden, Tensor)

    def repeated(value: Any) -> Any:
        # Some take the same state as query, key and value.
        same = isinstance(value, Tensor) and value.is_floating_point() and value.shape == hidden.shape
        return value[:1].expand_as(value) if same else value

    return tuple(map(repeated, args)), {
        name: repeated(value) if name == "hidden_states" else value for name, value in kwargs.items()
    }


def _feed_text(model: PreTrainedModel, modules: Mapping[int, nn.Module]) -> list[_Seen]:
    """Feed a random text."""
    config = model.config.get_text_config(decoder=True)
    length = min(_TEXT, getattr(config, "max_position_embeddings", None) or _TEXT)
    tokens = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    return _feed(model, modules, tokens, torch.arange(length)[None])


def _feed(model: PreTrainedModel, modules: Mapping[int, nn.Module], tokens: Tensor, positions: Tensor) -> list[_Seen]:
    """Run the model on ``tokens`` [B, T] and return what each layer did; refuse numbers that are not finite."""
    cache = _ProbeCache()
    name = type(model).__name__
    try:
        output: Any = model(
            input_ids=tokens.to(model.device),
            position_ids=positions.to(model.device),
            use_cache=True,
            **{cache_argument(model): cache},
        )
    except torch.OutOfMemoryError:
        raise
    except BeaconScopeError as error:
        raise BeaconScopeError(f"{name} cannot be tapped: {error}") from error
    except Exception as error:
        # An architecture that asks for more than keys and values of its cache fails in ways of its own.
        raise BeaconScopeError(
            f"{name} cannot be tapped: it fails with a cache of keys and values ({_first_line(error)})"
        ) from error
    for layer in modules:
        if layer not in cache.seen:
            raise BeaconScopeError(
                f"{name} does not hand its cache to the attention of layer {layer}, which cannot be recorded"
            )
        attention = cache.seen[layer].attention
        parts = (attention.query, attention.key, attention.value, attention.output)
        if not all(bool(part.isfinite().all()) for part in parts):
            raise BeaconScopeError(_not_finite(model, f"the attention of layer {layer}"))
    if not bool(finite_logits(output.logits).all()):
        raise BeaconScopeError(_not_finite(model, "the language-model head"))
    return [cache.seen[layer] for layer in modules]


def _not_finite(model: PreTrainedModel, where: str) -> str:
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{where} of {type(model).__name__} computes numbers that are not finite in {dtype}; {finite_remedy(model)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _layer_info(
    model: PreTrainedModel,
    at_positions: _Seen,
    eager: _Seen,
    native: _Seen,
    unbounded: _Seen,
    bounds: Mapping[int, int],
) -> LayerInfo:
    """Read off one layer and prove it."""
    call, attention = eager.call, eager.attention
    where = f"layer {call.layer} of {type(model).__name__}"
    _check_entries(where, eager)
    kv_heads, group = attention.key.shape[1], attention.query.shape[1] // attention.key.shape[1]
    rotary, problem = _read_rotary(model, at_positions)
    sink = attention.sink_logit
    info = LayerInfo(
        layer=call.layer,
        kv_heads=kv_heads,
        group_size=group,
        key_size=attention.query.shape[-1],
        value_size=attention.value.shape[-1],
        scaling=float(attention.scaling),
        softcap=attention.softcap,
        sink_logit=None if sink is None else sink.detach().view(kv_heads, group),
        rotary=rotary,
        rotary_problem=problem,
    )
    visible = _visible(where, attention)
    info = _with_bounds(where, info, visible)
    _prove_weights(where, info, eager)
    for seen in {id(each): each for each in (eager, native)}.values():
        _prove_output(where, info, seen)
    info = replace(info, window=_as_set(info.window, bounds), chunk=_as_set(info.chunk, bounds))
    if unbounded is not native:
        _prove_output(where, info, unbounded)
    return info


def _check_entries(where: str, seen: _Seen) -> None:
    """Refuse a layer whose stored entries are not those that it attends to."""
    attention = seen.attention
    heads, tokens = attention.key.shape[1], attention.query.shape[2]
    if seen.stored_heads is None:
        raise BeaconScopeError(
            f"{where} stores no keys and values of its own (it reads another layer's), which cannot be recorded"
        )
    # Latent attention stores one entry for all heads.
    if seen.stored_heads not in (heads, 1):
        raise BeaconScopeError(
            f"{where} stores keys of {seen.stored_heads} heads and attends with {heads}, which cannot be recorded"
        )
    if attention.query.shape[1] % heads:
        raise BeaconScopeError(
            f"{where} has {attention.query.shape[1]} query heads for {heads} key heads, which cannot be recorded"
        )
    if not attention.key.shape[2] == attention.value.shape[2] == tokens:
        raise BeaconScopeError(
            f"{where} attends to {attention.key.shape[2]} entries in a text of {tokens} tokens; it cannot be recorded"
        )


def _read_rotary(model: PreTrainedModel, seen: _Seen) -> tuple[Rotary | None, str | None]:
    """Return a layer's rotary embedding, or why it could not be undone."""
    queries = seen.attention.query[:, :, 0].cpu()  # [P, heads, D]
    try:
        return derive_rotary(
            seen.call.module, seen.call.position_embeddings, queries, torch.tensor(PROBE_POSITIONS), model
        ), None
    except RotaryMismatch as mismatch:
        return None, str(mismatch)


def _visible(where: str, attention: AttentionInputs) -> Tensor | None:
    """Return what the mask of a layer lets each query see, bool [T, N]; None where it got no mask."""
    mask = attention.mask
    if mask is None:
        return None
    mask = mask[0, ..., : attention.key.shape[2]].cpu()  # [1 or Hq, T, N]
    if mask.dtype == torch.bool:
        visible = mask
    else:
        visible = mask > torch.finfo(mask.dtype).min / 2
        if bool((mask[visible] != 0).any()):
            raise BeaconScopeError(
                f"{where} adds a bias to its attention scores (such as ALiBi), which cannot be recorded"
            )
    if not bool((visible == visible[:1]).all()):
        raise BeaconScopeError(f"{where} lets its heads see different positions, which cannot be recorded")
    return visible[0]


def _with_bounds(where: str, info: LayerInfo, visible: Tensor | None) -> LayerInfo:
    """Return the layer with the window or the chunk that its mask has."""
    if visible is None:
        return info
    position, entry = torch.arange(visible.shape[0])[:, None], torch.arange(visible.shape[1])
    causal = entry <= position
    if bool((visible & ~causal).any()):
        raise BeaconScopeError(_bidirectional(where))
    size = int(visible.sum(dim=-1).max())
    if torch.equal(visible, causal):
        return info
    if torch.equal(visible, causal & (position - entry < size)):
        return replace(info, window=size)
    if torch.equal(visible, causal & (position // size == entry // size)):
        return replace(info, chunk=size)
    raise BeaconScopeError(
        f"{where} has an attention mask that is neither causal, nor sliding, nor chunked, which cannot be recorded"
    )


def _bidirectional(where: str) -> str:
    return f"{where} lets a token see later ones (bidirectional attention), so it cannot be recorded"


def _prove_weights(where: str, info: LayerInfo, eager: _Seen) -> None:
    """Compute the attention of the random text again and compare it with that of the eager function."""
    weights = _recomputed(info, eager.attention)
    theirs = _eager_weights(eager)
    if theirs is not None:
        if float(theirs.triu(1).max()) > _APART:
            raise BeaconScopeError(_bidirectional(where))
        if info.sink_logit is not None:
            # Whether a row holds what its sink leaves, or sums to one, is up to the function; the output tells.
            weights, theirs = (each / each.sum(dim=-1, keepdim=True) for each in (weights, theirs))
        apart = float((weights - theirs).abs().max())
        if not apart <= _APART:
            raise BeaconScopeError(
                f"{where} does not attend as its queries, keys and mask say (weights differ by up to {apart:.2g}), so "
                "it cannot be recorded"
            )


def _prove_output(where: str, info: LayerInfo, seen: _Seen) -> None:
    """Compute the output of a layer for the random text again and compare it with its own."""
    ours = _output(_recomputed(info, seen.attention), seen.attention.value)  # [B, T, Hq, Dv]
    output = seen.attention.output.float().view_as(ours)
    apart = float((ours - output).abs().max() / output.abs().max().clamp(min=1e-6))
    if not apart <= (_APART if seen.attention.query.dtype in (torch.float32, torch.float64) else _APART_HALF):
        raise BeaconScopeError(
            f"{where} does not give the output of softmax attention with its queries, keys and values (off by up to "
            f"{100 * apart:.2g} %), so it cannot be recorded"
        )


def _recomputed(info: LayerInfo, attention: AttentionInputs) -> Tensor:
    """Return the attention weights of a text as a recording computes them, float32 [B, Hq, T, N]."""
    b, heads, t, d = attention.query.shape
    query = attention.query.view(b, info.kv_heads, info.group_size, t, d)
    if info.chunk is not None:
        # Recordings end before the first chunk does; here it is to be seen that the mask is all there is.
        position = torch.arange(t, device=query.device)
        visible = (position <= position[:, None]) & (position // info.chunk == position[:, None] // info.chunk)
        logits = scaled_products(query, attention.key, info.scaling)
        weights = attention_weights(logits, info.softcap, info.sink_logit, visible)
    else:
        step = AttentionStep(
            rows=None,
            first_position=0,
            query=query,
            key=attention.key,
            value=attention.value,
            key_positions=torch.arange(t, device=query.device).expand(b, info.kv_heads, t),
            scaling=info.scaling,
            softcap=info.softcap,
            sink_logit=info.sink_logit,
            window=info.window,
        )
        weights = step.attention()
    return weights.reshape(b, heads, t, t)


def _eager_weights(seen: _Seen) -> Tensor | None:
    """Return the weights that the architecture's eager attention function computes, float32; None where it has none."""
    attention = seen.attention
    if attention.weights is None or attention.query.dtype == torch.float32:
        return None if attention.weights is None else attention.weights.float()
    # In 16 bits its scores are too coarse to tell a wrong fact from rounding.
    query, key, value = (part.float() for part in (attention.query, attention.key, attention.value))
    mask = attention.mask
    if mask is not None and mask.is_floating_point():
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask != 0, torch.finfo(torch.float32).min)
    run = function_beside(seen.call.module, "eager_attention_forward")
    weights: Tensor = run(seen.call.module, query, key, value, mask, **attention.options)[1]
    return weights.float()


def _output(weights: Tensor, value: Tensor) -> Tensor:
    """Return the sums of values [B, H, N, Dv] by weights [B, Hq, T, N], float32 [B, T, Hq, Dv]."""
    group = weights.shape[1] // value.shape[1]
    return (weights @ value.float().repeat_interleave(group, dim=1)).transpose(1, 2)


@contextmanager
def _small_bounds(model: PreTrainedModel) -> Iterator[Mapping[int, int]]:
    """Make every window, chunk and similar bound of a model small; yields what each stands for."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for holder in _holders(model):
        for name, value in vars(holder).items():
            if _BOUND.search(name) and any(_is_large(each) for each in _numbers(value)):
                found.append((vars(holder), name, value))
    large = sorted({each for _, _, value in found for each in _numbers(value) if _is_large(each)})
    # Two apart, so that a mask that counts a query itself or does not can be told from another bound.
    small = {value: size for value, size in zip(large, range(_SMALL + 2, 2, -3), strict=False)}
    try:
        for place, name, value in found:
            if isinstance(value, list | tuple):
                place[name] = type(value)(small.get(each, each) for each in value)
            else:
                place[name] = small.get(value, value)
        yield {size: value for value, size in small.items()}
    finally:
        for place, name, value in found:
            place[name] = value


def _holders(model: PreTrainedModel) -> list[Any]:
    """Return all that settings are read from: configs, those in configs too, and modules."""
    modules = list(model.modules())
    configs: list[Any] = [module.config for module in modules if hasattr(module, "config")]
    configs += [getattr(config, name, None) for config in configs for name in getattr(config, "sub_configs", {})]
    unique = {id(each): each for each in (*configs, *modules) if each is not None and hasattr(each, "__dict__")}
    return list(unique.values())


def _numbers(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_large(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > _SMALL


def _as_set(size: int | None, bounds: Mapping[int, int]) -> int | None:
    """Return what a bound that was found in the masks is in the model as it was loaded."""
    if size is None:
        return None
    for off in (0, -1, 1):  # a mask may count the query itself or not
        if size + off in bounds:
            return bounds[size + off] - off
    return size


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
