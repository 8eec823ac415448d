"""Tap a model's attention: the model computes what it always did, and a cache that asks for it sees the queries too.

1. For each attention backend an attention function and its mask are registered with transformers, under the name
   ``beaconscope_`` + backend. The function runs that backend; without a :class:`TappedCache` it does nothing else.
2. A forward hook before each attention module looks at the cache of the call. Is it a :class:`TappedCache`, the hook
   hands a :class:`LayerCall` through the module's keyword arguments to the attention function, which tells the cache
   what was attended. So nothing is stored on the model, and several caches may take turns on one.
3. A probe of four one-token sequences reads the shapes of each layer and its rotary embedding (:mod:`.rotary`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.rotary import Rotary
from beaconscope.models.compat import cache_argument
from beaconscope.models.rotary import PROBE_POSITIONS, RotaryMismatch, derive_rotary, function_beside

PREFIX = "beaconscope_"
BACKENDS = ("eager", "sdpa", "flash_attention_2")
_ARGUMENT = "beaconscope_call"


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
    window: int | None
    """Positions a query of a sliding layer sees, None for a layer that sees everything."""


@dataclass(frozen=True)
class TappedModel:
    """A model whose attention is tapped."""

    model: PreTrainedModel
    backend: str
    layers: tuple[LayerInfo, ...]


class TappedCache(Cache):
    """A cache that is told what was attended. Its methods are called in this order for each layer of a forward pass."""

    def fed(self, tokens: Tensor | None) -> None:
        """Before a forward pass: the ids of the new tokens, int64 [B, T]; None where their embeddings come instead."""

    def begin(self, call: LayerCall) -> None:
        """Before the layer computes anything."""

    def mask_for(self, call: LayerCall, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask to attend with: bool (True: visible) [B, 1, T, N], or the model's own as it is."""
        return mask

    def attended(self, call: LayerCall, attention: AttentionInputs) -> None:
        """After the layer has attended."""


@dataclass(frozen=True)
class LayerCall:
    """One call of one attention module."""

    module: nn.Module
    layer: int
    cache: TappedCache
    position_ids: Tensor | None  # [B or 1, T]
    position_embeddings: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class AttentionInputs:
    """What an attention function was called with."""

    query: Tensor  # [B, Hq, T, D], post-RoPE
    key: Tensor  # [B, H, N, D], post-RoPE
    value: Tensor  # [B, H, N, Dv]
    scaling: float
    softcap: float | None
    sink_logit: Tensor | None  # [Hq]


def tap(model: PreTrainedModel) -> TappedModel:
    """Tap ``model``'s attention and read off its layers; may be called again at any time.

    The attention implementation is set to the tapped twin of the one in use. The model's numbers do not change.

    Raises
    ------
    BeaconScopeError
        For a model whose attention cannot be tapped, by name and with the reason.
    """
    name = type(model).__name__
    current = model.config._attn_implementation or "eager"
    backend = current.removeprefix(PREFIX)
    if backend not in BACKENDS:
        raise BeaconScopeError(
            f"{name} runs the attention backend {backend!r}, which cannot be tapped; load it with --attn sdpa or "
            "--attn eager"
        )
    modules = attention_modules(model)
    hooks: list[RemovableHandle] = []
    if current == backend:
        if not getattr(model, "_supports_attention_backend", False):
            raise BeaconScopeError(
                f"{name} does not route its attention through transformers' attention interface, so it cannot be tapped"
            )
        model.set_attn_implementation(PREFIX + backend)
        hooks = [module.register_forward_pre_hook(_announce, with_kwargs=True) for module in modules.values()]
        hooks.append(model.register_forward_pre_hook(_announce_tokens, with_kwargs=True))
    try:
        return TappedModel(model, backend, _probe(model, modules))
    except BeaconScopeError:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(current)
        raise


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The self-attention module of each layer of the decoder, by layer.

    Raises
    ------
    BeaconScopeError
        When a layer has none, or more than one.
    """
    config = model.config.get_text_config(decoder=True)
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and type(module).__name__.endswith("Attention"):
            if layer in found:
                raise BeaconScopeError(
                    f"{type(model).__name__} has more than one attention module in layer {layer}, which cannot be "
                    "recorded"
                )
            found[layer] = module
    missing = [layer for layer in range(config.num_hidden_layers) if layer not in found]
    if missing:
        raise BeaconScopeError(
            f"{type(model).__name__} has no softmax attention in layer {missing[0]} (a linear or recurrent layer?), "
            "which cannot be recorded"
        )
    return dict(sorted(found.items()))


def _announce(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward hook: hand the call of a tapped cache on to the attention function."""
    given, cache = _tapped_cache(module, args, kwargs)
    if cache is None:
        return None
    call = LayerCall(
        module=module,
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        cache=cache,
        position_ids=given.get("position_ids"),
        position_embeddings=given.get("position_embeddings"),
    )
    cache.begin(call)
    return args, {**kwargs, _ARGUMENT: call}


