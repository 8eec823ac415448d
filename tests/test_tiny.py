"""The models that the other tests stand on."""

import pytest
import torch

from tests.tiny import (
    ARCHITECTURES,
    ASSISTANT,
    BOS,
    EOS,
    SPECIAL_TOKENS,
    USER,
    VOCABULARY,
    tiny_model,
    tiny_tokenizer,
)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_tiny_model_generates_the_same_twice(arch):
    # GIVEN two models of the same seed and a prompt longer than the sliding window
    prompt = torch.arange(24)[None]
    # WHEN both generate greedily
    first, second = (tiny_model(arch).generate(prompt, max_new_tokens=8, do_sample=False) for _ in range(2))
    # THEN they agree, never stop early, and stay in the vocabulary
    assert first.tolist() == second.tolist()
    assert first.shape == (1, 32)
    assert int(first.max()) < VOCABULARY


def test_another_seed_gives_another_model():
    prompt = torch.arange(24)[None]
    with torch.no_grad():
        assert not torch.allclose(tiny_model(seed=0)(prompt).logits, tiny_model(seed=1)(prompt).logits)


def test_making_a_model_leaves_the_random_state_alone():
    state = torch.random.get_rng_state()
    tiny_model()
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_token_is_a_byte():
    tokenizer = tiny_tokenizer()
    text = "plan: 12 € → \n\t"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_have_the_ids_that_the_module_names():
    tokenizer = tiny_tokenizer()
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(256, VOCABULARY))
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.eos_token_id == EOS
    assert tokenizer("<think>")["input_ids"] == [VOCABULARY - 2]


def test_the_chat_template_marks_who_speaks():
    ids = tiny_tokenizer().apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert ids == [BOS, USER, *b"hi\n", ASSISTANT]
