"""Query heads: what they are called, what kind each is, and which are the busiest."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import kurtosis

from beaconscope.analyze.scan import HeadScan

RETRIEVES = 0.1
"""A head whose retrieval score is above this is a retrieval head (Wu et al. 2024)."""


def head_name(layer: int, kv_head: int, query_head: int) -> str:
    """What a query head is called in tables: ``layer.kv_head.query_head``."""
    return f"{layer}.{kv_head}.{query_head}"


def busiest_heads(heads: pd.DataFrame, count: int) -> pd.DataFrame:
    """The ``count`` query heads with the most revisits, then events, then distant attention, of one row per head."""
    order = heads.sort_values(["revisits", "events", "distant_share"], ascending=False, kind="stable")
    return order.head(count)


def vertical_kurtosis(vertical: npt.NDArray[np.float64]) -> float:
    """Excess kurtosis of a vertical score [S]; nan entries are left out, and with fewer than four it is nan.

    A head of which it is high sends its attention to few sentences: a receiver head (Thought Anchors, arXiv
    2506.19143).
    """
    known = vertical[~np.isnan(vertical)]
    if len(known) < 4 or np.ptp(known) == 0:
        return float("nan")
    return float(kurtosis(known))


def retrieval_score(top: npt.NDArray[np.int64], token_id: npt.NDArray[np.int64], first_step: int, window: int) -> float:
    """Share of the tokens that could be copied from far back which a head did copy (after Wu et al. 2024).

    A step could copy what it writes if that token also stands more than ``window`` tokens back; the head copies it if
    its most attended position is such a place. Both are counted in distinct tokens.

    Parameters
    ----------
    top
        Most attended position of each step, [T]; -1 where unknown, which counts for neither.
    token_id
        [T].
    first_step
        The first step that writes.
    window
        Tokens back from which on a position is distant.

    Returns
    -------
    float
        In [0, 1]; nan where nothing could be copied.
    """
    first_seen: dict[int, int] = {}
    could: set[int] = set()
    did: set[int] = set()
    for position, token in enumerate(token_id.tolist()):
        first_seen.setdefault(token, position)
    for step in range(first_step, len(token_id) - 1):
        token, at = int(token_id[step + 1]), int(top[step])
        if at >= 0 and first_seen[token] < step - window:
            could.add(token)
            if at < step - window and token_id[at] == token:
                did.add(token)
    return len(did) / len(could) if could else float("nan")


def head_row(
    layer: int,
    kv_head: int,
    group: int,
    scanned: HeadScan,
    events: int,
    steps: range,
    token_id: npt.NDArray[np.int64],
    window: int,
) -> dict[str, Any]:
    """All about one query head but what needs the whole trace."""
    share = scanned.share[group, steps.start : steps.stop]
    known = share[~np.isnan(share)]
    return {
        "layer": layer,
        "kv_head": kv_head,
        "query_head": group,
        "steps": len(known),
        "events": events,
        "event_rate": events / len(known) if len(known) else float("nan"),
        "distant_share": float(np.median(known)) if len(known) else float("nan"),
        "kurtosis": vertical_kurtosis(scanned.vertical[group]),
        "retrieval": retrieval_score(scanned.top[group], token_id, steps.start, window),
        "sinks": scanned.sinks[group],
        "distance_profile": scanned.distance[group].tolist(),
    }
