"""The bytes of single tokens, for each kind of vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from beaconscope.models import token_bytes
from tests.tiny import THINK_OPEN, tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer()


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=20))
def test_of_a_byte_level_vocabulary_they_are_the_text(text):
    ids = BYTE_LEVEL(text).input_ids
    assert b"".join(token_bytes(BYTE_LEVEL, ids)) == text.encode()


def test_a_byte_level_token_may_hold_part_of_a_character():
    assert token_bytes(BYTE_LEVEL, list("é".encode())) == [b"\xc3", b"\xa9"]


def test_a_byte_level_token_of_several_bytes():
    # What byte-level BPE writes for a space and for the two bytes of é.
    vocabulary = {"Ġ": 0, "Ã": 1, "©": 2, "Ã©": 3, "ĠÃ": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ã", "©"), ("Ġ", "Ã")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert token_bytes(fast, [3, 4, 2]) == ["é".encode(), b" \xc3", b"\xa9"]


def sentencepiece(decoder) -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "é": 4, "<0xF0>": 5, "<0x9F>": 6, "<0x99>": 7, "<0x82>": 8}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]),
    ],
)
def test_of_a_sentencepiece_vocabulary_they_are_the_text(decoder):
    tokenizer = sentencepiece(decoder)
    text = "a aé 🙂"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == [2, 3, 4, 1, 5, 6, 7, 8]
    assert token_bytes(tokenizer, ids) == [b"a", b" a", "é".encode(), b" ", b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert b"".join(token_bytes(tokenizer, ids)).decode() == text


def test_without_a_known_decoder_they_are_what_the_tokenizer_says():
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert token_bytes(fast, [1]) == [b"play"]
    assert token_bytes(fast, [2]) == [fast.decode([2]).encode()]


def test_special_tokens_give_their_name():
    assert token_bytes(BYTE_LEVEL, [THINK_OPEN, 97]) == [b"<think>", b"a"]


def test_a_row_of_the_embedding_that_no_token_has():
    assert token_bytes(BYTE_LEVEL, [999_999]) == [b"<999999>"]


def test_no_tokens():
    assert token_bytes(BYTE_LEVEL, []) == []
