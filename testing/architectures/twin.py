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

_HIDING = "hiding_eager"


@dataclass(frozen=True)
class Pass:
    """What one pass over T tokens gave."""

    logits: Tensor  # [T, V]
    weights: Mapping[int, Tensor]  # by layer, [Hq, T, T]
    several: tuple[int, ...]
    """Layers whose attention was computed more than once, with different weights; not in ``weights``."""


class Twin:
    """The model of ``config``, run by transformers alone.

    Parameters
    ----------
    config
        The config of the model under test; a copy is used.
    hiding
        Whether entries can be hidden, which needs a model that uses transformers' attention interface.
    """

    def __init__(self, config: PreTrainedConfig, *, hiding: bool = False) -> None:
        self.model = tiny_model(copy.deepcopy(config), "eager")
        self._hidden: Mapping[int, Tensor] = {}
        if hiding:
            AttentionInterface.register(_HIDING, self._attend)
            AttentionMaskInterface.register(_HIDING, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
            self.model.set_attn_implementation(_HIDING)

    def run(self, tokens: list[int], hidden: Mapping[int, Tensor] | None = None) -> Pass:
        """Run all tokens at once; ``hidden`` says by layer which entries a query does not see, bool [Hq, T, T]."""
        self._hidden = hidden or {}
        found: dict[int, list[Tensor]] = defaultdict(list)

        def collect(module: nn.Module, inputs: Any, output: Any) -> None:
            for part in output if isinstance(output, tuple) else ():
                if isinstance(part, Tensor) and part.dim() == 4 and part.shape[2] == len(tokens) <= part.shape[3]:
                    # A learned sink may be a column of its own.
                    weights = part[0, :, :, : len(tokens)]
                    if not any(torch.equal(weights, other) for other in found[module.layer_idx]):
                        found[module.layer_idx].append(weights)

        hooks = [
            module.register_forward_hook(collect)
            for module in self.model.modules()
            if isinstance(getattr(module, "layer_idx", None), int) and "ttention" in type(module).__name__
        ]
        options = {"output_attentions": True} if "output_attentions" in _accepted(self.model) else {}
        try:
            with torch.inference_mode():
                output = self.model(torch.tensor([tokens]), use_cache=False, **options)
        finally:
            for hook in hooks:
                hook.remove()
        return Pass(
            output.logits[0],
            {layer: each[0] for layer, each in found.items() if len(each) == 1},
            tuple(layer for layer, each in found.items() if len(each) > 1),
        )

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens with the cache that transformers takes by itself."""
        return generate(self.model, prompt, count)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        hidden = self._hidden.get(module.layer_idx)
        if hidden is not None:
            lowest = torch.finfo(query.dtype).min
            extra = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, lowest)[None]
            # Not added: two lowest numbers together are infinite.
            attention_mask = extra if attention_mask is None else torch.minimum(attention_mask, extra)
        return _eager(module)(module, query, key, value, attention_mask, **kwargs)


def generate(model: PreTrainedModel, prompt: list[int], count: int, **options: Any) -> list[int]:
    """Greedy tokens of ``model.generate``, which never end before ``count``."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]), do_sample=False, num_beams=1, max_new_tokens=count, eos_token_id=None, **options
        )
    return output[0, len(prompt) :].tolist()


def _accepted(model: PreTrainedModel) -> list[str]:
    parameters = inspect.signature(model.forward).parameters
    return list(parameters) + (["output_attentions"] if "kwargs" in parameters else [])


def _eager(module: nn.Module) -> Any:
    """The eager attention of the file that a module is written in."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if found is not None:
            return found
    raise LookupError(f"no eager attention beside {type(module).__name__}")
