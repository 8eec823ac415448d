"""The static masks, by what the query at ``t`` may see of position ``p``."""

from __future__ import annotations


def longformer(t: int, p: int, budget: int, global_tokens: int) -> bool:
    """The first tokens, and a window that makes up the budget."""
    return p <= t and (p < global_tokens or t - p < budget - global_tokens)


def etc(t: int, p: int, budget: int, segment: int) -> bool:
    """The last token of every segment so far stands for it; the window makes up the budget, one segment at least."""
    finished = (t + 1) // segment
    return p <= t and ((p + 1) % segment == 0 or t - p < max(budget - finished, segment))


def bigbird_certain(t: int, p: int, budget: int, global_tokens: int, random_blocks: int, block: int) -> bool:
    """What BigBird sees without the random blocks."""
    return p <= t and (p < global_tokens or t - p < budget - global_tokens - random_blocks * block)
