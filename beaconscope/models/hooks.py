"""How a cache learns what a model's attention does: an attention function and hooks, which change no numbers.

1. For each attention backend, an attention function and its mask are registered with transformers under the name
   ``beaconscope_`` + backend. The function runs that backend. Without a :class:`TappedCache` it does nothing else.
2. A forward hook before each attention module looks for a :class:`TappedCache` among the arguments of the call. If
   there is one, the hook passes a :class:`LayerCall` to the attention function through the module's keyword arguments,
   and the attention function tells the cache what was attended. So nothing is stored on the model, and several caches
   can be used with one model in turn.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from beaconscope.attention.spec import AttentionSpec
from beaconscope.errors import BeaconScopeError

PREFIX = "beaconscope_"
BACKENDS = ("eager", "sdpa", "flash_attention_2")
_ARGUMENT = "beaconscope_call"


class TappedCache(Cache):
    """A cache that is told what was attended. Its methods are called in this order for each layer of a forward pass."""

    def fed(self, tokens: Tensor | None, position_ids: Tensor | None) -> None:
        """Before a forward pass: what the model is given.

        Parameters
        ----------
        tokens
            Ids of the new tokens, int64 [B, T]; None where their embeddings come instead.
        position_ids
            Their positions, int64 [B or 1, T]; None where the model numbers them itself.
        """

    def left_out(self, tokens: Tensor, position_ids: Tensor | None, other: bool) -> None:
        """Before a forward pass of its model that is not given this cache.

        Parameters
        ----------
        tokens, position_ids
            As in :meth:`fed`.
        other
            The pass is given another cache.
        """

    def begin(self, call: LayerCall) -> None:
        """Before the layer computes anything."""

    def mask_for(self, call: LayerCall, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask to attend with: bool (True: visible) [B, 1, T, N], or the model's own as it is."""
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
    position_embeddings: Any
    """What the model passes to its layers as their rotary embedding: cosine and sine, or whatever it uses."""


@dataclass(frozen=True)
class AttentionInputs:
    """What an attention function was called with, and what it returned."""

    query: Tensor  # [B, Hq, T, D], post-RoPE
    key: Tensor  # [B, H, N, D], post-RoPE
    value: Tensor  # [B, H, N, Dv]
    spec: AttentionSpec
    """Without the window, which only the mask tells."""
    mask: Tensor | None
    """As the model made it, before :meth:`TappedCache.mask_for`."""
    options: Mapping[str, Any]
    """Further keyword arguments of the call."""
    output: Tensor  # [B, T, Hq, Dv]
    weights: Tensor | None
    """Post-softmax attention [B, Hq, T, N], where the backend returns it."""


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the self-attention module of each layer of the decoder, by layer.

    Raises
    ------
    BeaconScopeError
        When a layer has none, or more than one.
    """
    config = model.config.get_text_config(decoder=True)
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and type(module).__name__.endswith(("Attention", "MLA")):
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


def is_hooked(module: nn.Module) -> bool:
    """Return whether the forward hook of an attention module is in place."""
    return _announce in module._forward_pre_hooks.values()


def hook(model: nn.Module, modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Put the hooks on a model and its attention ``modules``; what has one already is passed over."""
    added = [
        module.register_forward_pre_hook(_announce, with_kwargs=True) for module in modules if not is_hooked(module)
    ]
    if _model_hook(model) is None:
        added.append(model.register_forward_pre_hook(_ModelHook(), with_kwargs=True))
    return added


def watch(model: nn.Module, cache: TappedCache) -> None:
    """Tell a cache, as long as it exists, of the forward passes of its hooked model that leave it out."""
    found = _model_hook(model)
    if found is not None:
        found.caches.add(cache)


class _ModelHook:
    """Forward hook of a model: tells a tapped cache which tokens a pass feeds, and others that they were left out."""

    def __init__(self) -> None:
        self.caches: weakref.WeakSet[TappedCache] = weakref.WeakSet()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _by_name(module, args, kwargs)
        tokens = given.get("input_ids")
        cache = _tapped_cache(args, kwargs)
        if cache is not None:
            cache.fed(tokens, given.get("position_ids"))
        elif tokens is not None:
            other = any(isinstance(value, Cache) for value in given.values())
            for each in list(self.caches):
                each.left_out(tokens, given.get("position_ids"), other)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModelHook:
        return _ModelHook()  # of a copy of the model, which has no caches yet


def _model_hook(model: nn.Module) -> _ModelHook | None:
    return next((each for each in model._forward_pre_hooks.values() if isinstance(each, _ModelHook)), None)


def function_beside(module: nn.Module, name: str) -> Any:
    """Return the function ``name`` of the file in which a module's class, or a base class, is written; else None."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules[kind.__module__], name, None)
        if found is not None:
            return found
    return None


def _announce(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward hook: pass the call of a tapped cache on to the attention function."""
    cache = _tapped_cache(args, kwargs)
    if cache is None:
        return None
    given = _by_name(module, args, kwargs)
    call = LayerCall(
        module=module,
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        cache=cache,
        position_ids=given.get("position_ids"),
        position_embeddings=given.get("position_embeddings"),
    )
    cache.begin(call)
    return args, {**kwargs, _ARGUMENT: call}


def _tapped_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TappedCache | None:
    """Return the tapped cache among the arguments of a call.

    Architectures and versions of transformers name it differently: ``cache``, ``past_key_values``, ``layer_past``.
    """
    for value in (*kwargs.values(), *args):
        if isinstance(value, TappedCache):
            return value
    return None


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call by name."""
    if not args:
        return kwargs
    forward = module.forward
    method = getattr(forward, "__func__", None)
    names = _parameters(forward) if method is None else _parameters(method)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


@functools.lru_cache(maxsize=32)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters; reading them takes longer than all else that is done in a step."""
    return tuple(inspect.signature(function).parameters)


def _tapped(backend: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the attention function that runs ``backend`` and tells a tapped cache."""

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
        if mask is not attention_mask and backend == "eager":
            mask = _additive(mask, query, key)
        output, weights = run(module, query, key, value, mask, **kwargs)
        call.cache.attended(
            call,
            AttentionInputs(
                query=query,
                key=key,
                value=value,
                spec=_spec(query, key, kwargs),
                mask=attention_mask,
                options=kwargs,
                output=output,
                weights=weights,
            ),
        )
        return output, weights

    return attention


def _spec(query: Tensor, key: Tensor, options: Mapping[str, Any]) -> AttentionSpec:
    """Read the spec off the keyword arguments of an attention function."""
    scaling, sink = options.get("scaling"), options.get("s_aux")  # [Hq]
    return AttentionSpec(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=options.get("softcap"),
        sink_logit=None if sink is None else sink.detach().view(key.shape[1], -1),
    )


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask, bool [B, 1, T, N] or None for all, as eager functions add it to their scores; some need one."""
    if mask is None:
        return query.new_zeros((1, 1, query.shape[2], key.shape[2]))
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(
        ~mask, torch.finfo(query.dtype).min
    )


def _backend_function(backend: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if backend == "eager":  # each architecture has its own
        return function_beside(module, "eager_attention_forward")  # type: ignore[no-any-return]
    return ALL_ATTENTION_FUNCTIONS[backend]  # type: ignore[no-any-return]


for _backend in BACKENDS:
    AttentionInterface.register(PREFIX + _backend, _tapped(_backend))
    AttentionMaskInterface.register(PREFIX + _backend, ALL_MASK_ATTENTION_FUNCTIONS[_backend])
