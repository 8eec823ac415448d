"""Say in words whether revisiting queries form few groups; it must be able to say no, and that it cannot tell."""

from __future__ import annotations

from typing import Any

import pandas as pd
from scipy.stats import false_discovery_control

from beaconscope.analyze.clusters import FEWEST_REVISITS, GROUPS

FEWEST = 20
"""Revisits of a trace below which nothing is said."""
_LEVEL = 0.05


def judge(summary: dict[str, Any], clusters: pd.DataFrame, *, asked: bool = True) -> dict[str, Any]:
    """Answer ``yes``, ``no``, ``not enough`` or ``not asked``.

    Yes where, in at least half of the tested query heads, revisits lie in fewer clusters than chance would have it
    (Benjamini-Hochberg at 5 % over the heads), and in no more than half as many as there are. Heads are tested before
    the rotary embedding where the trace has one, and need eight revisits.

    Parameters
    ----------
    summary
        Of the analysis: ``steps``, ``missing_steps``, ``revisits`` and ``window``.
    clusters
        One row per clustered query head and space.
    asked
        Whether queries were to be clustered at all.

    Returns
    -------
    dict
        ``question``, ``answer``, ``text``, ``revisits``, ``tested_heads``, ``concentrated_heads``, ``clustered_heads``,
        ``median_groups``, ``median_p``, ``space``, ``would_change``.
    """
    revisits = summary["revisits"]
    space = "pre-rope" if (clusters["space"] == "pre-rope").any() else "post-rope"
    rows = clusters[clusters["space"] == space]
    tested = rows[rows["concentration_p"].notna()]
    result: dict[str, Any] = {
        "question": "revisiting queries form few groups",
        "revisits": revisits,
        "space": space,
        "tested_heads": len(tested),
        "concentrated_heads": 0,
        "clustered_heads": int(tested["clustered"].sum()),
        "median_groups": float(tested["groups"].median()) if len(tested) else None,
        "median_p": float(tested["concentration_p"].median()) if len(tested) else None,
    }
    if not asked:
        return result | {
            "answer": "not asked",
            "text": f"Not asked: {revisits} revisits found, and no query head's queries were to be clustered "
            "(cluster_heads is 0).",
            "would_change": "cluster_heads of 1 or more",
        }
    if summary["steps"] == 0 and summary["missing_steps"]:
        return result | {
            "answer": "not enough",
            "text": "Not enough to tell: no step is known of all heads, because queries or keys are not finite.",
            "would_change": "a recording that is finite, made with --dtype bfloat16 where the model ran in float16",
        }
    if summary["steps"] == 0:
        return result | {
            "answer": "not enough",
            "text": "Not enough to tell: the trace has no generated token with distant context.",
            "would_change": f"a generation that goes more than {summary['window']} tokens beyond its beginning",
        }
    if revisits < FEWEST or not len(tested):
        return result | {
            "answer": "not enough",
            "text": f"Not enough revisits to tell: {revisits} found; the question needs {FEWEST}, and "
            f"{FEWEST_REVISITS} of one query head.",
            "would_change": "that many: a longer trace, or options that count weaker looks (lone_share, min_share)",
        }
    q = false_discovery_control(tested["concentration_p"].to_numpy(), method="bh")
    few = (q <= _LEVEL) & (tested["groups"].to_numpy() <= GROUPS / 2) & (tested["effect"].to_numpy() > 0)
    count = int(few.sum())
    result["concentrated_heads"] = count
    numbers = (
        f"in {count} of {len(tested)} query heads tested, revisits lie in few of {GROUPS} clusters of queries "
        f"(effective number at the median {result['median_groups']:.1f}, p {result['median_p']:.3f}, {space})"
    )
    half = len(tested) / 2
    if count >= half:
        return result | {
            "answer": "yes",
            "text": f"Yes: {numbers}.",
            "would_change": f"more than half of the tested heads beyond a false discovery rate of {_LEVEL:g} "
            f"or with more than {GROUPS // 2} clusters in effect",
        }
    return result | {
        "answer": "no",
        "text": f"No: only {numbers}." if count else f"No: {numbers}.",
        "would_change": f"at least half of the tested heads within a false discovery rate of {_LEVEL:g} "
        f"and with at most {GROUPS // 2} clusters in effect",
    }
