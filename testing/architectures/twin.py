"""What a model computes, taken from transformers alone: nothing of BeaconScope is imported here.

A twin has the weights of the model under test and runs eager attention over whole sequences without a cache. The
attention modules hand out their weights, which hooks collect. Entries can be hidden from later queries, as a compressed
cache hides what it has dropped.
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
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from testing.architectures.models import tiny_model

_OURS = "twin_eager"


@dataclass(frozen=True)
class Pass:
    """What one pass over T tokens gave."""

    logits: Tensor  # [T, V]
    weights: Mapping[int, Tensor]
    """By layer, [Hq, T, T]: what the output of attention takes of each value, learned sinks accounted for."""
    several: tuple[int, ...]
    """Layers that attend more than once in a pass, each time otherwise; not in ``weights``."""


class Twin:
    """The model of ``config``, run by transformers alone; the config is copied."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.model = tiny_model(copy.deepcopy(config), "eager")
        self.interface = bool(getattr(self.model, "_supports_attention_backend", False))
        """Whether attention goes through transformers' attention interface; only then can entries be hidden."""
        self._hidden: Mapping[int, Tensor] = {}
        self._found: dict[int, list[Tensor]] = {}
        if self.interface:
            AttentionInterface.register(_OURS, self._attend)
            AttentionMaskInterface.register(_OURS, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
            self.model.set_attn_implementation(_OURS)

    def run(self, tokens: list[int], hidden: Mapping[int, Tensor] | None = None, *, numbered: bool = True) -> Pass:
        """Run all tokens at once.

        Parameters
        ----------
        tokens
            Of one text.
        hidden
            By layer which entries a query does not see, bool [Hq, T, T].
        numbered
            Give the model the positions, as ``generate`` does, where it takes them.
        """
        self._hidden, self._found = hidden or {}, defaultdict(list)
        accepted = inspect.signature(self.model.forward).parameters
        options: dict[str, Any] = {}
        if numbered and "position_ids" in accepted:
            options["position_ids"] = torch.arange(len(tokens))[None]
        hooks = []
        if not self.interface:
            options["output_attentions"] = True
            hooks = [
                each.register_forward_hook(self._collect) for each in self.model.modules() if _layer(each) is not None
            ]
        try:
            with torch.inference_mode():
                output = self.model(torch.tensor([tokens]), use_cache=False, **options)
        finally:
            for hook in hooks:
                hook.remove()
        found = {layer: each for layer, each in self._found.items() if each}
        return Pass(
            output.logits[0],
            {layer: each[0] for layer, each in found.items() if len(each) == 1},
            tuple(layer for layer, each in found.items() if len(each) > 1),
        )

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer = _layer(module)
        hidden = None if layer is None else self._hidden.get(layer)
        if hidden is not None:
            lowest = torch.finfo(query.dtype).min
            extra = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, lowest)[None]
            # Not added: two lowest numbers together are infinite.
            attention_mask = extra if attention_mask is None else torch.minimum(attention_mask, extra)
        attend = _eager(module)
        if layer is not None and query.shape[2] == key.shape[2]:
            # Attention is linear in the values: what it makes of unit vectors are its weights, sinks and all.
            unit = torch.eye(key.shape[2], dtype=value.dtype).expand(*value.shape[:2], -1, -1)
            self._note(layer, attend(module, query, key, unit, attention_mask, **kwargs)[0][0].transpose(0, 1))
        return attend(module, query, key, value, attention_mask, **kwargs)

    def _collect(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Take the weights that an attention module hands out."""
        layer = _layer(module)
        for part in output if isinstance(output, tuple) else ():
            if layer is not None and isinstance(part, Tensor) and part.dim() == 4 and part.shape[2] == part.shape[3]:
                self._note(layer, part[0])

    def _note(self, layer: int, weights: Tensor) -> None:
        if not any(torch.equal(weights, other) for other in self._found[layer]):
            self._found[layer].append(weights)


def _layer(module: nn.Module) -> int | None:
    """The layer that an attention module says it is in."""
    layer = getattr(module, "layer_idx", None)
    return layer if isinstance(layer, int) and "ttention" in type(module).__name__ else None


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
