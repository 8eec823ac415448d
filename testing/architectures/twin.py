"""What a model computes, taken from transformers alone: nothing of BeaconScope is imported here.

A twin has the weights of the model under test and runs whole sequences without a cache. Its attention is transformers'
own; asked for unit vectors in place of the values, it says what weight every entry has. Entries can be hidden from
later queries, as a compressed cache hides what it has dropped.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from testing.architectures.models import tiny_model

_PREFIX = "twin_"


@dataclass(frozen=True)
class Pass:
    """What one pass over T tokens gave."""

    logits: Tensor  # [T, V]
    weights: Mapping[int, Tensor]
    """By layer, [Hq, T, T]: what the output of attention takes of each value, learned sinks accounted for."""
    several: tuple[int, ...]
    """Layers that attend more than once in a pass, each time otherwise; not in ``weights``."""


class Twin:
    """The model of ``config``, run by transformers alone.

    Parameters
    ----------
    config
        Is copied.
    attn
        ``eager`` or ``sdpa``; None is what transformers takes by itself.
    """

    def __init__(self, config: PreTrainedConfig, attn: str | None = None) -> None:
        self.model = tiny_model(copy.deepcopy(config), attn)
        self.interface = bool(getattr(self.model, "_supports_attention_backend", False))
        """Whether attention goes through transformers' attention interface; only then can entries be hidden."""
        self._backend = str(self.model.config._attn_implementation)
        self._hidden: Mapping[int, Tensor] = {}
        self._padding = 0
        self._found: dict[int, list[Tensor]] = {}
        if self.interface:
            AttentionMaskInterface.register(_PREFIX + self._backend, ALL_MASK_ATTENTION_FUNCTIONS[self._backend])

    def run(
        self,
        tokens: list[int],
        hidden: Mapping[int, Tensor] | None = None,
        *,
        padding: int = 0,
        numbered: bool = True,
    ) -> Pass:
        """Run all tokens at once.

        Parameters
        ----------
        tokens
            Of one text.
        hidden
            By layer which entries a query does not see, bool [Hq, T, T].
        padding
            Columns of padding before them, as a shorter text in a batch has.
        numbered
            Give the model the positions, as ``generate`` does, where it takes them.
        """
        self._padding, self._found = padding, defaultdict(list)
        self._hidden = {layer: pad(each, (padding, 0, padding, 0)) for layer, each in (hidden or {}).items()}
        ids = torch.tensor([[self.model.config.get_text_config(decoder=True).pad_token_id or 0] * padding + tokens])
        options: dict[str, Any] = {}
        if numbered and "position_ids" in inspect.signature(self.model.forward).parameters:
            options["position_ids"] = (torch.arange(ids.shape[1])[None] - padding).clamp(min=0)
        if padding:
            options["attention_mask"] = (torch.arange(ids.shape[1])[None] >= padding).long()
        hooks = []
        if not self.interface:
            options["output_attentions"] = True
            modules = [each for each in self.model.modules() if _layer(each) is not None]
            hooks = [each.register_forward_hook(self._collect) for each in modules]
        else:
            # Anew for each pass: another twin may have registered its own function.
            AttentionInterface.register(_PREFIX + self._backend, self._attend)
            self.model.set_attn_implementation(_PREFIX + self._backend)
        try:
            with torch.inference_mode():
                output = self.model(ids, use_cache=False, **options)
        finally:
            for hook in hooks:
                hook.remove()
        found = {layer: each for layer, each in self._found.items() if each}
        return Pass(
            output.logits[0, padding:],
            {layer: each[0] for layer, each in found.items() if len(each) == 1},
            tuple(layer for layer, each in found.items() if len(each) > 1),
        )

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer = _layer(module)
        hidden = None if layer is None else self._hidden.get(layer)
        if hidden is not None:
            attention_mask = self._hide(module, hidden, query, attention_mask)
        attend = _eager(module) if self._backend == "eager" else ALL_ATTENTION_FUNCTIONS[self._backend]
        if layer is not None and query.shape[2] == key.shape[2]:
            self._note(layer, _weights(attend, module, query, key, value, attention_mask, **kwargs))
        return attend(module, query, key, value, attention_mask, **kwargs)

    def _hide(self, module: nn.Module, hidden: Tensor, query: Tensor, mask: Tensor | None) -> Tensor:
        """A mask [1, Hq, T, T] that hides more than ``mask`` does."""
        if mask is None and getattr(module, "is_causal", True):
            # What scaled_dot_product_attention does by itself.
            hidden = hidden | torch.ones_like(hidden).triu(1)
        if self._backend == "sdpa":
            return ~hidden[None] if mask is None else mask & ~hidden[None]
        lowest = torch.finfo(query.dtype).min
        extra = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, lowest)[None]
        # Not added: two lowest numbers together are infinite.
        return extra if mask is None else torch.minimum(mask, extra)

    def _collect(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Take the weights that an attention module hands out."""
        layer = _layer(module)
        for part in output if isinstance(output, tuple) else ():
            if layer is not None and isinstance(part, Tensor) and part.dim() == 4 and part.shape[2] == part.shape[3]:
                self._note(layer, part[0])

    def _note(self, layer: int, weights: Tensor) -> None:
        weights = weights[:, self._padding :, self._padding :]
        if not any(torch.equal(weights, other) for other in self._found[layer]):
            self._found[layer].append(weights)


def _weights(
    attend: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """Weights [Hq, T, T]: attention is linear in the values, and of unit vectors it makes its weights, sinks and all.

    The unit vectors are as short as the values, since some architectures scale by their size.
    """
    parts = []
    for part in torch.eye(key.shape[2], dtype=value.dtype).split(value.shape[3], dim=1):
        unit = torch.zeros_like(value)
        unit[..., : part.shape[1]] = part
        output = attend(module, query, key, unit, mask, **kwargs)[0]  # [1, T, Hq, D]
        parts.append(output[0, :, :, : part.shape[1]].transpose(0, 1))
    return torch.cat(parts, dim=-1)


def _layer(module: nn.Module) -> int | None:
    """The layer that a module says it is in."""
    layer = getattr(module, "layer_idx", None)
    return layer if isinstance(layer, int) else None


def generate(model: PreTrainedModel, prompt: list[int], count: int, **options: Any) -> list[int]:
    """Greedy tokens of ``model.generate``, which never end before ``count``."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]), do_sample=False, num_beams=1, max_new_tokens=count, eos_token_id=None, **options
        )
    return output[0, len(prompt) :].tolist()


def _eager(module: nn.Module) -> Any:
    """The eager attention of the file that a module is written in."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if found is not None:
            return found
    raise LookupError(f"no eager attention beside {type(module).__name__}")
