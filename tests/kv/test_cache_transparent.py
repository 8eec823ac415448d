"""A cache that evicts nothing changes nothing: what a model generates, and what it attends to."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from beaconscope.kv import BeaconCache, CompressedCache
from beaconscope.kv.policies import BeaconKV, Full
from tests.kv.live import Watcher, cache_argument, feed, generate, padded, tokens
from tests.tiny import ARCHITECTURES, PAD, tiny_model

LENGTHS = (30, 17, 30, 9)


@pytest.fixture(scope="module")
def prompts():
    return padded([tokens(length, seed) for seed, length in enumerate(LENGTHS)], PAD)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_cache_larger_than_the_sequence_generates_what_a_dynamic_one_does(arch, prompts):
    plain, model = tiny_model(arch), tiny_model(arch)
    alone = tokens(30, 7)
    assert torch.equal(generate(model, alone, BeaconCache(model, budget=512)), generate(plain, alone))
    ids, mask = prompts
    ours = generate(model, ids, BeaconCache(model, budget=512), attention_mask=mask)
    assert torch.equal(ours, generate(plain, ids, DynamicCache(config=plain.config), attention_mask=mask))


@pytest.mark.parametrize("shadow", [None, BeaconKV(budget=12, interval=4, beacons=3, recent=2)])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_full_cache_generates_what_plain_generate_does(arch, shadow, prompts):
    plain, model = tiny_model(arch), tiny_model(arch)
    ids, mask = prompts
    ours = generate(model, ids, CompressedCache(model, Full(shadow=shadow), Watcher()), attention_mask=mask)
    assert torch.equal(ours, generate(plain, ids, attention_mask=mask))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_tapped_model_without_our_cache_is_what_it_was(arch, prompts):
    plain, model = tiny_model(arch), tiny_model(arch)
    BeaconCache(model)
    ids, mask = prompts
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits)
    assert torch.equal(generate(model, ids, attention_mask=mask), generate(plain, ids, attention_mask=mask))


def _check_attention(make, prompts, steps=10):
    """Hold AttentionStep.attention against ``output_attentions`` of a plain eager model, fed the same tokens."""
    plain, model = make(attn_implementation="eager"), make()
    ids, mask = prompts
    watcher = Watcher(attention=True)
    cache, theirs = CompressedCache(model, Full(), watcher), DynamicCache(config=plain.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    following = tokens(steps, 5, rows=len(ids))
    expected = []
    for step in range(steps):
        given = {"attention_mask": mask, "position_ids": positions}
        feed(model, ids, cache, **given)
        with torch.no_grad():
            expected.append(plain(ids, output_attentions=True, **cache_argument(plain, theirs), **given).attentions)
        ids = following[:, step : step + 1]
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = positions[:, -1:] + 1
    for layer in range(len(expected[0])):
        for row, length in enumerate(prompts[1].sum(-1).tolist()):
            for step, weights in enumerate(watcher.attention[layer, row]):
                theirs_here = expected[step][layer][row]  # [Hq, T, columns]
                new = length if step == 0 else 1
                held = weights.shape[-1]
                ours = weights.flatten(0, 1)
                assert ours.shape[1] == new
                torch.testing.assert_close(ours, theirs_here[:, -new:, -held:], atol=1e-5, rtol=0)
                assert theirs_here[:, -new:, :-held].abs().sum() == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_attention_of_a_step_is_what_eager_attention_gives(arch, prompts):
    _check_attention(partial(tiny_model, arch), prompts)


def test_attention_with_a_soft_cap(prompts):
    def make(**options):
        config = AutoConfig.for_model(
            "gemma2",
            vocab_size=264,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=8,
            attn_logit_softcapping=2.0,
            initializer_range=0.2,
            pad_token_id=PAD,
        )
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()

    _check_attention(make, prompts)


def test_attention_of_a_part_of_the_tokens(prompts):
    model = tiny_model("gemma3_text")
    steps = []
    watcher = Watcher()
    watcher.attended = lambda layer, lane, step: steps.append(step)
    feed(model, tokens(40), CompressedCache(model, Full(), watcher))
    for step in steps:
        torch.testing.assert_close(step.attention(7, 19), step.attention()[:, :, :, 7:19])
