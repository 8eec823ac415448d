"""Numbers with their units, as people read them."""

from __future__ import annotations


def in_bytes(count: float) -> str:
    """Say a number of bytes in decimal units, with three digits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:  # from there on it is a thousand in three digits
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
