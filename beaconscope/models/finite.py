"""Find out why a model's numbers are not finite, once they are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from beaconscope.errors import no_memory
from beaconscope.models.hooks import attention_modules

_CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of weights that may hold numbers that are not finite; quantized ones are not looked at."""


def finite_logits(logits: Tensor) -> Tensor:
    """Which rows of logits [..., V] say something of the next token, bool [...].

    A logit of -inf is a token that cannot come (suppressed, or padding of the vocabulary). A row with nan or +inf, or
    with nothing but -inf, is not a distribution.
    """
    return logits.amax(dim=-1).isfinite()


def explain_not_finite(model: PreTrainedModel, ids: Sequence[int]) -> str:
    """Say which layer's output is the first that is not finite, and what to do about it.

    Feeds the text to the model once more, in one pass without a cache.

    Parameters
    ----------
    model
        The model, tapped or not.
    ids
        The tokens after which its logits were not finite.

    Returns
    -------
    str
        The end of an error message, without a full stop.
    """
    try:
        where = _first_not_finite(model, ids)
        found = (
            "one pass over the same text without a cache is finite throughout"
            if where is None
            else f"the first output that is not finite is that of {where}"
        )
    except (MemoryError, RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        # What stopped the model matters more than why this pass does not tell where.
        reason = "no memory is left" if no_memory(error) else (str(error).strip().splitlines() or ["it fails"])[0]
        found = f"the pass that would find the layer fails ({reason})"
    return f"{found}; {finite_remedy(model)}"


@torch.inference_mode()
def _first_not_finite(model: PreTrainedModel, ids: Sequence[int]) -> str | None:
    """The first part of a model whose output for a text is not finite; None where all of it is."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if not found and isinstance(hidden, Tensor) and not bool(hidden.isfinite().all()):
                found.append(name)

        return look

    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Module)
    hooks = [embeddings.register_forward_hook(watch("the embeddings"))]
    hooks += [module.register_forward_hook(watch(f"layer {n}")) for n, module in _decoder_layers(model).items()]
    try:
        output = model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    if not found and not bool(finite_logits(output.logits).all()):
        found.append("the language-model head")
    return found[0] if found else None


def _decoder_layers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The module of each decoder layer: the one that the layer's attention is a part of."""
    names = {module: name for name, module in model.named_modules()}
    return {
        layer: model.get_submodule(names[attention].rpartition(".")[0])
        for layer, attention in attention_modules(model).items()
    }


def finite_remedy(model: PreTrainedModel) -> str:
    """Return what to do, by the type of the weights and whether they are finite themselves."""
    dtype = str(model.dtype).removeprefix("torch.")
    half = model.dtype == torch.float16
    for name, weight in model.named_parameters():
        if weight.dtype not in _CHECKED or weight.is_meta or not weight.numel():
            continue
        low, high = (float(end) for end in weight.detach().aminmax())
        if low != low or high != high:
            return f"the weight {name} holds nan, so the checkpoint is damaged: load another"
        if max(-low, high) == float("inf"):
            cause = "does not fit in float16: give --dtype bfloat16"
            return f"the weight {name} {cause if half else 'is infinite, so the checkpoint is damaged: load another'}"
    if half:
        return "numbers over 65504 do not fit in float16: give --dtype bfloat16"
    return f"its weights are finite, so its numbers outgrow {dtype}: check the checkpoint and its config"
