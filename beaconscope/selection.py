"""Lists of layers and heads as a user writes them."""

from __future__ import annotations

from beaconscope.errors import UsageError

_AUTO = 6


def select(text: str, count: int, what: str) -> tuple[int, ...]:
    """Read ``auto``, ``all``, or a list such as ``0,8,16`` or ``0-8:2``, of ``count`` things.

    Parameters
    ----------
    text
        The list. ``auto`` is up to six, spread evenly from the first to the last.
    count
        How many there are; they are numbered from 0.
    what
        Their name, for the error: ``layers``.

    Returns
    -------
    tuple of int
        Ascending, without repeats.

    Raises
    ------
    UsageError
        For what is no such list, or goes beyond ``count``.
    """
    text = text.strip()
    if text == "all":
        return tuple(range(count))
    if text == "auto":
        if count <= _AUTO:
            return tuple(range(count))
        return tuple(round(step * (count - 1) / (_AUTO - 1)) for step in range(_AUTO))
    chosen = _listed(text, what)
    if max(chosen) >= count:
        raise UsageError(f"{what} {text!r} goes to {max(chosen)}, but there are {count} (0 to {count - 1})")
    return tuple(sorted(chosen))


def check_selection(text: str, what: str) -> None:
    """Refuse what :func:`select` reads as no list, however many there are.

    Raises
    ------
    UsageError
        Saying so.
    """
    if text.strip() not in ("all", "auto"):
        _listed(text.strip(), what)


def _listed(text: str, what: str) -> set[int]:
    chosen: set[int] = set()
    for part in text.split(","):
        chosen.update(_range(part.strip(), text, what))
    return chosen


def _range(part: str, text: str, what: str) -> range:
    """One part of a list: ``8``, ``0-8`` or ``0-8:2``, the end included."""
    span, _, step = part.partition(":")
    first, dash, last = span.partition("-")
    numbers = [first, last if dash else first, step if ":" in part else "1"]
    if not all(number.strip().isascii() and number.strip().isdigit() and len(number) < 20 for number in numbers):
        raise UsageError(f"{what} {text!r} is no list; write all, auto, 0,8,16 or 0-8:2")
    start, end, stride = (int(number) for number in numbers)
    if end < start or stride < 1 or end > 100_000:
        raise UsageError(f"{what} {text!r} is no list; write all, auto, 0,8,16 or 0-8:2")
    return range(start, end + 1, stride)
