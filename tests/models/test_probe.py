"""What is read off a layer is what its attention does; a model for which it is not is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from beaconscope.errors import BeaconScopeError
from beaconscope.models import tap
from tests.tiny import VOCABULARY, tiny_model

ALTERNATING = ["sliding_attention", "full_attention"] * 2


def refused(match):
    return pytest.raises(BeaconScopeError, match=rf"\A[^\n]*{match}[^\n]*\Z")


def made(kind, **options):
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **options,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{name: value for name, value in settings.items() if value != "leave out"})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # Every layer of a config with a window and without layer types has that window.
        (lambda: tiny_model("mistral", sliding_window=16), [16] * 2),
        (lambda: tiny_model("mistral", sliding_window=4096), [4096] * 2),
        (lambda: made("starcoder2", sliding_window=1000), [1000] * 4),
        (lambda: made("mixtral", sliding_window=30, num_local_experts=2), [30] * 4),
        # Its attention modules have no attribute that says so,
        (lambda: tiny_model("phi3", sliding_window=16), [16] * 2),
        (lambda: tiny_model("phi3", sliding_window=262144), [262144] * 2),
        # and these have one in the layers that see everything, too.
        (lambda: made("exaone4", sliding_window=16, layer_types=ALTERNATING), [16, None] * 2),
        (lambda: made("cohere2", sliding_window=500, layer_types=ALTERNATING), [500, None] * 2),
        (lambda: tiny_model("gpt_oss", sliding_window=128), [128, None]),
        (lambda: tiny_model("gemma3_text", sliding_window=21), [21, None] * 2),
        (lambda: tiny_model("llama"), [None] * 2),
    ],
)
def test_the_window_is_that_of_the_mask(model, expected):
    model = model()
    before = model.config.to_dict()
    assert [info.window for info in tap(model).layers] == expected
    after = model.config.to_dict()
    assert {name: after[name] for name in before if name != "_attn_implementation"} == before


def test_chunks_are_told_from_windows():
    layers = tap(made("llama4_text", attention_chunk_size=8192, intermediate_size_mlp=64, num_local_experts=2)).layers
    assert [info.chunk for info in layers] == [8192, 8192, 8192, None]
    assert [info.window for info in layers] == [None] * 4
    assert layers[0].is_bounded(8193)
    assert layers[0].is_bounded(None)
    assert not layers[0].is_bounded(8192)
    assert not layers[3].is_bounded(None)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            lambda: made("bert", num_key_value_heads="leave out", head_dim="leave out", is_decoder=False),
            r"layer 0 of BertLMHeadModel lets a token see later ones \(bidirectional attention\)",
        ),
        (
            lambda: made("jetmoe", kv_channels=16, num_local_experts=4, num_experts_per_tok=2),
            "layer 0 of JetMoeForCausalLM stores keys of 2 heads and attends with 4",
        ),
        (lambda: made("diffllama"), "DiffLlamaForCausalLM cannot be tapped: layer 0 attends twice in one pass"),
        (
            lambda: made(
                "gemma3n_text",
                num_kv_shared_layers=2,
                layer_types=ALTERNATING,
                sliding_window=16,
                vocab_size_per_layer_input=VOCABULARY,
                hidden_size_per_layer_input=8,
                laurel_rank=8,
                intermediate_size=[64] * 4,
                activation_sparsity_pattern=[0.0] * 4,
            ),
            "layer 2 of Gemma3nForCausalLM stores no keys and values of its own",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(model, reason):
    with refused(reason):
        tap(model())


def make_strange(module, change):
    """Make an attention module one of an architecture that nobody has seen, whose own function is the one below."""
    module.__class__ = type("StrangeAttention", (type(module),), {"__module__": __name__})
    module.change = change


def eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    """Softmax attention, changed in a way that its arguments do not tell."""
    if module.change == "scale":
        scaling = 1.1 * scaling
    if module.change == "mask":
        attention_mask = attention_mask.clone()
        attention_mask[..., 20:, :4] = torch.finfo(torch.float32).min
    key, value = (part.repeat_interleave(2, dim=1) for part in (key, value))
    weights = (query @ key.transpose(2, 3) * scaling + attention_mask).softmax(dim=-1)
    output = (weights @ value).transpose(1, 2)
    return (2 * output if module.change == "output" else output), weights


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("nothing", None),
        ("scale", "layer 1 of LlamaForCausalLM does not attend as its queries, keys and mask say"),
        ("mask", "layer 1 of LlamaForCausalLM does not attend as its queries, keys and mask say"),
        ("output", "layer 1 of LlamaForCausalLM does not give the output of softmax attention"),
    ],
)
def test_attention_that_disagrees_with_its_facts_is_refused(change, reason):
    model = tiny_model("llama", attn_implementation="eager")
    make_strange(model.model.layers[1].self_attn, change)
    if reason is None:
        assert len(tap(model).layers) == 2
    else:
        with refused(reason):
            tap(model)


def test_numbers_that_are_not_finite_are_refused():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with refused(
        "the attention of layer 1 of LlamaForCausalLM computes numbers that are not finite in float32; "
        "the weight .*layers.1.self_attn.k_proj.weight holds nan"
    ):
        tap(model)


def test_float16_that_overflows_is_refused_with_the_remedy():
    model = tiny_model("llama").to(torch.float16)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(60000)
    with refused("the attention of layer 1 of LlamaForCausalLM .* in float16; .*--dtype bfloat16"):
        tap(model)


def test_logits_that_are_not_finite_are_refused():
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with refused("the language-model head of LlamaForCausalLM computes numbers that are not finite in float32"):
        tap(model)


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3", "glm4"])
def test_in_bfloat16_the_same_is_read_off(arch):
    plain, half = tap(tiny_model(arch)).layers, tap(tiny_model(arch).to(torch.bfloat16)).layers
    assert [(info.window, info.scaling) for info in half] == [(info.window, info.scaling) for info in plain]
    assert all(info.rotary is not None for info in half)
