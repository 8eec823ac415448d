"""Where a generation thinks and where it answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from beaconscope.trace.schema import Phase


def split_phases(
    token_bytes: Sequence[bytes],
    prompt_length: int,
    think_open: str = "<think>",
    think_close: str = "</think>",
) -> list[Phase]:
    """Name the phase of every token.

    The markers are looked for in the bytes of the text, so they are found however they are tokenised: as one token,
    over several, or within one. Then

    1. the first ``prompt_length`` tokens are ``prompt``;
    2. from an opening marker to the closing one that follows, markers included, tokens are ``think``; a token that
       holds both thought and answer counts as ``think``. A thought that is never closed reaches to the end;
    3. a prompt that leaves a thought open (templates that append ``<think>``) starts the generation in it, unless the
       generation opens one itself before it closes any: then the prompt only spoke of the marker;
    4. a generation that closes a thought which nothing opened was thinking from its start;
    5. everything else is ``answer``.

    Parameters
    ----------
    token_bytes : sequence of bytes, length T
        The bytes of each token alone; together they are the text.
    prompt_length : int
        How many of them are the prompt.
    think_open, think_close : str
        The markers. They may be the same text; if either is empty nothing is a thought.

    Returns
    -------
    list of {"prompt", "think", "answer"}, length T
    """
    ends = list(accumulate(map(len, token_bytes)))
    starts = [0, *ends[:-1]] if ends else []
    prompt_end = ends[prompt_length - 1] if prompt_length else 0
    thoughts = _thoughts(b"".join(token_bytes), prompt_end, think_open.encode(), think_close.encode())

    phases: list[Phase] = ["prompt" if token < prompt_length else "answer" for token in range(len(ends))]
    token = prompt_length
    for first, last in thoughts:
        # An empty token (a special token without text) goes with the byte that follows it.
        while token < len(ends) and max(ends[token], starts[token] + 1) <= first:
            token += 1
        while token < len(ends) and starts[token] < last:
            phases[token] = "think"
            token += 1
    return phases


def _thoughts(text: bytes, prompt_end: int, think_open: bytes, think_close: bytes) -> list[tuple[int, float]]:
    """Byte ranges, ascending and apart, of the thoughts in the generation, markers included."""
    if not think_open or not think_close:
        return []
    one_marker = think_open == think_close
    # The longer alternative first, in case one marker begins with the other.
    pattern = b"|".join(re.escape(marker) for marker in sorted({think_open, think_close}, key=len, reverse=True))
    markers = list(re.finditer(pattern, text))
    generated = [marker for marker in markers if marker.end() > prompt_end]

    inside = False
    for marker in markers[: len(markers) - len(generated)]:
        inside = not inside if one_marker else marker.group() == think_open
    if generated and not one_marker:
        # The first marker of the generation tells what came before it.
        inside = generated[0].group() == think_close
    begin = prompt_end

    thoughts: list[tuple[int, float]] = []
    for marker in generated:
        if inside and marker.group() == think_close:
            thoughts.append((begin, marker.end()))
            inside = False
        elif not inside and marker.group() == think_open:
            begin = marker.start()
            inside = True
    if inside:
        thoughts.append((begin, float("inf")))
    return thoughts
