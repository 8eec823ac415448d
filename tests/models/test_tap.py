"""What can be tapped, what a tap reads off, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from beaconscope.errors import BeaconScopeError
from beaconscope.kv import BeaconCache
from beaconscope.models.tap import tap
from tests.kv.live import generate, tokens
from tests.tiny import ARCHITECTURES, tiny_model

COMMON = {
    "vocab_size": 264,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def refused(match):
    return pytest.raises(BeaconScopeError, match=rf"\A[^\n]*{match}[^\n]*\Z")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_shape_of_each_layer(arch):
    config = tiny_model(arch).config
    tapped = tap(tiny_model(arch))
    assert [info.layer for info in tapped.layers] == list(range(config.num_hidden_layers))
    latent = arch == "deepseek_v3"
    for info in tapped.layers:
        assert (info.kv_heads, info.group_size) == ((4, 1) if latent else (2, 2))
        assert info.key_size == 16
        assert info.value_size == (12 if latent else 16)
        assert info.softcap is None
        assert (info.sink_logit is not None) == (arch == "gpt_oss")
        if arch == "gpt_oss":
            assert info.sink_logit.shape == (2, 2)
        assert info.scaling == pytest.approx(16**-0.5)
    windows = [info.window for info in tapped.layers]
    sliding = {"gemma3_text": [16, None, 16, None], "gpt_oss": [16, None], "mistral": [4096, 4096]}
    assert windows == sliding.get(arch, [None, None])


def test_tapping_twice_hooks_once():
    model = tiny_model("llama")
    tap(model)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    tap(model)
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_both_backends(backend):
    plain, model = (tiny_model("qwen3", attn_implementation=backend) for _ in range(2))
    tapped = tap(model)
    assert tapped.backend == backend
    assert model.config._attn_implementation == f"beaconscope_{backend}"
    assert torch.equal(generate(model, tokens(30), BeaconCache(tapped)), generate(plain, tokens(30)))


def test_a_backend_that_was_changed_since_is_tapped_anew():
    model = tiny_model("llama", attn_implementation="eager")
    tap(model)
    model.set_attn_implementation("sdpa")
    assert tap(model).backend == "sdpa"
    assert torch.equal(generate(model, tokens(30), BeaconCache(model)), generate(tiny_model("llama"), tokens(30)))


def test_training_mode_and_gradients_are_left_alone():
    model = tiny_model("llama").train()
    tap(model)
    assert model.training
    model(tokens(5), labels=tokens(5)).loss.backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("mamba", {"state_size": 4}, "MambaForCausalLM has no softmax attention in layer 0"),
        (
            "qwen3_next",
            {
                "intermediate_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "layer_types": ["linear_attention", "full_attention"],
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
            },
            "Qwen3NextForCausalLM has no softmax attention in layer 0",
        ),
        ("bloom", {"n_layer": 2, "n_head": 4}, "BloomForCausalLM does not route its attention"),
    ],
)
def test_models_that_cannot_work_are_refused_by_name(kind, options, reason):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON, **options)).eval()
    with refused(reason):
        tap(model)


def test_a_refused_model_is_left_as_it_was():
    model = tiny_model("llama")
    forward = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *_, **__: 1 + "1"
    with refused("LlamaForCausalLM cannot be tapped: it fails with a cache of keys and values"):
        tap(model)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())
    model.model.layers[1].self_attn.forward = forward
    assert torch.equal(generate(model, tokens(30), BeaconCache(model)), generate(tiny_model("llama"), tokens(30)))


def test_a_model_that_goes_round_the_attention_interface_is_refused_by_name():
    model = tiny_model("llama")
    model._supports_attention_backend = False
    with refused("LlamaForCausalLM does not route its attention through transformers' attention interface"):
        tap(model)


def test_a_backend_that_is_not_known_is_refused():
    model = tiny_model("llama")
    model.set_attn_implementation("flex_attention")
    with refused("LlamaForCausalLM runs the attention backend 'flex_attention'.*--attn sdpa"):
        tap(model)


def test_an_encoder_and_decoder_are_refused():
    config = AutoConfig.for_model(
        "bart",
        vocab_size=264,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    )
    with refused("BartModel "):
        tap(AutoModel.from_config(config).eval())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {}),
        ("gpt_bigcode", {}),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "num_attention_heads": 4}),
    ],
)
def test_learned_positions_are_no_rotary_embedding(kind, options):
    config = AutoConfig.for_model(kind, **COMMON, **({"num_attention_heads": 4} | options))
    model = AutoModelForCausalLM.from_config(config).eval()
    for info in tap(model).layers:
        assert info.rotary_problem is None
        assert (info.rotary.frequency == -1).all()
    cache = BeaconCache(model, budget=20, interval=4, recent=4, beacons=4)
    generate(model, tokens(30), cache)
    assert cache.kept_positions(1).shape[1] >= 20


def test_two_models_that_share_a_config():
    one = tiny_model("llama")
    tap(one)
    other = type(one)(one.config).eval()
    tap(other)
    for model in (one, other):
        cache = BeaconCache(model, budget=20, interval=4, recent=4, beacons=4)
        generate(model, tokens(30), cache)
        assert cache.kept_positions(1).shape[1] >= 20
