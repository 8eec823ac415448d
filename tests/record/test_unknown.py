"""Tokens that a model does not know are spoken of; a trace of them says nothing."""

from __future__ import annotations

import warnings

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from beaconscope import BeaconScopeError, LoadOptions, RecordOptions, load_model, record
from beaconscope.record import Prompt, record_prompts
from beaconscope.record.encode import count_unknown
from tests.record.recording import PROMPT, endless_tokenizer
from tests.tiny import tiny_model, tiny_tokenizer

BUNDLED = " It reads only problems of its own, as `python -m beaconscope.reasoner` prints them."


@pytest.fixture(scope="module")
def reasoner():
    return load_model(LoadOptions("tiny-reasoner", device="cpu"))


def words(**special) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "add": 1, "two": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.mark.parametrize(
    ("tokenizer", "texts", "found"),
    [
        (words(unk_token="<unk>"), ["add three", "two four five"], (3, 5)),
        (words(unk_token="<unk>"), ["add two"], (0, 2)),
        # A text that speaks of the token is known.
        (words(unk_token="<unk>"), ["add <unk> six"], (1, 3)),
        # As GPT-2, which knows everything, names its end.
        (words(unk_token="<unk>", eos_token="<unk>"), ["add <unk>"], (0, 0)),
        (words(), ["add three"], (0, 0)),
        (tiny_tokenizer(), ["é 🙂"], (0, 0)),
    ],
)
def test_unknown_tokens_are_counted_where_the_tokenizer_has_a_token_for_them(tokenizer, texts, found):
    assert count_unknown(tokenizer, texts) == found


def test_a_prompt_that_the_bundled_model_cannot_read_is_said(reasoner, tmp_path):
    notes = []
    options = RecordOptions(max_new_tokens=2, completion="<think> so hello")
    arguments = (reasoner.model, reasoner.tokenizer, "What is the answer ?", options)
    record(*arguments, output=tmp_path / "t", note=notes.append)
    cannot = "unknown to this model (<unk>), which cannot tell them apart."
    assert notes[0] == f"2 of 5 tokens of the prompt are {cannot}{BUNDLED}"
    assert notes[1] == f"1 of 3 tokens of the completion is {cannot}{BUNDLED}"
    with warnings.catch_warnings(record=True) as warned:
        record(*arguments, output=tmp_path / "u")
    assert [str(each.message) for each in warned if each.filename == __file__] == notes[:2]


def test_many_prompts_are_named(reasoner, tmp_path):
    notes = []
    prompts = [Prompt("good", "given f = 7 ."), Prompt("bad", "given a name")]
    options = RecordOptions(max_new_tokens=2)
    record_prompts(reasoner.model, reasoner.tokenizer, prompts, options, folder=tmp_path / "many", note=notes.append)
    (said,) = (note for note in notes if "unknown" in note)
    assert said.startswith("1 of 3 tokens of the prompt bad is unknown to this model")


def test_nothing_is_said_of_a_prompt_that_the_model_knows(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = RecordOptions(max_new_tokens=2, raw=True)
        record(tiny_model(), endless_tokenizer(), PROMPT, options, output=tmp_path / "t")


@pytest.mark.parametrize(("prompt", "completion"), [("a zebra", None), ("a", "zebra")])
def test_a_token_that_the_model_has_no_embedding_of_is_refused(tmp_path, prompt, completion):
    tokenizer = endless_tokenizer()
    tokenizer.add_tokens(["zebra"])
    options = RecordOptions(raw=True, completion=completion)
    with pytest.raises(BeaconScopeError, match=r"has token 264 \(zebra\), and the model only 264 tokens"):
        record(tiny_model(), tokenizer, prompt, options, output=tmp_path / "t")
    # Without it the same tokenizer will do.
    record(tiny_model(), tokenizer, "a", RecordOptions(raw=True, max_new_tokens=2), output=tmp_path / "t")
