"""The policies that kvpress has too keep what kvpress keeps of a prompt, where the rules are the same.

``make test-peers`` runs this in an environment of its own, since kvpress needs an old transformers. Where ours differs,
and why, is in ``docs/method.md``.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from beaconscope.kv.cache import CompressedCache
from beaconscope.kv.policies import TOVA, ExpectedAttention, KeyDiff, Knorm, SnapKV, StreamingLLM
from beaconscope.models import cache_argument, tap
from tests.tiny import tiny_model

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed: make test-peers")

TOKENS, BUDGET = 96, 48

# Ours, and the peer's with the same parameters. A compression of theirs keeps int(96 * 0.5) entries.
PAIRS = {
    "streaming-llm": (StreamingLLM(budget=BUDGET), lambda: kvpress.StreamingLLMPress(0.5, n_sink=4)),
    "snapkv": (
        SnapKV(budget=BUDGET, interval=1, window=16),
        lambda: kvpress.SnapKVPress(0.5, window_size=16, kernel_size=5),
    ),
    # The peer never drops the newest entry.
    "tova": (TOVA(budget=BUDGET, recent=1), lambda: kvpress.TOVAPress(0.5)),
    "keydiff": (KeyDiff(budget=BUDGET, interval=1), lambda: kvpress.KeyDiffPress(0.5)),
    "knorm": (Knorm(budget=BUDGET, interval=1), lambda: kvpress.KnormPress(0.5)),
    "expected-attention": (ExpectedAttention(budget=BUDGET, interval=1), lambda: kvpress.ExpectedAttentionPress(0.5)),
    "expected-attention:mean": (
        ExpectedAttention(budget=BUDGET, interval=1, covariance=False, values=False, future=64),
        lambda: kvpress.ExpectedAttentionPress(0.5, n_future_positions=64, use_covariance=False, use_vnorm=False),
    ),
}


def prompt(seed: int) -> torch.Tensor:
    # Every token once: the keys of a token in the first layer differ in their rotation only, so that their norms tie.
    return torch.randperm(256, generator=torch.Generator().manual_seed(seed))[None, :TOKENS]


def theirs(model, ids, press) -> list[list[list[int]]]:
    """Positions that a press keeps, by layer and head: those whose keys are in the full cache at that position."""
    caches = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=caches[0])
        with press(model):
            model(ids, past_key_values=caches[1])
    found = []
    for whole, kept in zip(caches[0].layers, caches[1].layers, strict=True):
        same = (kept.keys[0][:, :, None] == whole.keys[0][:, None]).all(dim=-1)  # [H, K, N]
        assert (same.sum(dim=-1) == 1).all()
        # It leaves them in the order of their scores.
        found.append(same.int().argmax(dim=-1).sort(dim=-1).values.tolist())
    return found


def ours(model, ids, policy) -> list[list[list[int]]]:
    cache = CompressedCache(tap(model), policy)
    with torch.no_grad():
        model(ids, use_cache=True, **{cache_argument(model): cache})
    return [cache.kept_positions(layer).tolist() for layer in range(model.config.num_hidden_layers)]


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_prompt_is_cut_as_the_peer_cuts_it(name, arch, group):
    if (name, arch) == ("knorm", "qwen3"):
        pytest.skip("the keys of this Qwen3, whose norm has not learned anything, all have one length")
    policy, press = PAIRS[name]
    for seed in range(3):
        ids = prompt(seed)
        models = [tiny_model(arch, num_key_value_heads=4 // group) for _ in range(2)]
        assert ours(models[0], ids, policy) == theirs(models[1], ids, press())
