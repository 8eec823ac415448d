"""Pre-RoPE queries: what a model's own projections give, before it rotates them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from beaconscope.attention.rotary import Rotary
from beaconscope.errors import BeaconScopeError
from beaconscope.kv import BeaconCache, CompressedCache
from beaconscope.kv.policies import Full, StreamingLLM
from beaconscope.models.tap import attention_modules, tap
from tests.kv.driving import make_rotary
from tests.kv.live import Watcher, feed, generate, tokens
from tests.reference.rotary import rotate, unrotate
from tests.tiny import ARCHITECTURES, tiny_model

LENGTH = 40


class TestArithmetic:
    @pytest.mark.parametrize("style", ["half", "interleaved"])
    @pytest.mark.parametrize("scaling", [1.0, 1.4])
    def test_it_rotates_as_the_reference_does(self, style, scaling):
        frequencies = [1.0, 0.3, 0.01]
        rotary = make_rotary(frequencies, 8, style, scaling)  # two dimensions pass through
        x = np.random.default_rng(0).normal(size=(3, 5, 8))
        positions = np.array([0, 1, 7, 100, 1000])
        rotated = rotary.rotate(torch.tensor(x, dtype=torch.float32), torch.from_numpy(positions))
        np.testing.assert_allclose(rotated.numpy(), rotate(x, positions, frequencies, style, scaling), atol=2e-4)
        back = rotary.unrotate(rotated, torch.from_numpy(positions))
        np.testing.assert_allclose(back, x, atol=1e-5)
        np.testing.assert_allclose(back, unrotate(rotated.numpy(), positions, frequencies, style, scaling), atol=2e-4)

    def test_a_layer_without_rotary_embedding_leaves_vectors_alone(self):
        x = torch.randn(4, 6)
        assert torch.equal(Rotary.none(6).rotate(x, torch.arange(4)), x)
        assert torch.equal(Rotary.none(6).unrotate(x, torch.arange(4)), x)

    def test_it_comes_back_from_plain_values(self):
        rotary = make_rotary([1.0, 1 / 3], 5, "interleaved", 1.1)
        again = Rotary.from_dict(rotary.to_dict())
        x = torch.randn(4, 5)
        assert torch.equal(rotary.rotate(x, torch.arange(4)), again.rotate(x, torch.arange(4)))
        assert again.to_dict() == rotary.to_dict()


def _tap_output(module, found):
    module.register_forward_hook(lambda _, __, output: found.append(output.detach().float()))


def true_queries(model, found):
    """Hook each layer so that ``found[layer]`` fills with its real pre-RoPE queries, and say how to shape them."""
    shapes = {}
    for layer, module in attention_modules(model).items():
        size, heads = module.head_dim if hasattr(module, "head_dim") else module.qk_head_dim, 4
        plain = lambda x, heads=heads, size=size: x[..., : heads * size].unflatten(-1, (heads, size)).transpose(1, 2)  # noqa: E731
        if hasattr(module, "q_norm"):
            _tap_output(module.q_norm, found.setdefault(layer, []))
            # [B, T, heads, D] or, in Gemma 3, [B, heads, T, D]
            shapes[layer] = lambda x, heads=heads: x if x.shape[1] == heads else x.transpose(1, 2)
        elif hasattr(module, "q_b_proj"):
            _tap_output(module.q_b_proj, found.setdefault(layer, []))
            shapes[layer] = lambda x, plain=plain, turned=module.qk_rope_head_dim: _sort_pairs(plain(x), turned)
        else:
            projection = module.q_proj if hasattr(module, "q_proj") else module.qkv_proj
            _tap_output(projection, found.setdefault(layer, []))
            shapes[layer] = plain
    return shapes


def _sort_pairs(x, turned):
    """DeepSeek puts the pairs of its last dimensions into halves before it rotates them."""
    fixed, pairs = x[..., :-turned], x[..., -turned:]
    return torch.cat([fixed, pairs[..., ::2], pairs[..., 1::2]], dim=-1)


def check_queries(model, tolerance=1e-4):
    found = {}
    shapes = true_queries(model, found)
    watcher = Watcher()
    cache = CompressedCache(model, Full(), watcher)
    for pieces in found.values():
        pieces.clear()  # those of the probe
    text = tokens(LENGTH, 3)
    for part in text.split([LENGTH - 5, 1, 1, 1, 2], dim=1):
        feed(model, part, cache)
    for info in tap(model).layers:
        assert info.rotary is not None, info.rotary_problem
        passes = found[info.layer][: len(watcher.queries[info.layer, 0])]
        true = torch.cat([shapes[info.layer](x) for x in passes], dim=2)
        post = torch.cat(watcher.queries[info.layer, 0], dim=2).flatten(0, 1)  # [Hq, T, D]
        ours = info.rotary.unrotate(post, torch.arange(LENGTH))
        scale = float(true.abs().max())
        torch.testing.assert_close(ours, true[0], atol=tolerance * scale, rtol=0)
        torch.testing.assert_close(
            info.rotary.rotate(true[0], torch.arange(LENGTH)), post, atol=tolerance * scale, rtol=0
        )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_queries_are_those_that_the_model_projected(arch):
    check_queries(tiny_model(arch))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_in_bfloat16_they_are_so_within_its_rounding(arch):
    check_queries(tiny_model(arch).to(torch.bfloat16), tolerance=2e-2)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            "long_factor": [2.0] * 8,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotary(rope):
    model = tiny_model("llama", rope_parameters={"rope_theta": 10_000.0, **rope})
    check_queries(model)
    limits = {info.rotary.limit for info in tap(model).layers}
    assert limits == {{"dynamic": 4096, "longrope": 1024}.get(rope["rope_type"])}


def test_partial_rotary():
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    model = tiny_model("phi3", rope_parameters=rope)
    check_queries(model)
    assert {int((info.rotary.frequency >= 0).sum()) for info in tap(model).layers} == {8}


def test_layers_of_two_frequencies_are_told_apart():
    layers = tap(tiny_model("gemma3_text")).layers
    assert [info.spec.window for info in layers] == [16, None, 16, None]
    for info in layers:
        theta = 1_000_000.0 if info.spec.window is None else 10_000.0
        expected = theta ** (-np.arange(0, 16, 2) / 16)
        np.testing.assert_allclose(info.rotary.inv_freq, expected, rtol=1e-5)


def test_layers_without_rotary_embedding():
    config = AutoConfig.for_model(
        "smollm3",
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        no_rope_layers=[1, 0, 1, 0],
        initializer_range=0.2,
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=258,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    check_queries(model)
    turning = [bool((info.rotary.frequency >= 0).any()) for info in tap(model).layers]
    assert turning == [True, False, True, False]


class CrookedAttention(LlamaAttention):
    """Rotates by other angles than those that it is handed."""

    def forward(self, hidden_states, position_embeddings=None, *args, **kwargs):
        cos, sin = position_embeddings
        return super().forward(hidden_states, (cos.roll(1, dims=-1), sin.roll(1, dims=-1)), *args, **kwargs)


class StraightAttention(LlamaAttention):
    """Somebody's own attention, in a file that has no rotary function."""


