"""What a caller may ask to be told while work goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Told how far the work is, as often as it likes."""

    def __call__(self, done: int, total: int | None, /) -> None:
        """``done`` of ``total`` units are done; None where the total is not known."""


Note = Callable[[str], None]
"""Told, in a sentence, what the user should know."""
