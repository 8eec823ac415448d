"""The exact bytes of single tokens, which decoding them alone does not always give."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[bytes]:
    """The bytes that each token stands for in a text.

    A byte-level token may hold part of a character; joined, the bytes of consecutive tokens are the text. Special
    tokens give their name.

    Parameters
    ----------
    tokenizer
        Any tokenizer; byte-level and SentencePiece vocabularies are told apart by its decoder.
    ids
        Token ids.
    """
    named = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    kinds = _decoder_kinds(tokenizer)
    result = []
    for index, piece in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        if index in named:
            result.append(named[index].encode())
        elif piece is None:  # a row of the embedding that no token has
            result.append(f"<{index}>".encode())
        elif "ByteLevel" in kinds:
            result.append(_from_byte_level(piece))
        elif "ByteFallback" in kinds and (match := _BYTE_TOKEN.fullmatch(piece)):
            result.append(bytes([int(match.group(1), 16)]))
        elif kinds & {"ByteFallback", "Metaspace", "Replace"}:  # SentencePiece
            result.append(piece.replace("▁", " ").encode())
        else:
            result.append(str(tokenizer.decode([index])).encode())
    return result


def _decoder_kinds(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The kinds of decoder in a fast tokenizer's chain; empty for a tokenizer that has none."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return set()
    # The whole tokenizer as JSON would say the same, in half a second for a large vocabulary.
    decoder = json.loads(backend.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return {part["type"] for part in parts}


def _from_byte_level(piece: str) -> bytes:
    table = _byte_level_table()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return piece.encode()


@lru_cache(maxsize=1)
def _byte_level_table() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, reversed."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + rank): byte for rank, byte in enumerate(others)}
