"""The text of tokens as it may be shown: joined where a letter spans tokens, and nothing in it that acts.

Control characters and marks that turn the direction of text are shown as visible signs. White space stays, because it
is the layout of the text.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterable, Sequence

LONGEST = 400
"""Characters shown of a token."""
REDACTED = "▒▒▒"
_KEPT = "\n\t"


def shown_tokens(token_bytes: Iterable[bytes]) -> list[str]:
    """What to show of each token.

    A character whose bytes lie in several tokens is shown with the first of them, and the others are empty. What is no
    UTF-8 at all is shown as U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    begun: int | None = None  # the token in which a character that is not yet whole began
    for number, raw in enumerate(token_bytes):
        text = decoder.decode(raw)
        waiting = len(decoder.getstate()[0])
        if begun is not None and text:
            texts[begun] += text[0]
            text = text[1:]
            begun = None
        if waiting == 0:
            begun = None
        elif begun is None:
            begun = number
        texts.append(text)
    if begun is not None:
        texts[begun] += decoder.decode(b"", final=True)
    return [visible(text) for text in texts]


def visible(text: str) -> str:
    """``text`` with controls and marks of direction as signs, cut where it is very long."""
    shown = "".join(_sign(letter) for letter in text[: LONGEST + 1])
    return shown if len(text) <= LONGEST else f"{shown[:LONGEST]}… ({len(text):,} characters)"


def _sign(letter: str) -> str:
    if letter in _KEPT:
        return letter
    code = ord(letter)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    # Controls, formats (marks of direction among them), halves of surrogate pairs, private and line separators.
    if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") and letter != "\u200d":
        return f"⟨{code:04X}⟩"
    return letter


def redacted(texts: Sequence[str]) -> list[str]:
    """A mark in place of each text; line breaks and a leading space stay, so that the layout can be read."""
    return [
        (" " if text[:1] == " " else "") + (REDACTED if text.strip() else "") + "\n" * text.count("\n")
        for text in texts
    ]
