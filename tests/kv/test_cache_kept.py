"""What a live cache keeps, against the reference fed with the queries and keys that the model really had."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from beaconscope.kv import BeaconCache, CompressedCache
from beaconscope.kv.policies import BeaconKV, RandomEviction, StreamingLLM
from tests.kv.driving import IllConditioned, Run, check_run, settings_of
from tests.kv.live import Watcher, feed, generate, padded, tokens
from tests.reference import beacon_kv as reference
from tests.reference.policies import check_random_eviction, streaming_llm
from tests.tiny import PAD, tiny_model

SMALL = {"budget": 20, "interval": 6, "beacons": 4, "recent": 3, "pool_low": 6, "pool_high": 11}
NEW = 26


def trackers(cache, layer):
    return [lane.state.tracker for lane in cache.lanes_of(layer)]


def run_of(cache, watcher, layer, row=0):
    """What the cache did to one sequence that is alone in its lane, in the terms of the reference."""
    (tracker,) = trackers(cache, layer)
    compressions = watcher.compressions[layer, row]
    return Run(
        positions=[position for position, _ in compressions],
        kept=[kept[None] for _, kept in compressions],
        changes=tracker.changes,
        assignment=torch.cat([a.beacon for a in tracker.assignments], dim=-1).numpy(),
        similarity=torch.cat([a.similarity for a in tracker.assignments], dim=-1).numpy(),
    )


def check_live(model, layers, inv_freq, style="half", scaling=1.0, *, prompt=30, seeds=range(4), **options):
    """Generate and compare every compression of ``layers``, on the first prompt that rounding does not decide."""
    policy = BeaconKV(**{**SMALL, **options})
    for seed in seeds:
        watcher = Watcher()
        cache = CompressedCache(model, policy, watcher)
        generate(model, tokens(prompt, seed), cache, new_tokens=NEW)
        cache.flush()
        try:
            for layer in layers:
                assert len(watcher.compressions[layer, 0]) >= 3
                query, key = watcher.query(layer)[None], watcher.key(layer)[None]
                size = query.shape[-1]
                # The reference divides by the root of the size; a model may scale otherwise.
                query = query * (cache._info[layer].spec.scaling * size**0.5)
                check_run(run_of(cache, watcher, layer), policy, query, key, prompt, inv_freq, style, scaling)
                assert cache.kept_positions(layer).shape[1] < 26
            return
        except IllConditioned:
            continue
    pytest.fail("every prompt is decided by rounding")


def default_frequencies(size, theta=10_000.0):
    return theta ** (-np.arange(0, size, 2) / size)


@pytest.mark.parametrize(("kv_heads", "group"), [(4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("selector", ["fps", "kmeans", "random", "none"])
def test_llama_keeps_what_the_reference_keeps(kv_heads, group, selector):
    model = tiny_model("llama", num_key_value_heads=kv_heads)
    check_live(model, [1], default_frequencies(16), selector=selector)


@pytest.mark.parametrize(
    "options",
    [
        {"query_space": "post-rope"},
        {"beacon_rotation": "own"},
        {"query_pooling": "mean"},
        {"group_pooling": "mean"},
        {"sinks": 4},
        {"beacons": 0},
        {"recent": 0},
        {"interval": 1},
        {"pool_low": None, "pool_high": None},
        {"selector": "random", "beacon_rotation": "own", "seed": 3},
    ],
    ids=lambda options: ",".join(options),
)
def test_llama_keeps_what_the_reference_keeps_with(options):
    check_live(tiny_model("llama"), [0, 1], default_frequencies(16), **options)


@pytest.mark.parametrize(
    ("arch", "layers", "inv_freq", "style"),
    [
        ("qwen2", [1], default_frequencies(16), "half"),
        ("qwen3", [1], default_frequencies(16), "half"),
        ("mistral", [1], default_frequencies(16), "half"),
        # Its full layers turn slower than its sliding ones.
        ("gemma3_text", [1, 3], default_frequencies(16, 1_000_000.0), "half"),
        # Half of the head turns, pair by pair.
        ("glm4", [0, 1], default_frequencies(8), "interleaved"),
        ("phi3", [1], default_frequencies(16), "half"),
    ],
)
def test_other_models_keep_what_the_reference_keeps(arch, layers, inv_freq, style):
    check_live(tiny_model(arch), layers, inv_freq, style)


def yarn_frequencies(size, theta, factor, original, beta_fast=32.0, beta_slow=1.0, truncate=True):
    """The frequencies of YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2)."""

    def dimension(turns):
        return size * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    ramp = np.clip((np.arange(size // 2) - max(low, 0)) / (min(high, size - 1) - max(low, 0)), 0, 1)
    plain = default_frequencies(size, theta)
    return plain / factor * ramp + plain * (1 - ramp)


def test_gpt_oss_keeps_what_the_reference_keeps():
    model = tiny_model("gpt_oss")
    rope = model.config.rope_parameters
    inv_freq = yarn_frequencies(
        16,
        rope["rope_theta"],
        rope["factor"],
        rope["original_max_position_embeddings"],
        rope["beta_fast"],
        rope["beta_slow"],
        rope["truncate"],
    )
    check_live(model, [1], inv_freq, scaling=0.1 * np.log(rope["factor"]) + 1)


def test_heads_that_share_an_entry_keep_the_same():
    """Latent attention stores one entry for all heads, which score it together."""
    model = tiny_model("deepseek_v3")
    policy = BeaconKV(**SMALL, query_space="post-rope")
    watcher = Watcher()
    cache = CompressedCache(model, policy, watcher)
    generate(model, tokens(30), cache, new_tokens=NEW)
    cache.flush()
    if cache.layers[1].keys.shape[1] > 1:
        pytest.skip("this transformers stores the entries of each head")
    settings = settings_of(policy)
    (tracker,) = trackers(cache, 1)
    query, key = watcher.query(1), watcher.key(1)
    query = query * (cache._info[1].spec.scaling * query.shape[-1] ** 0.5)
    cached = []
    assert len(watcher.compressions[1, 0]) >= 3
    for position, kept in watcher.compressions[1, 0]:
        change = next(c for c in tracker.changes[::-1] if c.position == position)
        cached += range(cached[-1] + 1 if cached else 0, position + 1)
        scores = []
        for head in range(4):
            beacons = [
                reference.Beacon(int(s), query[head, s, 0].astype(float)) for s in change.beacons.source[0, head, 0]
            ]
            recent = query[head, position + 1 - settings.recent : position + 1, 0]
            seen = [reference.observe(recent, beacons, position, settings, [1.0])]
            scores.append(reference.score(seen, key[head][cached].astype(float), settings))
        wanted = reference.keep(cached, np.max(scores, axis=0), settings)
        assert kept.tolist() == [wanted.tolist()]
        cached = wanted.tolist()


def test_in_bfloat16_kept_sets_are_the_references():
    """Without rotation, which bfloat16 rounds, everything after the model is float32."""
    model = tiny_model("llama").to(torch.bfloat16)
    check_live(model, [0, 1], default_frequencies(16), query_space="post-rope")


def test_the_cache_holds_what_the_last_compression_kept_and_what_came_since():
    model = tiny_model("llama")
    watcher = Watcher()
    cache = CompressedCache(model, BeaconKV(**SMALL), watcher)
    generate(model, tokens(30), cache, new_tokens=NEW)
    for layer in (0, 1):
        position, kept = watcher.compressions[layer, 0][-1]
        since = np.arange(position + 1, 30 + NEW - 1)
        held = cache.kept_positions(layer).numpy()
        assert held.tolist() == [[*head.tolist(), *since.tolist()] for head in kept]
        for head in range(2):
            stored = cache.layers[layer].keys[0, head, : held.shape[1]].numpy()
            np.testing.assert_array_equal(stored, watcher.key(layer)[head][held[head]])


def test_what_a_step_attends_to_is_what_is_held():
    model = tiny_model("llama")
    watcher = Watcher(attention=True)
    cache = CompressedCache(model, BeaconKV(**SMALL), watcher)
    generate(model, tokens(30), cache, new_tokens=NEW)
    for positions, weights, first in zip(
        watcher.key_positions[1, 0], watcher.attention[1, 0], watcher.first_positions[1, 0], strict=True
    ):
        assert positions.shape[1] == weights.shape[-1]
        assert (positions.diff() > 0).all()
        assert int(positions[0, -1]) == first + weights.shape[2] - 1
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("prompt", [5, 30])
def test_streaming_llm_keeps_both_ends(sinks, prompt):
    model = tiny_model("llama")
    watcher = Watcher()
    policy = StreamingLLM(budget=12, sinks=sinks)
    generate(model, tokens(prompt), CompressedCache(model, policy, watcher), new_tokens=20)
    expected = streaming_llm(prompt + 19, prompt, budget=12, sinks=sinks)
    for layer in (0, 1):
        seen = watcher.compressions[layer, 0]
        assert [position for position, _ in seen] == [c.position for c in expected]
        for (_, kept), compression in zip(seen, expected, strict=True):
            assert kept.tolist() == [compression.kept.tolist()] * 2


def test_random_eviction_keeps_its_promises():
    model = tiny_model("llama")

    def kept(seed):
        watcher = Watcher()
        policy = RandomEviction(budget=12, interval=4, recent=5, seed=seed)
        generate(model, tokens(30), CompressedCache(model, policy, watcher), new_tokens=20)
        return watcher.compressions

    found = kept(0)
    for layer in (0, 1):
        for head in range(2):
            cached = []
            compressions = []
            for position, sets in found[layer, 0]:
                cached += range(cached[-1] + 1 if cached else 0, position + 1)
                evicted = np.setdiff1d(cached, sets[head])
                compressions.append(reference.Compression(position, kept=sets[head], evicted=evicted))
                cached = sets[head].tolist()
            check_random_eviction(compressions, 49, 30, budget=12, interval=4, recent=5)
    draws = [found[0, 0][0][1][0], found[0, 0][0][1][1], found[1, 0][0][1][0], kept(1)[0, 0][0][1][0]]
    assert len({tuple(draw.tolist()) for draw in draws}) == 4
    assert found[0, 0][0][1].tolist() == kept(0)[0, 0][0][1].tolist()


POLICIES = [
    BeaconKV(**SMALL),
    BeaconKV(**SMALL, selector="kmeans"),
    BeaconKV(**SMALL, selector="random"),
    StreamingLLM(budget=20, sinks=2),
    RandomEviction(budget=20, interval=6),
]


@pytest.mark.parametrize(
    ("policy", "arch"),
    [(policy, "llama") for policy in POLICIES] + [(POLICIES[0], "gemma3_text")],
    ids=["fps", "kmeans", "random", "streaming-llm", "random-eviction", "fps-gemma3"],
)
def test_in_a_batch_each_row_evicts_what_it_evicts_alone(policy, arch):
    # GIVEN prompts of different lengths, two of them equally long, that compress at different steps
    model = tiny_model(arch)
    lengths = (33, 8, 21, 33)
    prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    following = tokens(24, 9, rows=4)
    layers = [1] if arch == "gemma3_text" else [0, 1]

    def feed_all(ids, mask, rows):
        watcher = Watcher()
        cache = CompressedCache(model, policy, watcher)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = [feed(model, ids, cache, attention_mask=mask, position_ids=positions)[:, -1]]
        for step in range(24):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = positions[:, -1:] + 1
            token = following[rows, step : step + 1]
            logits.append(feed(model, token, cache, attention_mask=mask, position_ids=positions)[:, 0])
        return watcher, cache, torch.stack(logits, dim=1)

    # WHEN they run together and each alone, fed the same tokens
    together, cache, logits = feed_all(*padded(prompts, PAD), [0, 1, 2, 3])
    steps = set()
    for row, prompt in enumerate(prompts):
        alone, one, own = feed_all(prompt, torch.ones_like(prompt), [row])
        # THEN the same positions are kept at the same positions, and the model says the same
        for layer in layers:
            ours, theirs = together.compressions[layer, row], alone.compressions[layer, 0]
            assert theirs
            assert [(p, kept.tolist()) for p, kept in ours] == [(p, kept.tolist()) for p, kept in theirs]
            assert cache.kept_positions(layer, row).tolist() == one.kept_positions(layer).tolist()
            steps.add(tuple(p - lengths[row] for p, _ in ours))
        torch.testing.assert_close(logits[row], own[0], atol=1e-3, rtol=1e-3)
        # AND what is stored are keys of real tokens, no padding
        held = cache.kept_positions(layers[0], row)
        assert int(held.min()) >= 0
        assert int(held.max()) == lengths[row] + 23
    assert len(steps) >= 2


def test_generation_of_a_padded_batch_is_that_of_each_row_alone():
    model = tiny_model("qwen3")
    prompts = [tokens(length, seed) for seed, length in enumerate((33, 8, 21, 33))]
    ids, mask = padded(prompts, PAD)
    together = generate(model, ids, BeaconCache(model, **SMALL), attention_mask=mask, new_tokens=20)
    for row, prompt in enumerate(prompts):
        assert together[row].tolist() == generate(model, prompt, BeaconCache(model, **SMALL), new_tokens=20)[0].tolist()
