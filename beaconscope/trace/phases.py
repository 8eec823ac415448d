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

    The markers are searched in the bytes of the text, so they are found however they are tokenised: as one token,
    over several, or within one. Then

    1. the first ``prompt_length`` tokens are ``prompt``;
    2. the generation begins inside a thought only if the prompt ends with the opening marker, which white space may
       follow. Chat templates of reasoning models end so. Markers anywhere else in the prompt have no effect: they are
       text of the user, an example, or a thought that the template opened and closed;
    3. from an opening marker to the closing one that follows, markers included, tokens are ``think``; a token that
       holds both thought and answer counts as ``think``. A thought that is never closed reaches to the end;
    4. everything else is ``answer``, also what comes before a closing marker where no thought is open.

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
    """Byte ranges, ascending and disjoint, of the thoughts in the generation, markers included."""
    if not think_open or not think_close:
        return []
    # The longer alternative first, in case one marker begins with the other.
    pattern = b"|".join(re.escape(marker) for marker in sorted({think_open, think_close}, key=len, reverse=True))
    markers = list(re.finditer(pattern, text))
    of_prompt = [marker for marker in markers if marker.end() <= prompt_end]

    inside = _opens_a_thought(text[:prompt_end], of_prompt, think_open, think_close)
    begin = prompt_end
    thoughts: list[tuple[int, float]] = []
    for marker in markers[len(of_prompt) :]:
        if inside and marker.group() == think_close:
            thoughts.append((begin, marker.end()))
            inside = False
        elif not inside and marker.group() == think_open:
            begin = marker.start()
            inside = True
    if inside:
        thoughts.append((begin, float("inf")))
    return thoughts


def _opens_a_thought(prompt: bytes, markers: Sequence[re.Match[bytes]], think_open: bytes, think_close: bytes) -> bool:
    """Whether a prompt ends with an opening marker; where both markers are the same text, with an odd number."""
    end, trailing = len(prompt), 0
    for marker in reversed(markers):
        if prompt[marker.end() : end].strip():
            break
        end, trailing = marker.start(), trailing + 1
        if think_open != think_close:
            return marker.group() == think_open
    return trailing % 2 == 1
