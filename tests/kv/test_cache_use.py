"""Everything that people do with a cache: turns, pieces, beams, copies, a second text; and what is refused."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from beaconscope.errors import BeaconScopeError
from beaconscope.kv import BeaconCache, CompressedCache
from beaconscope.kv.policies import BeaconKV, Full, RandomEviction, StreamingLLM
from tests.kv.driving import settings_of
from tests.kv.live import Watcher, cache_argument, feed, generate, padded, tokens
from tests.reference.beacon_kv import simulate
from tests.tiny import PAD, tiny_model

SMALL = {"budget": 20, "interval": 6, "beacons": 4, "recent": 3, "pool_low": 6, "pool_high": 11}
FREQUENCIES = 10_000.0 ** (-np.arange(0, 16, 2) / 16)


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


def feed_in(model, cache, text, sizes, **options):
    """Feed ``text`` [B, T] in passes of these sizes; the logits of all of it."""
    return torch.cat([feed(model, part, cache, **options) for part in text.split(sizes, dim=1)], dim=1)


class TestTurns:
    @pytest.mark.parametrize(
        "sizes",
        [
            [30, *[1] * 10, 12, *[1] * 9, 40, *[1] * 8],  # turns on a compressed cache, one of them longer than it
            [8, 8, 8, 8, 8, 5, *[1] * 20],  # a prompt in pieces
            [1, *[1] * 40],
            [25, 1, 26, 2, 25],
        ],
        ids=["turns", "pieces", "singles", "edges"],
    )
    def test_kept_sets_are_the_references(self, llama, sizes):
        policy = BeaconKV(**SMALL)
        watcher = Watcher()
        text = tokens(sum(sizes), 1)
        feed_in(llama, CompressedCache(llama, policy, watcher), text, sizes)
        for head in range(2):
            expected = simulate(
                watcher.query(1)[head], watcher.key(1)[head], sum(sizes), settings_of(policy), FREQUENCIES, chunks=sizes
            )
            assert [(position, kept[head].tolist()) for position, kept in watcher.compressions[1, 0]] == [
                (c.position, c.kept.tolist()) for c in expected.compressions
            ]

    @pytest.mark.parametrize("arch", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
    def test_turns_change_nothing_while_nothing_is_evicted(self, arch):
        plain, model = tiny_model(arch), tiny_model(arch)
        text, sizes = tokens(60, 1), [20, 1, 1, 15, 1, 22]
        ours = feed_in(model, BeaconCache(model, budget=512), text, sizes)
        theirs = feed_in(plain, DynamicCache(config=plain.config), text, sizes)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize(("interval", "turn"), [(13, 12), (6, 12), (6, 5)], ids=["fits", "wide", "fits too"])
    @pytest.mark.parametrize("arch", ["llama", "gpt_oss", "deepseek_v3"])
    def test_a_turn_sees_what_its_tokens_would_see_one_by_one(self, arch, interval, turn):
        model = tiny_model(arch)
        text = tokens(60 + turn, 2)
        # This one has room for the turn token by token.
        roomy = feed_in(model, BeaconCache(model, **{**SMALL, "interval": 30}), text, [60] + [1] * turn)
        ours = feed_in(model, BeaconCache(model, **{**SMALL, "interval": interval}), text, [60, turn])
        torch.testing.assert_close(ours, roomy, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
    def test_turns_of_a_padded_batch_are_those_of_each_row(self, arch):
        model = tiny_model(arch)
        prompts = [tokens(length, seed) for seed, length in enumerate((33, 8, 21))]
        text = tokens(32, 5, rows=3)
        sizes = [1, 1, 10, 1, 1, 13, 1, 1, 1, 1, 1]

        def feed_all(ids, mask, rows):
            watcher = Watcher()
            cache = CompressedCache(model, BeaconKV(**SMALL), watcher)
            logits = []
            for part in [ids, *text[rows].split(sizes, dim=1)]:
                if part is not ids:
                    mask = torch.cat([mask, torch.ones_like(part)], dim=1)
                positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -part.shape[1] :]
                logits.append(feed(model, part, cache, attention_mask=mask, position_ids=positions)[:, -1])
            return watcher, cache, torch.stack(logits, dim=1)

        together, cache, logits = feed_all(*padded(prompts, PAD), [0, 1, 2])
        for row, prompt in enumerate(prompts):
            alone, one, own = feed_all(prompt, torch.ones_like(prompt), [row])
            ours, theirs = together.compressions[1, row], alone.compressions[1, 0]
            assert [(p, kept.tolist()) for p, kept in ours] == [(p, kept.tolist()) for p, kept in theirs]
            assert cache.kept_positions(1, row).tolist() == one.kept_positions(1).tolist()
            torch.testing.assert_close(logits[row], own[0], atol=1e-3, rtol=1e-3)

    def test_a_generation_goes_on_where_the_last_one_ended(self, llama):
        cache = BeaconCache(llama, budget=512)
        text = tokens(20, 3)
        text = torch.cat([text, generate(llama, text, cache), tokens(7, 4)], dim=1)
        assert torch.equal(generate(llama, text, cache), generate(llama, text))

    def test_room_is_what_may_be_fed_without_a_compression(self, llama):
        watcher = Watcher()
        cache = CompressedCache(llama, BeaconKV(**SMALL), watcher)
        feed(llama, tokens(5), cache)
        assert cache.room() == 21
        feed(llama, tokens(20), cache)
        assert cache.room() == 1
        assert not watcher.compressions
        feed(llama, tokens(1), cache)
        assert cache.room() == 6
        assert len(watcher.compressions[0, 0]) == 1


class TestMemory:
    @pytest.mark.parametrize("arch", ["llama", "gemma3_text", "deepseek_v3"])
    @pytest.mark.parametrize("options", [SMALL, {**SMALL, "interval": 1}], ids=["interval 6", "interval 1"])
    def test_never_more_than_budget_and_interval_after_the_prompt(self, arch, options):
        model = tiny_model(arch)
        cache = BeaconCache(model, **options)
        slots = options["budget"] + options["interval"]
        feed(model, tokens(100), cache)
        sizes, places = set(), set()
        for step in range(30):
            for layer in cache.compressed_layers:
                assert layer.slots == slots
                assert 20 <= layer.stored <= slots
                for buffer in (layer.keys, layer.values, layer.positions):
                    assert buffer.shape[2] == slots
                    assert buffer.untyped_storage().nbytes() == buffer.numel() * buffer.element_size()
            if step > 16:  # the sliding layers' windows are full
                sizes.add(cache.nbytes)
            places.add(tuple(layer.keys.data_ptr() for layer in cache.compressed_layers))
            feed(model, tokens(1, step), cache)
        assert len(sizes) == 1
        assert len(places) == 1, "buffers are allocated once"

    def test_bytes_are_those_of_the_slots(self, llama):
        cache = BeaconCache(llama, **SMALL)
        generate(llama, tokens(100), cache)
        # 2 layers of 2 heads, 26 slots of 16 numbers for key and value, and a position.
        assert cache.nbytes == 2 * 2 * 26 * (2 * 16 * 4 + 8)

    def test_no_tensor_outlives_a_pass_but_buffers_and_memory_of_the_policy(self, llama):
        def alive():
            gc.collect()
            return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

        cache = BeaconCache(llama, **SMALL)
        feed_in(llama, cache, tokens(80), [40] + [1] * 40)
        before = alive()
        feed_in(llama, cache, tokens(60), [1] * 60)
        assert alive() <= before

    def test_pieces_bound_the_memory_of_a_prompt(self, llama):
        cache = BeaconCache(llama, **SMALL)
        for piece in tokens(100).split(8, dim=1):
            feed(llama, piece, cache)
            assert all(layer.slots == 26 and layer.stored <= 26 for layer in cache.compressed_layers)

    def test_a_full_cache_grows_seldom(self, llama):
        cache = CompressedCache(llama, Full())
        slots = []
        for size in [150, 100, 49, 1, 1, 99, 1]:
            feed(llama, tokens(size), cache)
            slots.append(cache.compressed_layers[0].slots)
        assert slots == [300, 300, 300, 300, 600, 600, 600]
        assert cache.kept_positions(1).tolist() == [list(range(401))] * 2


class TestRows:
    @pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
    @pytest.mark.parametrize("steps", [0, 3])
    def test_reordered_rows_go_on_as_if_they_had_always_stood_there(self, arch, steps):
        model = tiny_model(arch)
        text = tokens(70, 1, rows=3)
        order = torch.tensor([2, 0, 2])
        watched, other = Watcher(), Watcher()
        cache, straight = (CompressedCache(model, BeaconKV(**SMALL), watcher) for watcher in (watched, other))
        sizes = [40] + [1] * steps
        feed_in(model, cache, text[:, : 40 + steps], sizes)
        feed_in(model, straight, text[order][:, : 40 + steps], sizes)
        cache.reorder_cache(order)
        rest, ones = text[order][:, 40 + steps :], [1] * (30 - steps)
        torch.testing.assert_close(
            feed_in(model, cache, rest, ones), feed_in(model, straight, rest, ones), atol=1e-4, rtol=1e-4
        )
        for row in range(3):
            assert cache.kept_positions(1, row).tolist() == straight.kept_positions(1, row).tolist()

    def test_rows_can_be_repeated_and_selected(self, llama):
        text = tokens(60, 1, rows=2)
        cache, watcher = BeaconCache(llama, **SMALL), Watcher()
        cache = CompressedCache(llama, BeaconKV(**SMALL), watcher)
        feed(llama, text[:, :40], cache)
        cache.batch_repeat_interleave(2)
        feed_in(llama, cache, text[[0, 0, 1, 1]][:, 40:50], [1] * 10)
        cache.batch_select_indices(torch.tensor([3]))
        logits = feed_in(llama, cache, text[1:, 50:], [1] * 10)
        alone = feed_in(llama, BeaconCache(llama, **SMALL), text[1:], [40] + [1] * 20)[:, -10:]
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
    def test_beam_search(self, arch):
        plain, model = tiny_model(arch), tiny_model(arch)
        prompt = tokens(30)
        expected = generate(plain, prompt, DynamicCache(config=plain.config), num_beams=3)
        assert torch.equal(generate(model, prompt, BeaconCache(model, budget=512), num_beams=3), expected)
        watcher = Watcher()
        generate(model, prompt, CompressedCache(model, BeaconKV(**SMALL), watcher), num_beams=3)
        assert len(watcher.compressions[1, 2]) >= 2  # the prompt, and among the beams

    def test_rows_of_different_lengths_are_not_reordered(self, llama):
        ids, mask = padded([tokens(30), tokens(10)], PAD)
        cache = BeaconCache(llama, **SMALL)
        with pytest.raises(BeaconScopeError, match="different lengths cannot be reordered") as refused:
            generate(llama, ids, cache, attention_mask=mask, num_beams=2)
        assert "\n" not in str(refused.value)


class TestAnotherText:
    @pytest.mark.parametrize(
        "policy",
        [
            BeaconKV(**SMALL),
            BeaconKV(**SMALL, selector="kmeans"),
            BeaconKV(**SMALL, selector="random"),
            RandomEviction(budget=20, interval=6),
            StreamingLLM(budget=20),
        ],
        ids=["fps", "kmeans", "random beacons", "random eviction", "streaming-llm"],
    )
    def test_nothing_survives_a_reset(self, llama, policy):
        watcher = Watcher()
        cache = CompressedCache(llama, policy, watcher)
        generate(llama, tokens(33, 8), cache, new_tokens=20)
        cache.reset()
        watcher.compressions.clear()
        second = generate(llama, tokens(30), cache, new_tokens=20)
        fresh = Watcher()
        assert torch.equal(second, generate(llama, tokens(30), CompressedCache(llama, policy, fresh), new_tokens=20))
        for at, compressions in fresh.compressions.items():
            assert [(p, k.tolist()) for p, k in watcher.compressions[at]] == [(p, k.tolist()) for p, k in compressions]

    def test_a_reset_cache_takes_another_batch(self, llama):
        cache = BeaconCache(llama, **SMALL)
        feed(llama, tokens(30, rows=2), cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.nbytes == 0
        feed(llama, tokens(30, rows=3), cache)
        assert cache.kept_positions(0, 2).shape == (2, 20)

    def test_a_text_that_is_no_continuation_is_refused(self, llama):
        cache = BeaconCache(llama, **SMALL)
        generate(llama, tokens(30), cache)
        if "cache" in cache_argument(llama, cache):  # transformers 5.2 gives up before it asks the cache
            with pytest.raises(BeaconScopeError, match=r"no token is new to the cache.*reset\(\)"):
                generate(llama, tokens(10), cache)
        with pytest.raises(BeaconScopeError, match=r"position_ids end at 9 where the cache.*reset\(\)"):
            feed(llama, tokens(10), cache, position_ids=torch.arange(10)[None])

    def test_a_copy_goes_its_own_way(self, llama):
        cache = BeaconCache(llama, **SMALL)
        feed(llama, tokens(30), cache)
        twin = copy.deepcopy(cache)
        text = tokens(20, 4)
        expected = feed_in(llama, cache, text, [1] * 20)
        assert torch.equal(feed_in(llama, twin, text, [1] * 20), expected)

    def test_two_caches_take_turns_on_a_model(self, llama):
        text = tokens(60, 1)
        alone = feed_in(llama, BeaconCache(llama, **SMALL), text, [30] + [1] * 30)
        one, other = BeaconCache(llama, **SMALL), BeaconCache(llama, budget=25, interval=3, beacons=1, recent=1)
        logits = []
        for part in text.split([30] + [1] * 30, dim=1):
            logits.append(feed(llama, part, one))
            feed(llama, part, other)
        assert torch.equal(torch.cat(logits, dim=1), alone)


class TestRefused:
    """What cannot work ends in one line that says what to do."""

    def refused(self, match):
        return pytest.raises(BeaconScopeError, match=rf"\A[^\n]*{match}[^\n]*\Z")

    @pytest.mark.parametrize("tapped", [False, True])
    def test_another_model(self, llama, tapped):
        other = tiny_model("llama", seed=1)
        if tapped:
            BeaconCache(other)
        with self.refused("made for another model"):
            generate(other, tokens(30), BeaconCache(llama, **SMALL))

    def test_another_batch(self, llama):
        cache = BeaconCache(llama, **SMALL)
        feed(llama, tokens(30, rows=2), cache)
        with self.refused("holds 2 sequences and was given a batch of 3"):
            feed(llama, tokens(1, rows=3), cache)

    def test_cropping(self, llama):
        cache = BeaconCache(llama, **SMALL)
        feed(llama, tokens(30), cache)
        with self.refused("cannot be cropped"):
            cache.crop(-3)

    def test_assisted_decoding(self, llama):
        with pytest.raises((BeaconScopeError, ValueError), match="cropped"):
            generate(llama, tokens(30), BeaconCache(llama, **SMALL), prompt_lookup_num_tokens=3)

    @pytest.mark.parametrize(
        "mask",
        [[[1] * 20 + [0] * 10], [[1] * 10 + [0] * 5 + [1] * 15], [[0] * 10 + [1] * 20]],
        ids=["right", "hole", "left, unknown to the positions"],
    )
    @pytest.mark.parametrize("rows", [1, 2])
    def test_padding_that_positions_do_not_tell(self, llama, mask, rows):
        with self.refused("only padding on the left"):
            feed(llama, tokens(30, rows=rows), BeaconCache(llama, **SMALL), attention_mask=torch.tensor(mask * rows))

    def test_padding_in_a_later_turn(self, llama):
        cache = BeaconCache(llama, **SMALL)
        feed(llama, tokens(30, rows=2), cache)
        mask = torch.ones(2, 34)
        mask[1, 30:32] = 0
        with self.refused("padding after the first pass"):
            feed(llama, tokens(4, rows=2), cache, attention_mask=mask)

    def test_positions_without_a_mask(self, llama):
        positions = torch.stack([torch.arange(30), torch.arange(30) - 4]).clamp(min=0)
        with self.refused("pass both, or neither"):
            feed(llama, tokens(30, rows=2), BeaconCache(llama, **SMALL), position_ids=positions)

    def test_positions_that_start_late(self, llama):
        with self.refused("have to count from each prompt's first token"):
            feed(llama, tokens(30), BeaconCache(llama, **SMALL), position_ids=torch.arange(5, 35)[None])

    def test_positions_that_do_not_follow_on(self, llama):
        cache = BeaconCache(llama, **SMALL)
        ids, mask = padded([tokens(30), tokens(20)], PAD)
        feed(llama, ids, cache, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
        with self.refused("position_ids end at 30 where the cache, which has seen 20 tokens, expects 20"):
            feed(llama, tokens(1, rows=2), cache, attention_mask=torch.cat([mask, torch.ones(2, 1)], dim=1))

    def test_a_pass_that_was_cut_short(self, llama):
        cache = BeaconCache(llama, **SMALL)
        broken = llama.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            feed(llama, tokens(30), cache)
        broken.remove()
        with self.refused(r"cut short; call reset\(\)"):
            feed(llama, tokens(30), cache)
        cache.reset()
        feed(llama, tokens(30), cache)

    def test_options_that_do_not_exist(self, llama):
        with self.refused("BeaconCache has no option 'budgt'; it has .*budget"):
            BeaconCache(llama, budgt=3)

    def test_positions_of_a_sliding_layer(self):
        model = tiny_model("gemma3_text")
        cache = BeaconCache(model, **SMALL)
        feed(model, tokens(30), cache)
        with self.refused("layer 0 is a sliding layer"):
            cache.kept_positions(0)
        with self.refused("holds no sequence 1"):
            cache.kept_positions(1, 1)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3_text", "deepseek_v3"])
def test_bfloat16_generates_what_a_dynamic_cache_does(arch):
    plain, model = (tiny_model(arch).to(torch.bfloat16) for _ in range(2))
    prompt = tokens(30)
    assert torch.equal(generate(model, prompt, BeaconCache(model, budget=512)), generate(plain, prompt))
    cache = BeaconCache(model, **SMALL)
    generate(model, prompt, cache)
    assert cache.layers[1].keys.dtype == torch.bfloat16
