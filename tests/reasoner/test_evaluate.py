"""The evaluation, on untrained models and hand-made inputs."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from beaconscope.reasoner.evaluate import SINKS, Share, answer, generate, long_range_gain, luck, sentences, visibility
from beaconscope.reasoner.task import Recall, Size, make_problem, read_problem, solve
from beaconscope.reasoner.train import make_model
from beaconscope.reasoner.vocabulary import EOS, encode


def words(text: str) -> list[str]:
    return text.split()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    made = make_model(3).eval()
    with torch.no_grad():  # Untrained attention is nearly uniform; sharpen it so that what is hidden matters.
        for weight in made.parameters():
            weight.mul_(3)
    return made


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    problem = make_problem(Size(3, 4, 1), random.Random(1))
    return [*problem.prompt_ids, *solve(problem).token_ids]


def test_wilson_interval_of_a_textbook_case() -> None:
    # 15 of 20: 0.531 to 0.888 (Newcombe 1998, method 3).
    low, high = Share(15, 20).wilson()

    assert (round(low, 3), round(high, 3)) == (0.531, 0.888)


def test_wilson_interval_of_all_reaches_one() -> None:
    low, high = Share(500, 500).wilson()

    assert high == pytest.approx(1.0)
    assert low == pytest.approx(500 / (500 + 1.959964**2))


def test_answer_is_the_digit_after_the_thinking() -> None:
    assert answer(encode(words("so 5 + f gives 2 . </think> the answer is 7 . <eos>"))) == 7
    assert answer(encode(words("so 5 + f gives 2 . </think> the answer"))) is None
    assert answer(encode(words("so 5 + f gives 2 ."))) is None


def test_luck_counts_what_cancels() -> None:
    # d keeps the total and is subtracted at once: the answer is 0 whatever f is, so all guesses are right.
    sure = read_problem("given f = 7 . plan 01 add f ; 02 keep d ; 03 minus d ; 04 stop ; start at 01 with 5 .")
    # The answer is 5 + f: one guess in ten is right.
    open_ = read_problem("given f = 7 . plan 01 add f ; 02 stop ; start at 01 with 5 .")

    assert luck([(sure, solve(sure))]) == 1.0
    assert luck([(open_, solve(open_))], draws=2000) == pytest.approx(0.1, abs=0.03)


def test_sentences_end_with_full_stops() -> None:
    assert sentences(encode(words("so d = 4 . so 4"))) == [0, 0, 0, 0, 0, 5, 5]


def test_generation_is_that_of_transformers(model: LlamaForCausalLM, tokens: list[int]) -> None:
    prompts = [tokens[:20], tokens[10:30]]

    wanted = model.generate(torch.tensor(prompts), max_new_tokens=12, do_sample=False, eos_token_id=None)

    found = generate(model, prompts, 12)
    for mine, row in zip(found, wanted.tolist(), strict=True):
        assert mine == row[20 : 20 + len(mine)]
        assert len(mine) == 12 or mine[-1] == EOS


@torch.no_grad()
def test_what_is_dropped_is_not_seen(model: LlamaForCausalLM, tokens: list[int]) -> None:
    prompt, dropped, count = tokens[:30], range(2, 29), 8
    # GIVEN a cache of transformers without the entries of those positions
    cache = DynamicCache()
    logits = model(torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, [0, 1, 29]], layer.values[:, :, [0, 1, 29]]
    # WHEN the model goes on with it, at the positions that come next
    wanted = []
    for step in range(count):
        wanted.append(int(logits[0, -1].argmax()))
        position = torch.tensor([[30 + step]])
        logits = model(
            torch.tensor([[wanted[-1]]]), position_ids=position, past_key_values=cache, use_cache=True
        ).logits
    # THEN it writes what it writes where they are dropped, and not what it writes with all of them
    found = generate(model, [prompt], count, drop=dropped)[0]
    assert found == wanted[: len(found)]
    assert found != generate(model, [prompt], count)[0]


def test_visibility_of_everything_but_the_sinks_is_one(model: LlamaForCausalLM, tokens: list[int]) -> None:
    position = 40

    shares = visibility(
        model, tokens, [Recall(position, "value", ((0, position),)), Recall(position, "value", ((0, SINKS),))]
    )

    assert torch.allclose(shares[0], torch.ones_like(shares[0]), atol=1e-5)
    assert (shares[1] == 0).all()


def test_visibility_of_two_halves_adds_up(model: LlamaForCausalLM, tokens: list[int]) -> None:
    halves = [Recall(40, "value", ((0, 17),)), Recall(40, "value", ((17, 40),))]

    shares = visibility(model, tokens, halves)

    assert torch.allclose(shares.sum(0), torch.ones_like(shares[0]), atol=1e-5)


def test_a_window_over_everything_hides_nothing(model: LlamaForCausalLM, tokens: list[int]) -> None:
    gains = long_range_gain(model, tokens, window=len(tokens))

    assert gains.abs().max() < 1e-4


def test_gain_is_that_of_sentences_run_one_by_one(model: LlamaForCausalLM, tokens: list[int]) -> None:
    window = 12
    found = long_range_gain(model, tokens, window)

    with torch.no_grad():
        whole = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        starts = sorted(set(sentences(tokens)))
        for start, stop in zip(starts[1:], [*starts[2:], len(tokens)], strict=True):
            # The past as the full run leaves it, then the sentence under a mask; row r predicts token r + 1.
            first = start - 1
            cache = DynamicCache()
            model(torch.tensor([tokens[:first]]), past_key_values=cache, use_cache=True)
            rows = torch.arange(first, stop - 1)
            columns = torch.arange(stop - 1)
            distance = rows[:, None] - columns
            sink = (columns < SINKS) & (columns < first)
            seen = (distance >= 0) & ((distance <= window) | sink)
            mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
            out = model(
                torch.tensor([tokens[first : stop - 1]]),
                attention_mask=mask,
                position_ids=rows[None],
                past_key_values=cache,
                use_cache=True,
            )
            blinded = out.logits[0].log_softmax(-1)
            for index, row in enumerate(rows.tolist()):
                wanted = whole[row, tokens[row + 1]] - blinded[index, tokens[row + 1]]
                assert found[row + 1] == pytest.approx(float(wanted), abs=2e-3)
    assert found.abs().max() > 0.1
