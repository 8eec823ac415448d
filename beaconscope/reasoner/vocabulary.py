"""The words of the bundled reasoner: one word is one token.

The ids are the places in ``WORDS``; the tokenizer is made from the same tuple, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SPECIAL = ("<pad>", "<unk>", "<user>", "<assistant>", "<eos>", "<think>", "</think>")
DIGITS = tuple("0123456789")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
LABELS = tuple(f"{number:02d}" for number in range(1, 49))
PLAIN = (
    *("given", "plan", "start", "at", "with", "step", "the", "total", "is", "recall", "for"),
    *("add", "subtract", "keep", "stop", "so", "gives", "answer", "=", ",", ";", ".", ":", "+", "-", "plus", "minus"),
)
WORDS = SPECIAL + DIGITS + LETTERS + LABELS + PLAIN

_ID = {word: index for index, word in enumerate(WORDS)}

PAD = _ID["<pad>"]
EOS = _ID["<eos>"]


def encode(words: Iterable[str]) -> list[int]:
    """Token ids of words.

    Raises
    ------
    KeyError
        For a word that the reasoner does not know.
    """
    return [_ID[word] for word in words]


def decode(token_ids: Sequence[int]) -> list[str]:
    """Words of token ids."""
    return [WORDS[index] for index in token_ids]