def _announce_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward hook: tell a tapped cache which tokens a pass feeds."""
    given, cache = _tapped_cache(module, args, kwargs)
    if cache is not None:
        cache.fed(given.get("input_ids"))


def _tapped_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Mapping[str, Any], TappedCache | None]:
    """The arguments of a call by name, and the tapped cache among them."""
    given: Mapping[str, Any] = kwargs
    if args:
        forward = module.forward
        method = getattr(forward, "__func__", None)
        names = _parameters(forward) if method is None else _parameters(method)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
    # transformers 5.2 says past_key_values, newer ones say cache.
    cache = given.get("cache")
    if cache is None:
        cache = given.get("past_key_values")
    return given, cache if isinstance(cache, TappedCache) else None


@functools.lru_cache(maxsize=32)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters; reading them takes longer than all else that is done in a step."""
    return tuple(inspect.signature(function).parameters)


def _tapped(backend: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that runs ``backend`` and tells a tapped cache."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,  # by its place too, as other libraries that wrap what is registered call it
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        kwargs["dropout"] = dropout
        call: LayerCall | None = kwargs.pop(_ARGUMENT, None)
        run = _backend_function(backend, module)
        if call is None:
            return run(module, query, key, value, attention_mask, **kwargs)
        mask = call.cache.mask_for(call, query, key, attention_mask)
        if mask is not attention_mask and mask is not None and backend == "eager":
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(
                ~mask, torch.finfo(query.dtype).min
            )
        output = run(module, query, key, value, mask, **kwargs)
        scaling = kwargs.get("scaling")
        call.cache.attended(
            call,
            AttentionInputs(
                query=query,
                key=key,
                value=value,
                scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
                softcap=kwargs.get("softcap"),
                sink_logit=kwargs.get("s_aux"),
            ),
        )
        return output

    return attention


def _backend_function(backend: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if backend == "eager":  # each architecture has its own
        return function_beside(module, "eager_attention_forward")  # type: ignore[no-any-return]
    return ALL_ATTENTION_FUNCTIONS[backend]  # type: ignore[no-any-return]


for _backend in BACKENDS:
    AttentionInterface.register(PREFIX + _backend, _tapped(_backend))
    AttentionMaskInterface.register(PREFIX + _backend, ALL_MASK_ATTENTION_FUNCTIONS[_backend])


class _ProbeCache(TappedCache):
    """Remembers what each layer attended with, and stores nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen: dict[int, tuple[LayerCall, AttentionInputs]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        # transformers 5.2 hands over the positions, newer ones their number.
        return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def attended(self, call: LayerCall, attention: AttentionInputs) -> None:
        self.seen[call.layer] = (call, attention)


def _probe(model: PreTrainedModel, modules: Mapping[int, nn.Module]) -> tuple[LayerInfo, ...]:
    """Feed one token at several positions, each alone in its row, and read off every layer."""
    config = model.config.get_text_config(decoder=True)
    positions = torch.tensor(PROBE_POSITIONS, device=model.device)
    token = min(1, config.vocab_size - 1)
    cache = _ProbeCache()
    try:
        with torch.no_grad():
            model(
                input_ids=torch.full((len(positions), 1), token, device=model.device),
                position_ids=positions[:, None],
                use_cache=True,
                **{cache_argument(model): cache},
            )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        # An architecture that asks for more than keys and values of its cache fails in ways of its own.
        raise BeaconScopeError(
            f"{type(model).__name__} cannot be tapped: it fails on a single token with a cache of keys and values "
            f"({_first_line(error)})"
        ) from error
    unseen = [layer for layer in modules if layer not in cache.seen]
    if unseen:
        raise BeaconScopeError(
            f"{type(model).__name__} does not hand its cache to the attention of layer {unseen[0]}, which cannot be "
            "recorded"
        )
    return tuple(_read(model, *cache.seen[layer]) for layer in modules)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _read(model: PreTrainedModel, call: LayerCall, attention: AttentionInputs) -> LayerInfo:
    kv_heads = attention.key.shape[1]
    group = attention.query.shape[1] // kv_heads
    size = attention.query.shape[-1]
    rotary: Rotary | None = None
    problem = None
    # Row by row the probe's cosine is [P, 1, F] or, where rows share it, the model numbered them itself.
    embeddings = call.position_embeddings
    positions = torch.tensor(PROBE_POSITIONS)
    if isinstance(embeddings, tuple) and len(embeddings) == 2 and embeddings[0].shape[0] == len(positions):
        cos, sin = (part.detach().cpu() for part in embeddings)
        try:
            rotary = derive_rotary(call.module, (cos, sin), attention.query[:, :, 0].cpu(), positions, model)
        except RotaryMismatch as mismatch:
            problem = str(mismatch)
    else:
        problem = (
            f"layer {call.layer} of {type(model).__name__} is not handed the cosine and sine of its rotary embedding, "
            "so its pre-RoPE queries are not known"
        )
    sink = attention.sink_logit
    return LayerInfo(
        layer=call.layer,
        kv_heads=kv_heads,
        group_size=group,
        key_size=size,
        value_size=attention.value.shape[-1],
        scaling=float(attention.scaling),
        softcap=attention.softcap,
        sink_logit=None if sink is None else sink.detach().view(kv_heads, group),
        rotary=rotary,
        rotary_problem=problem,
        window=getattr(call.module, "sliding_window", None),
    )
