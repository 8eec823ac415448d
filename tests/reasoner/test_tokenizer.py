"""The tokenizer as transformers loads it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from beaconscope.reasoner.task import SIZES, make_problem, solve
from beaconscope.reasoner.tokenizer import make_tokenizer
from beaconscope.reasoner.vocabulary import WORDS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_chat_template_gives_the_prompt_of_the_training(tokenizer: Any) -> None:
    for name, size in SIZES.items():
        problem = make_problem(size, random.Random(name))
        message = [{"role": "user", "content": f"\n{problem.text}\n"}]

        found = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)

        assert list(found) == problem.prompt_ids


def test_text_of_a_chain_goes_to_tokens_and_back(tokenizer: Any) -> None:
    problem = make_problem(SIZES["250"], random.Random(0))
    token_ids = [*problem.prompt_ids, *solve(problem).token_ids]

    text = tokenizer.decode(token_ids)

    assert tokenizer(text, add_special_tokens=False)["input_ids"] == token_ids
    assert "".join(tokenizer.decode([token]) for token in token_ids) == text


def test_thinking_marks_stay_where_special_tokens_go(tokenizer: Any) -> None:
    problem = make_problem(SIZES["250"], random.Random(0))

    text = tokenizer.decode(solve(problem).token_ids, skip_special_tokens=True)

    assert text.startswith("<think> start at")
    assert "</think> the answer is" in text
    assert "<eos>" not in text


def test_unknown_words_become_the_unknown_token(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  zebra")["input_ids"]) == ["Ġa", "<unk>"]


def test_tokenizer_and_vocabulary_agree(tokenizer: Any) -> None:
    assert len(tokenizer) == len(WORDS)
    assert tokenizer.eos_token == "<eos>"


def test_another_role_is_refused(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="only the roles user and assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "be brief"}], tokenize=False)
