"""Every rival policy keeps, at every compression, what the slow reading of its rule keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from beaconscope.attention.spec import AttentionSpec
from beaconscope.attention.step import AttentionStep
from beaconscope.errors import BeaconScopeError, UsageError
from beaconscope.kv import CompressedCache
from beaconscope.kv.kinds import TokenKind, token_kinds
from beaconscope.kv.policies import (
    ETC,
    H2O,
    POLICIES,
    RPC,
    BigBird,
    CacheView,
    FastGen,
    LazyEviction,
    Longformer,
    Oracle,
    ScissorHands,
    parse_policy,
)
from tests.kv.driving import head_info, make_rotary
from tests.kv.live import feed, generate, padded, tokens
from tests.kv.rivals import CASES, KINDS, Watched, drive, expected
from tests.reference.rivals import masks, oracle
from tests.tiny import PAD, tiny_model

LENGTH = 60
SIZE = 8
ONE_OF_EACH = [case for case in CASES if " " not in case]
OF_TOKEN = torch.randint(3, (264,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
NAMES = {kind: name for name, kind in KINDS.items()}


def rope(size):
    return {"inv_freq": 10_000.0 ** (-np.arange(0, size, 2) / size), "style": "half", "scaling": 1.0}


def made(group, seed, rows=2, heads=2, length=LENGTH):
    """Random queries [R, H, G, T, D], keys, values and kinds, whose attention is neither flat nor on one entry."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(rows, heads, group, length, SIZE)).astype(np.float32)
    key = 1.5 * rng.normal(size=(rows, heads, length, SIZE)).astype(np.float32)
    # Keys that resemble each other, and sinks, as in a model.
    key += 0.8 * rng.normal(size=(rows, heads, 1, SIZE)).astype(np.float32)
    value = rng.normal(size=(rows, heads, length, 6)).astype(np.float32)
    kinds = rng.choice(list(KINDS), p=[0.6, 0.15, 0.25], size=(rows, length))
    return query, key, value, kinds


def check(case, group, prompt, seed, chunks=None, **shape):
    policy, reading = CASES[case]
    query, key, value, kinds = made(group, seed, **shape)
    of_kind = torch.tensor([[KINDS[kind] for kind in row] for row in kinds], dtype=torch.uint8)
    heads = head_info(torch.from_numpy(query), make_rotary(size=SIZE, **rope(SIZE)))
    found = drive(policy, heads, *map(torch.from_numpy, (query, key, value)), prompt, of_kind, chunks)
    for row in range(query.shape[0]):
        wanted = expected(
            reading(rope(SIZE)), query[row].swapaxes(1, 2), key[row], value[row], prompt, kinds[row], chunks
        )
        assert wanted
        assert [position for position, _ in found] == [kept.position for kept in wanted]
        for (_, sets), kept in zip(found, wanted, strict=True):
            assert sets[row] == kept.sets
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_keeps_what_its_rule_says(case, group):
    check(case, group, prompt=25, seed=group)


@pytest.mark.parametrize("case", CASES)
def test_keeps_what_its_rule_says_after_a_short_prompt(case):
    check(case, 2, prompt=3, seed=5)


@pytest.mark.parametrize("case", CASES)
def test_keeps_what_its_rule_says_between_pieces_of_a_prompt(case):
    check(case, 2, prompt=30, seed=6, chunks=[13, 9, 8])


# In a model.


def check_live(model, case, prompt=30, new=40, pieces=None):
    """Hold what a model's second layer keeps against the reading, on a text where rounding decides nothing."""
    policy, reading = CASES[case]
    for seed in range(4):
        watched = Watched(layer=1)
        cache = CompressedCache(model, policy, watched, OF_TOKEN)
        text = tokens(prompt + new, seed)
        if pieces is not None:
            cache.expect_prompt(prompt)
        start = 0
        for size in [*(pieces or [prompt]), *[1] * new]:
            feed(model, text[:, start : start + size], cache)
            start += size
        query, key, value = watched.vectors()
        kinds = [NAMES[TokenKind(int(OF_TOKEN[token]))] for token in text[0]]
        rest = (value, prompt, kinds, pieces, cache._info[1].spec.scaling)
        wanted = expected(reading(rope(16)), query, key, *rest)
        rng = np.random.default_rng(seed)
        noisy = (part * (1 + 1e-6 * rng.normal(size=part.shape)) for part in (query, key))
        if expected(reading(rope(16)), *noisy, *rest) != wanted:
            continue  # rounding decides
        assert wanted
        assert watched.kept == wanted
        held = cache.kept_positions(1)
        assert [row[row >= 0].tolist() for row in held] == [
            [*sets, *range(wanted[-1].position + 1, prompt + new)] for sets in wanted[-1].sets
        ]
        return
    pytest.fail("every text is decided by rounding")


