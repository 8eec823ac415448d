"""Tiny configurations of every causal architecture that transformers knows.

A config is made from the defaults of its class: fields whose names say a size get a small value, everything else stays
as the architecture has it. What the names do not say stands in ``OWN``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 264
LAYERS = 4
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD = 16
EXPERTS = 4

_FIELDS: Sequence[tuple[Any, str]] = (
    (
        VOCABULARY,
        """vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size unpadded_vocab_size
        encoder_hash_byte_group_vocab tgt_vocab_size src_vocab_size ngram_vocab_size_base decoder_vocab_size""",
    ),
    (
        LAYERS,
        """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers num_blocks depth""",
    ),
    (
        HIDDEN,
        """hidden_size n_embd d_model emb_dim embedding_dim embedding_size word_embed_proj_dim input_embedding_size
        output_embedding_size linear_hidden_size lru_width pronunciation_embed_dim shape_embed_dim""",
    ),
    (
        96,
        """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_inner dff dim_ff ffn_hidden_size
        intermediate_size_mlp dense_intermediate_size feed_forward_size n_inner""",
    ),
    (
        32,
        """moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size
        shared_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size router_hidden_size
        prompt_mid_dim hidden_size_per_layer_input ple_embed_dim""",
    ),
    (
        HEADS,
        """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
        decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads
        swa_num_attention_heads num_query_groups linear_num_heads index_n_heads mamba_n_heads mamba_num_heads
        linear_num_key_heads n_mamba_heads num_global_attention_heads""",
    ),
    (
        KV_HEADS,
        """num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads
        multi_query_group_num swa_num_kv_heads""",
    ),
    (
        HEAD,
        """head_dim kv_channels d_head dim_head attention_head_size qk_nope_head_dim swa_head_dim global_head_dim
        linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim mamba_headdim
        attention_head_dim v_head_dim swa_v_head_dim index_head_dim query_pre_attn_scalar d_rel kv_lora_rank
        mamba_d_state state_size ssm_state_size laurel_rank hc_lowrank o_lora_rank loop_gate_rank
        gated_norm_rank adapter_rank local_attention_window_len""",
    ),
    (8, "qk_rope_head_dim rotary_dim time_step_rank mamba_dt_rank"),
    (24, "q_lora_rank qk_head_dim"),
    (EXPERTS, """num_experts n_routed_experts num_local_experts moe_num_experts"""),
    (
        2,
        """num_experts_per_tok num_experts_per_token moe_topk moe_k n_group num_expert_group
        sliding_window_pattern _sliding_window_pattern global_attn_every_n_layers layer_group_size
        full_attention_interval no_rope_layer_interval interleave_moe_layer_step attn_layer_period
        zero_expert_num n_groups o_groups split_ngram_parts heads_per_ngram hc_count
        num_local_experts_per_tok""",
    ),
    (
        1,
        """topk_group n_shared_experts num_shared_experts moe_num_shared_experts attn_layer_offset first_k_dense_replace
        num_dense_layers moe_layer_start_index num_mem_blocks first_dense_layers""",
    ),
    (16, "chunk_size mamba_chunk_size block_size"),
    (
        4096,
        """max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length
        max_target_positions seq_length""",
    ),
    (0.2, "initializer_range init_std embed_init_std"),
)
SMALL: Mapping[str, Any] = {name: value for value, names in _FIELDS for name in names.split()}
"""The small value of each field that says a size."""

_ALTERNATING = ["sliding_attention", "full_attention"] * 2

LEAVE: Any = object()
"""In place of a value: leave the field as the architecture has it."""

_LATENT = {"num_key_value_heads": HEADS, "head_dim": 8}
"""Latent attention has as many KV heads as query heads."""

OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": KV_HEADS, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 32},
    },
    "deepseek_v4": {"num_key_value_heads": 1},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": None},
    "gemma3n_text": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": None, "layer_types": _ALTERNATING},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"] * 2},
    # Spread over the logits, which the default of one is not with large weights.
    **{name: {"attention_multiplier": 0.25} for name in ("granite", "granitemoe", "granitemoeshared")},
    "hrm_text": {"num_hidden_layers": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_block_size": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_shape": [64, 64], "axial_pos_embds_dim": [32, 32]},
    "xlstm": {"qk_head_dim": LEAVE, "v_head_dim": LEAVE},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_head_dim": 32,
        "attn_layer_offset": 1,
    },
    "zamba2": {"n_mamba_heads": 8, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields of single configs by ``model_type``, before the sizes above."""

_TEXT_PARTS = ("text_config", "decoder")
_TOKENS: Mapping[str, Any] = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": None}


def architectures() -> list[str]:
    """Model types of every causal architecture of the installed transformers."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(architecture: str, **overrides: Any) -> PreTrainedConfig:
    """Make a tiny config; ``overrides`` go to the part of it that describes the text decoder."""
    return _shrink(CONFIG_MAPPING[architecture], overrides)


def text_fields(architecture: str) -> dict[str, Any]:
    """Fields of the tiny config's text decoder, with their values."""
    return tiny_config(architecture).get_text_config(decoder=True).to_dict()


def _shrink(kind: type[PreTrainedConfig], overrides: Mapping[str, Any]) -> PreTrainedConfig:
    own = OWN.get(kind.model_type, {})
    fields = _defaults(kind)
    parts = {name: type(value) for name, value in fields.items() if isinstance(value, PreTrainedConfig)}
    nested = next((name for name in _TEXT_PARTS if name in parts), None)
    settings: dict[str, Any] = {name: value for name, value in SMALL.items() if name in fields}
    settings |= {name: _shrink(part, overrides if name == nested else {}) for name, part in parts.items()}
    settings |= _TOKENS | (_LATENT if "kv_lora_rank" in fields else {})
    if nested is None:
        settings |= overrides
    settings = {**settings, **own, **({} if nested else overrides)}
    return kind(**{name: value for name, value in settings.items() if value is not LEAVE})


def _defaults(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """What a config class takes, with the values of its default instance where there is one."""
    names = inspect.signature(kind.__init__).parameters
    fields: dict[str, Any] = {name: None for name in names}
    with suppress(Exception):
        fields |= vars(kind())
    return fields
