"""Tap a model's attention: the model computes what it always did, and a cache that asks for it sees the queries too.

:mod:`.hooks` has the attention function and the hooks, :mod:`.probe` reads each layer's facts off the model and proves
them before anything is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from beaconscope.errors import BeaconScopeError
from beaconscope.models.hooks import BACKENDS, PREFIX, attention_modules, hook, is_hooked
from beaconscope.models.probe import LayerInfo, probe


@dataclass(frozen=True)
class TappedModel:
    """A model whose attention is tapped."""

    model: PreTrainedModel
    backend: str
    layers: tuple[LayerInfo, ...]

    @property
    def context(self) -> int | None:
        """Tokens of the model's context, where its config says."""
        config = self.model.config.get_text_config(decoder=True)
        context: int | None = getattr(config, "max_position_embeddings", None)
        return context

    @property
    def rotary_limit(self) -> int | None:
        """Tokens past which the model changes its rotary frequencies; None where it never does."""
        rotary = [info.rotary for info in self.layers if info.rotary is not None]
        return min((each.limit for each in rotary if each.limit is not None), default=None)


def tap(model: PreTrainedModel) -> TappedModel:
    """Tap ``model``'s attention, read off its layers and prove what was read; may be called again at any time.

    The attention implementation is set to the tapped twin of the one in use. The model's numbers do not change.

    Raises
    ------
    BeaconScopeError
        For a model whose attention cannot be tapped, or does not compute what its facts say; by name, with the reason.
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
    # Another model with the same config object may have set the implementation: only the hooks say what is tapped.
    if current == backend or not all(map(is_hooked, modules.values())):
        if not getattr(model, "_supports_attention_backend", False):
            raise BeaconScopeError(
                f"{name} does not route its attention through transformers' attention interface, so it cannot be tapped"
            )
        model.set_attn_implementation(PREFIX + backend)
        hooks = hook(model, modules.values())
    try:
        return TappedModel(model, backend, probe(model, backend, modules))
    except BeaconScopeError:
        for added in hooks:
            added.remove()
        model.set_attn_implementation(current)
        raise