@pytest.mark.parametrize("case", ONE_OF_EACH)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_llama_keeps_what_its_rule_says(case, kv_heads):
    check_live(tiny_model("llama", num_key_value_heads=kv_heads), case)


@pytest.mark.parametrize("case", CASES)
def test_a_qwen3_keeps_what_its_rule_says(case):
    model = tiny_model("qwen3")
    # It normalises its keys: untrained, all would have the same norm.
    torch.nn.init.uniform_(model.model.layers[1].self_attn.k_norm.weight, 0.5, 2, torch.Generator().manual_seed(0))
    check_live(model, case)


@pytest.mark.parametrize("case", ["fastgen kinds", "rpc", "snapkv"])
def test_a_prompt_in_pieces_is_one_prompt(case):
    check_live(tiny_model("qwen3"), case, pieces=[11, 10, 9])


@pytest.mark.parametrize("case", [*ONE_OF_EACH, "fastgen kinds"])
def test_in_a_batch_each_row_keeps_what_it_keeps_alone(case):
    # GIVEN prompts of different lengths, one of them twice
    model = tiny_model("llama")
    policy = CASES[case][0]
    lengths = (33, 18, 33)
    prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    following = tokens(26, 9, rows=3)

    def feed_all(ids, mask, rows, watched):
        cache = CompressedCache(model, policy, watched, OF_TOKEN)
        feed(model, ids, cache, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
        for step in range(following.shape[1]):
            mask = torch.cat([mask, torch.ones(len(ids), 1, dtype=mask.dtype)], dim=1)
            logits = feed(
                model,
                following[rows, step : step + 1],
                cache,
                attention_mask=mask,
                position_ids=mask.sum(-1, keepdim=True) - 1,
            )
        return cache, logits

    for row, prompt in enumerate(prompts):
        # WHEN they run together and each alone, fed the same tokens
        together, alone = Watched(1, row), Watched(1)
        cache, logits = feed_all(*padded(prompts, PAD), [0, 1, 2], together)
        one, own = feed_all(prompt, torch.ones_like(prompt), [row], alone)
        # THEN the same positions are kept at the same positions, and the model says the same
        assert alone.kept
        assert together.kept == alone.kept
        ours, theirs = cache.kept_positions(1, row), one.kept_positions(1)
        assert [head[head >= 0].tolist() for head in ours] == [head[head >= 0].tolist() for head in theirs]
        torch.testing.assert_close(logits[row], own[0], atol=1e-3, rtol=1e-3)


# Mistakes that others made.


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_nothing_survives_into_the_next_generation(case):
    model = tiny_model("llama")
    policy = CASES[case][0]
    fresh = Watched(1)
    written = generate(model, tokens(30, 1), CompressedCache(model, policy, fresh, OF_TOKEN), new_tokens=20)
    again = Watched(1)
    cache = CompressedCache(model, policy, again, OF_TOKEN)
    generate(model, tokens(41, 2), cache, new_tokens=9)
    again.kept.clear()
    cache.reset()
    assert torch.equal(generate(model, tokens(30, 1), cache, new_tokens=20), written)
    assert again.kept == fresh.kept


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_the_attention_backend_changes_nothing(case):
    found = []
    for backend in ("eager", "sdpa"):
        model = tiny_model("llama", attn_implementation=backend)
        watched = Watched(1)
        cache = CompressedCache(model, CASES[case][0], watched, OF_TOKEN)
        text = tokens(50, 3)
        feed(model, text[:, :30], cache)
        for token in range(30, 50):
            feed(model, text[:, token : token + 1], cache)
        found.append(watched.kept)
    assert found[0] == found[1]


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_entries_stay_in_the_order_of_their_positions(case):
    model = tiny_model("llama")
    cache = CompressedCache(model, CASES[case][0], token_kinds=OF_TOKEN)
    generate(model, tokens(30, 4), cache, new_tokens=25)
    for layer in (0, 1):
        for head in cache.kept_positions(layer):
            assert (head[head >= 0].diff() > 0).all()


def attending(targets):
    """A step whose query heads [H, T] attend to one position each and to nothing else."""
    heads, length = np.shape(targets)
    key = 50 * torch.eye(length).expand(1, heads, -1, -1)
    query = 50 * torch.eye(length)[torch.tensor(targets)][None, :, None]
    return query, key


def test_fastgen_gives_each_head_the_cheapest_kind_that_recovers_its_attention():
    # GIVEN 20 tokens, the first special, the fourth punctuation, and heads that look at
    own = list(range(20))
    targets = [
        [0] * 20,  # the special token
        [0] * 5 + [3] * 15,  # the punctuation, mostly
        [0, 1, 2] + [2] * 17,  # a plain token
        [0] * 4 + own[4:],  # the first, then each at itself: all but one tenth is recent or among the six heaviest
        own,  # themselves
    ]
    query, key = attending(targets)
    kinds = torch.zeros((1, 20), dtype=torch.uint8)
    kinds[0, 0], kinds[0, 3] = TokenKind.SPECIAL, TokenKind.PUNCTUATION
    # WHEN the prompt ends
    policy = FastGen()
    ((position, (sets,)),) = drive(policy, head_info(query), query, key, key, 20, kinds)
    # THEN each takes the kind it needs
    assert position == 19
    assert sets[0] == [0]
    assert sets[1] == [0, 3]
    assert set(sets[2]) == {0, 1, 2, 3, 4, 5}  # six are the heaviest; of those that nobody looked at, the oldest
    assert sets[3] == sorted({0, 3, 4, 5, 6, 7, 8, *range(10, 20)})
    assert sets[4] == own


def test_h2o_never_forgets_what_an_entry_has_got():
    # GIVEN an entry that nobody has looked at for long, and since then entries that looked at themselves
    query, key = attending([[0, 1, 2, *[2] * 6, *range(9, 18)]])
    found = drive(H2O(budget=6, recent=3), head_info(query), query, key, key, 10)
    assert found[-1] == (17, [[[0, 1, 2, 15, 16, 17]]])


def test_scissorhands_divides_by_the_queries_that_could_see_an_entry():
    # GIVEN entry 0, which 4 of 12 queries looked at, and entry 10, which 2 of 2 did
    query, key = attending([[0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 10, 10]])
    found = drive(ScissorHands(budget=11, recent=1, drop=10), head_info(query), query, key, key, 12)
    assert found == [(11, [[[10, 11]]])]


def test_lazy_eviction_waits_as_long_as_an_entry_has_been_silent_before():
    # GIVEN entry 0, silent for 3 steps but known to come back after 5; entry 1, for 2 and never longer; others, never
    # looked at
    query, key = attending([[0, 1, 1, 1, 1, 0, 1, 7, 8]])
    found = drive(LazyEviction(budget=5, interval=4), head_info(query), query, key, key, 9)
    assert found == [(8, [[[0, 5, 6, 7, 8]]])]


# Memory.


def test_fastgen_stores_what_the_heads_keep_and_no_more():
    model = tiny_model("gemma3_text")
    # 16 numbers each in key and value of float32, and a position; and where each column of a head lies
    entry, column, heads = 2 * 16 * 4 + 8, 8, 2
    policy = FastGen(interval=8, recovery=0.75, local=4)
    cache = CompressedCache(model, policy, token_kinds=OF_TOKEN)
    generate(model, tokens(120, 5), cache, new_tokens=30)
    widths = set()
    for layer in (1, 3):
        kept = cache.kept_positions(layer)
        recent = 29 % 8
        packed = (kept[:, : kept.shape[1] - recent] >= 0).sum(-1)
        widths.add(tuple(packed.tolist()))
        width = int(packed.max())
        stored = int(packed.sum()) * entry + heads * width * column + heads * policy.interval * entry
        assert cache.layers[layer].nbytes == stored
    # AND heads do differ
    assert any(len(set(width)) > 1 for width in widths)


def test_rpc_stores_more_with_every_compression_and_no_more():
    model = tiny_model("llama")
    policy = RPC(period=12, recent=4, ratio=4)
    cache = CompressedCache(model, policy)
    feed(model, tokens(20), cache)
    for token in range(60):
        feed(model, tokens(1, token), cache)
        fired = (token + 1) // 12
        # the prompt, three more for each compression, the last four once one fired, and room for the period
        slots = 20 + 3 * fired + (4 if fired else 0) + 12
        for layer in cache.compressed_layers:
            assert layer.slots == slots
            assert layer.nbytes == 2 * slots * (2 * 16 * 4 + 8)
            assert layer.stored == slots - 12 + (token + 1) % 12
        assert cache.room() == 12 - (token + 1) % 12


# Replay only.


@pytest.mark.parametrize("budget", [20, 31])
def test_masks_see_what_their_definition_says(budget):
    query = torch.zeros(1, 2, 1, 80, 4)
    heads = head_info(query)
    at = torch.arange(80)
    longformer = Longformer(budget=budget, global_tokens=5).mask(at, at, heads)
    etc = ETC(budget=budget, segment=8).mask(at, at, heads)
    for t in range(80):
        for p in range(80):
            assert bool(longformer[1, t, p]) == masks.longformer(t, p, budget, 5)
            assert bool(etc[1, t, p]) == masks.etc(t, p, budget, 8)
    assert int(longformer.sum(-1).max()) == budget


def test_bigbird_adds_random_blocks_to_what_is_certain():
    budget, size, count = 30, 4, 3
    policy = BigBird(budget=budget, global_tokens=5, random_blocks=count, block=size, seed=1)
    heads = head_info(torch.zeros(1, 2, 1, 120, 4))
    at = torch.arange(120)
    seen = policy.mask(at, at, heads).numpy()
    drawn = {}
    for h in range(2):
        for t in range(120):
            certain = {p for p in range(t + 1) if masks.bigbird_certain(t, p, budget, 5, count, size)}
            found = set(np.flatnonzero(seen[h, t]).tolist())
            assert certain <= found
            assert max(found) <= t
            assert len(found) <= budget
            # whole blocks, the same for all queries of a block
            blocks = {p // size for p in found - certain}
            assert all({b * size + i for i in range(size)} <= found for b in blocks)
            drawn.setdefault((h, t // size), set()).update(blocks)
    assert all(len(blocks) <= count for blocks in drawn.values())
    assert len(drawn[0, 29]) == count
    assert [drawn[0, b] for b in range(20, 30)] != [drawn[1, b] for b in range(20, 30)]
    assert len({frozenset(drawn[0, b]) for b in range(20, 30)}) > 1
    # A part of the mask is that part, and another seed another mask.
    assert (policy.mask(at[50:70], at[10:], heads).numpy() == seen[:, 50:70, 10:]).all()
    assert (replace(policy, seed=2).mask(at, at, heads).numpy() != seen).any()


@pytest.mark.parametrize(
    "policy", [Longformer(budget=20, global_tokens=4), BigBird(budget=30, global_tokens=4, block=4)]
)
def test_a_mask_keeps_what_the_newest_query_saw(policy):
    heads = head_info(torch.zeros(1, 2, 1, 60, 4))
    at = torch.arange(60)
    vectors = torch.zeros(1, 2, 60, 4)
    kept = policy.start(heads).keep(CacheView(vectors, vectors, at.expand(1, 2, -1), newest=59))
    assert torch.equal(kept[0], policy.mask(at[-1:], at, heads)[:, 0])


def test_longformer_is_streaming_llm_with_its_globals_as_sinks():
    heads = head_info(torch.zeros(1, 2, 1, 60, 4))
    at = torch.arange(60).expand(1, 2, -1)
    vectors = torch.zeros(1, 2, 60, 4)
    view = CacheView(vectors, vectors, at, newest=59)
    ours = Longformer(budget=20, global_tokens=4).start(heads).keep(view)
    assert torch.equal(ours, parse_policy("streaming-llm:budget=20,sinks=4").start(heads).keep(view))


@pytest.mark.parametrize("budget", [4, 9, 20])
def test_the_oracle_keeps_what_the_next_queries_attend_to(budget):
    query, key, value = map(torch.from_numpy, made(2, 3, rows=1)[:3])
    heads = head_info(query)
    state = Oracle(budget=budget).start(heads)
    full = [[future(query, key, value, t, t + 1).attention()[0, h, :, 0] for t in range(LENGTH)] for h in range(2)]
    attention = [np.stack([np.pad(row.numpy(), ((0, 0), (0, LENGTH - row.shape[1]))) for row in head]) for head in full]
    for newest, until in ((30, 38), (38, 46), (46, 60)):
        # WHEN the steps until the next compression are handed over, in any pieces
        for start, stop in ((newest + 1, newest + 4), (newest + 4, until)):
            state.foresee(future(query, key, value, start, stop))
        n = newest + 1
        view = CacheView(key[:, :, :n], value[:, :, :n], torch.arange(n).expand(1, 2, -1), newest)
        kept = state.keep(view)[0].numpy()
        for h in range(2):
            wanted = oracle.oracle(attention[h], newest, until, budget)
            assert np.flatnonzero(kept[h]).tolist() == wanted
            # THEN no other choice of as many entries retains more
            mass = attention[h][n:until, :, :n].sum(axis=(0, 1))
            rng = np.random.default_rng(0)
            others = [mass[rng.choice(n, budget, replace=False)].sum() for _ in range(50)]
            assert max(others) <= mass[wanted].sum() + 1e-6


def future(query, key, value, start, stop):
    """The step of the queries ``start`` to ``stop``, with everything they may see."""
    return AttentionStep(
        rows=None,
        first_position=start,
        query=query[:, :, :, start:stop],
        key=key[:, :, :stop],
        value=value[:, :, :stop],
        key_positions=torch.arange(stop).expand(1, key.shape[1], -1),
        spec=AttentionSpec(query.shape[-1] ** -0.5),
    )


@pytest.mark.parametrize("name", ["oracle", "longformer", "bigbird", "etc"])
def test_what_works_in_replay_only_is_refused_live(name):
    with pytest.raises(UsageError, match=f"^{name} works in replay only; .*--cache full.*--policy {name}$"):
        CompressedCache(tiny_model("llama"), parse_policy(name))


def test_the_others_work_live():
    assert {name for name, policy in POLICIES.items() if not policy.live} == {"oracle", "longformer", "bigbird", "etc"}


# Settings.


def test_fastgen_without_kinds_of_tokens_is_refused():
    with pytest.raises(BeaconScopeError, match="special tokens and punctuation"):
        CompressedCache(tiny_model("llama"), FastGen())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h2o:recent=64,budget=64", "budget of 64 is too small for h2o, which protects 64"),
        ("scissorhands:budget=16", "does not hold the 10 protected"),
        ("snapkv:kernel=4", "kernel is 4; give an odd number"),
        ("snapkv:budget=32", "give a budget of at least 33"),
        ("snapkv:pooling=median", "give one of mean, max"),
        ("r-kv:weight=2", "weight is 2.0; give 0 to 1"),
        ("rpc:period=32", "give at least 33"),
        ("rpc:budget=64", "policy rpc has no parameter 'budget'"),
        ("fastgen:budget=64", "policy fastgen has no parameter 'budget'"),
        ("fastgen:recovery=1.5", "recovery is 1.5; give 0 to 1"),
        ("lazy-eviction:alpha=0", "alpha is 0.0"),
        ("longformer:interval=3", "policy longformer has no parameter 'interval'"),
        ("bigbird:budget=40", "give a budget of at least 65"),
        ("etc:budget=10", "does not hold a segment of 64"),
        ("expected-attention:future=0", "future is 0; give at least 1"),
        ("tofa", "did you mean tova"),
    ],
)
def test_settings_that_cannot_be_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse_policy(text)


def test_every_policy_tells_what_it_is():
    for name, kind in POLICIES.items():
        assert kind.name == name
        assert kind.summary
        assert kind.source
        parse_policy(name)


def test_kinds_of_tokens():
    pieces = [b"<s>", b" the", b".", b" ,", b"...", b"\n", b"a.", b"\xe3", "。".encode(), b"+", b""]
    kinds = token_kinds(pieces, {0}).tolist()
    assert [TokenKind(kind).name[0] for kind in kinds] == ["S", "P", "P", "P", "P", "P", "P", "P", "P", "P", "P"]
    assert [index for index, kind in enumerate(kinds) if kind == TokenKind.PUNCTUATION] == [2, 3, 4, 8]