def with_attention(kind, layer=1, **overrides):
    model = tiny_model("llama", **overrides)
    attention = kind(model.config, layer).eval()
    attention.load_state_dict(model.model.layers[layer].self_attn.state_dict())
    model.model.layers[layer].self_attn = attention
    return model


class TestBroken:
    def test_a_rotary_embedding_that_cannot_be_undone_is_refused_with_the_remedy(self):
        model = with_attention(CrookedAttention)
        with pytest.raises(BeaconScopeError) as refused:
            BeaconCache(model)
        assert str(refused.value) == (
            "the rotary embedding of layer 1 (CrookedAttention) could not be undone, so its pre-RoPE queries are not "
            "known; give --query-space post-rope"
        )
        assert [info.rotary is None for info in tap(model).layers] == [False, True]

    def test_the_remedy_helps(self):
        model = with_attention(CrookedAttention)
        cache = BeaconCache(model, query_space="post-rope", budget=20, interval=5)
        generate(model, tokens(30), cache)
        assert cache.kept_positions(1).shape[1] >= 20

    def test_policies_that_need_no_query_do_not_mind(self):
        model = with_attention(CrookedAttention)
        generate(model, tokens(30), CompressedCache(model, StreamingLLM(budget=20)))

    @pytest.mark.parametrize("backend", ["sdpa", "eager"])
    def test_an_attention_class_of_somebodys_own_works(self, backend):
        model = with_attention(StraightAttention, attn_implementation=backend)
        check_queries(model)
        plain = tiny_model("llama", attn_implementation=backend)
        assert torch.equal(generate(model, tokens(30), BeaconCache(model)), generate(plain, tokens(30)))
