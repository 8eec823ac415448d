"""Tiny models with random weights."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SPREAD = 0.2
"""Standard deviation of the weights: with the usual 0.02 attention is nearly uniform and logits nearly tie."""


def tiny_model(config: PreTrainedConfig, attn_implementation: str | None = None, seed: int = 0) -> PreTrainedModel:
    """Make a float32 model on the CPU in evaluation mode; the same config and seed give the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
        for parameter in model.parameters():
            # Matrices anew, so that nothing depends on what an architecture calls its spread; vectors, of which many
            # have to be near one, are moved a little, so that none stays a plain one or zero.
            with torch.no_grad():
                if parameter.dim() > 1:
                    parameter.normal_(std=SPREAD)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=SPREAD / 4)
    return model.eval()
