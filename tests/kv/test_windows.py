"""Layers whose window hides nothing are compressed, real sliding layers keep their window, and either is said."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from transformers import DynamicCache

from beaconscope.errors import BeaconScopeError
from beaconscope.kv import BeaconCache
from beaconscope.kv.cache import CompressedCache
from beaconscope.kv.policies import Full, StreamingLLM
from tests.kv.live import feed, generate, tokens
from tests.tiny import tiny_model

SMALL = {"budget": 20, "interval": 6, "recent": 4, "beacons": 4}
LONGROPE = {
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
        "factor": 32.0,
    },
}


def refused(match):
    return pytest.raises(BeaconScopeError, match=rf"\A[^\n]*{match}[^\n]*\Z")


@pytest.mark.parametrize(
    ("arch", "window"), [("mistral", 4096), ("mistral", 16000), ("phi3", 262144), ("phi3", 4096), ("llama", None)]
)
def test_a_window_as_long_as_the_context_is_full_attention(arch, window):
    options = {} if window is None else {"sliding_window": window}
    model, plain = (tiny_model(arch, **options) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = BeaconCache(model, **SMALL)
        assert [layer.layer for layer in cache.compressed_layers] == [0, 1]
        generate(model, tokens(60), cache, new_tokens=20)
        assert cache.kept_positions(0).shape[1] < 26
        large = BeaconCache(model, budget=512)
        assert torch.equal(generate(model, tokens(60), large), generate(plain, tokens(60)))


@pytest.mark.parametrize("arch", ["mistral", "phi3"])
def test_a_window_is_full_attention_up_to_max_length(arch):
    model = tiny_model(arch, sliding_window=100)
    with refused(r"every layer .* sliding window, the widest of 100 tokens, .* beacon .* max_length of at most 100"):
        BeaconCache(model, **SMALL)
    with refused("every layer"):
        BeaconCache(model, max_length=101, **SMALL)
    cache = BeaconCache(model, max_length=100, **SMALL)
    feed(model, tokens(60), cache)
    assert cache.kept_positions(0).shape[1] == 20
    for step in range(40):
        feed(model, tokens(1, step), cache)
    with refused(r"longer than max_length \(100\) said, and layer 0, which has a sliding window of 100"):
        feed(model, tokens(1), cache)


def test_a_prompt_longer_than_max_length_is_refused():
    model = tiny_model("mistral", sliding_window=50)
    with refused(r"longer than max_length \(50\) said"):
        feed(model, tokens(51), BeaconCache(model, max_length=50, **SMALL))


@pytest.mark.parametrize("policy", [StreamingLLM(budget=20), Full()])
def test_a_cache_that_evicts_nothing_takes_a_model_of_sliding_layers(policy):
    plain, model = (tiny_model("mistral", sliding_window=16) for _ in range(2))
    if policy.evicts:
        with refused("nothing for streaming-llm to compress"):
            CompressedCache(model, policy)
        return
    cache = CompressedCache(model, policy)
    assert cache.sliding_layers == [0, 1]
    expected = generate(plain, tokens(30), DynamicCache(config=plain.config), new_tokens=30)
    assert torch.equal(generate(model, tokens(30), cache, new_tokens=30), expected)


def test_real_sliding_layers_are_said_when_the_cache_is_made():
    model = tiny_model("gemma3_text")
    said = r"2 of 4 layers have a sliding window \(16 tokens\) and keep just that; the other 2 are compressed"
    with pytest.warns(UserWarning, match=said):
        cache = BeaconCache(model, **SMALL)
    assert cache.sliding_layers == [0, 2]


def test_layers_that_have_a_window_in_name_only():
    """EXAONE 4 sets the attribute on the layers that see everything, too."""
    from tests.models.test_probe import ALTERNATING, made

    model = made("exaone4", sliding_window=16, layer_types=ALTERNATING, max_position_embeddings=4096)
    with pytest.warns(UserWarning, match="2 of 4 layers"):
        cache = BeaconCache(model, **SMALL)
    assert cache.sliding_layers == [0, 2]


def test_chunks_are_refused_where_a_text_may_be_longer():
    from tests.models.test_probe import made

    model = made("llama4_text", attention_chunk_size=64, intermediate_size_mlp=64, num_local_experts=2)
    with refused("layer 0 of Llama4ForCausalLM attends in chunks of 64 tokens.*max_length of at most 64"):
        BeaconCache(model, **SMALL)
    cache = BeaconCache(model, max_length=64, **SMALL)
    feed(model, tokens(40), cache)
    assert [layer.layer for layer in cache.compressed_layers] == [0, 1, 2, 3]


class TestRotarySwitch:
    """Phi-3's longrope: past its original length ``generate`` drops the cache and starts again."""

    @pytest.fixture
    def model(self):
        return tiny_model("phi3", **LONGROPE)

    def test_a_max_length_past_it_is_refused(self, model):
        with refused("past 128 tokens Phi3ForCausalLM changes its rotary frequencies.*max_length of at most 128"):
            BeaconCache(model, max_length=129, **SMALL)

    def test_within_it_tokens_are_those_of_generate(self, model):
        plain = tiny_model("phi3", **LONGROPE)
        cache = BeaconCache(model, budget=512)
        assert torch.equal(
            generate(model, tokens(100), cache, new_tokens=28), generate(plain, tokens(100), new_tokens=28)
        )

    @pytest.mark.parametrize("policy", [BeaconCache, Full, StreamingLLM])
    @pytest.mark.parametrize("prompt", [100, 128, 129, 200])
    def test_a_generation_that_crosses_it_is_refused(self, model, prompt, policy):
        cache = BeaconCache(model, **SMALL) if policy is BeaconCache else CompressedCache(model, policy())
        with refused("past 128 tokens this model changes its rotary frequencies.*within 128"):
            generate(model, tokens(prompt), cache, new_tokens=60)

    def test_a_generation_without_the_cache_is_left_alone(self, model):
        plain = tiny_model("phi3", **LONGROPE)
        cache = BeaconCache(model, **SMALL)
        expected = generate(plain, tokens(100), new_tokens=60)
        assert torch.equal(generate(model, tokens(100), None, new_tokens=60), expected)
        generate(model, tokens(100), cache, new_tokens=10)
        assert torch.equal(generate(model, tokens(100), None, new_tokens=60), expected)

    def test_a_pass_that_crosses_it_is_refused(self, model):
        cache = BeaconCache(model, **SMALL)
        feed(model, tokens(128), cache)
        with refused("past 128 tokens"):
            feed(model, tokens(1), cache)


def test_a_static_cache_of_the_generation_config_is_refused():
    model = tiny_model("llama")
    model.generation_config.cache_implementation = "static"
    with refused("generation_config asks for a cache of its own .static.*cache_implementation = None"):
        BeaconCache(model, **SMALL)


@pytest.mark.parametrize("save", [pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())])
def test_a_cache_cannot_be_pickled(save):
    model = tiny_model("llama")
    cache = BeaconCache(model, **SMALL)
    with refused("belongs to a model of its process and cannot be pickled"):
        save(cache)
    feed(model, tokens(30), copy.deepcopy(cache))
