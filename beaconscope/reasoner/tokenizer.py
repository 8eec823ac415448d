"""The reasoner's tokenizer, an ordinary transformers one: a word with the space before it is a token.

The space belongs to the token, as in byte-level tokenizers, so that single tokens put side by side read well.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from beaconscope.reasoner.vocabulary import SPECIAL, WORDS

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<user> ' + message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}{{ '<assistant>' + message['content'] + '<eos>' }}"
    "{% else %}{{ raise_exception('the bundled reasoner knows only the roles user and assistant') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer, with its chat template."""
    vocabulary = {word if word in SPECIAL else f"Ġ{word}": index for index, word in enumerate(WORDS)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(left=False, right=True)]
    )
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "merged_with_next"),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    # The thinking marks are no special tokens, so that they stay in a text that is decoded without those.
    inner.add_tokens([AddedToken(mark, normalized=False, lstrip=True) for mark in ("<think>", "</think>")])
    factory: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = factory(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=2048,
    )
    return made
