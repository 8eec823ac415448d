"""Models with random weights and a tokenizer, made on the spot: what tests run on when they need no real model.

A token is a byte: ``tiny_tokenizer()`` gives byte ``b`` the id ``b``, so a test knows every length beforehand. Ids from
256 on are the special tokens of ``SPECIAL_TOKENS``. A model never ends by itself unless a test asks for it with
``eos_token_id=EOS``.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    "<pad>",
    "<bos>",
    "<eos>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<think>",
    "</think>",
)
PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, THINK_OPEN, THINK_CLOSE = range(256, 264)
VOCABULARY = 264

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# What every architecture shares: two layers, two query heads to each of two KV heads.
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    # Far above the usual 0.02, with which attention is nearly uniform and logits nearly tie.
    "initializer_range": 0.2,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,
}

_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    # A window, without layer types, that is as long as the context: every layer sees everything.
    "mistral": {"sliding_window": 4096},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
    },
    "glm4": {},
    "phi3": {"hidden_size": 64, "head_dim": None},
    "gpt_oss": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}

ARCHITECTURES = tuple(_OWN)


def tiny_model(
    arch: str = "llama", seed: int = 0, *, attn_implementation: str = "sdpa", **overrides: Any
) -> PreTrainedModel:
    """Make a float32 model of ``arch`` on the CPU, in evaluation mode; the same seed gives the same weights.

    ``overrides`` go to the model's config, for instance ``num_key_value_heads=1`` or ``eos_token_id=EOS``.
    """
    settings = {**_SHARED, **_OWN[arch], **overrides}
    # None means "as the architecture has it" only for head_dim; elsewhere it is a value of its own.
    if settings["head_dim"] is None:
        del settings["head_dim"]
    if arch == "gpt_oss" and attn_implementation == "sdpa":
        # Its attention sinks are no part of scaled_dot_product_attention.
        attn_implementation = "eager"
    config = AutoConfig.for_model(arch, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer with a chat template and think markers."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _byte_vocabulary() -> dict[str, int]:
    """Map the character that byte-level BPE writes for a byte to that byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {characters[byte]: byte for byte in range(256)}
