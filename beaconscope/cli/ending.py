"""How the text of a trace ends, for a person to see whether the model wrote sense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from beaconscope.cli.terminal import printable

if TYPE_CHECKING:
    from beaconscope.trace import Trace

_SHOWN = 200


def ending(trace: Trace) -> str:
    """The end of what comes after the prompt, on one line; empty where nothing does."""
    # A token may be a part of a character, which has at most four bytes, but none is less than a byte.
    last = trace.tokens["token_bytes"][max(trace.prompt_length, trace.length - 4 * _SHOWN) :]
    text = printable(b"".join(last).decode(errors="replace"))
    return text if len(text) <= _SHOWN else f"... {text[-_SHOWN:].lstrip()}"
