"""Kinds of token, for policies that treat special tokens and punctuation in their own way."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from enum import IntEnum

import torch
from torch import Tensor


class TokenKind(IntEnum):
    """What a token is."""

    PLAIN = 0
    SPECIAL = 1
    """Stands for no text of its own, such as the begin of a sequence or a turn."""
    PUNCTUATION = 2
    """Nothing but punctuation, and space around it."""


def token_kinds(pieces: Sequence[bytes], special: Collection[int]) -> Tensor:
    """The kind of every token.

    Parameters
    ----------
    pieces
        The bytes that each token stands for, by id.
    special
        Ids of the special tokens.

    Returns
    -------
    Tensor
        uint8 [V], a :class:`TokenKind` for each id.
    """
    kinds = [TokenKind.PUNCTUATION if _is_punctuation(piece) else TokenKind.PLAIN for piece in pieces]
    for index in special:
        kinds[index] = TokenKind.SPECIAL
    return torch.tensor(kinds, dtype=torch.uint8)


def _is_punctuation(piece: bytes) -> bool:
    try:
        text = piece.decode().strip()
    except UnicodeDecodeError:  # a part of a character
        return False
    return bool(text) and all(unicodedata.category(character).startswith("P") for character in text)
