"""What the recording's own cache had evicted of what the queries look at."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from beaconscope.analyze.events import Events
from beaconscope.analyze.heads import head_name
from beaconscope.analyze.places import Text

_COLUMNS = ["position", "writes", "lost_share", "lost_position", "evicted_at", "head", "text"]
_AROUND = 8
"""Tokens shown around a lost position."""


def cache_consequences(
    evicted: dict[tuple[int, int], npt.NDArray[np.int64]],
    distant: npt.NDArray[np.float64],
    lost: npt.NDArray[np.float64],
    steps: range,
    heads: list[dict[str, Any]],
    events: Events,
    head_of: npt.NDArray[np.int64],
    revisits: pd.DataFrame,
    text: Text,
) -> tuple[dict[str, Any], pd.DataFrame]:
    """How much of the distant attention went to evicted positions.

    Parameters
    ----------
    evicted
        When each position left, [T], of each head that lost any.
    distant, lost
        Distant attention of each step over all heads, and its part on evicted positions, [T].
    steps
        The generating steps.
    heads, events, head_of
        The query heads, their global queries, and the head of each.
    revisits
        The thought-revisiting tokens.
    text
        The trace's text.

    Returns
    -------
    dict
        ``evicts``, ``distant_lost`` (share of the distant attention), ``revisit_lost`` (share of the distant attention
        of the revisits' global queries, as far as its positions are kept), ``revisits_hit`` (revisits that lost at
        least half).
    DataFrame
        The revisits that lost something, worst first, with the most attended lost position.
    """
    if not evicted:
        return {"evicts": False, "distant_lost": None, "revisit_lost": None, "revisits_hit": None}, pd.DataFrame(
            columns=_COLUMNS
        )
    rows = []
    wanted, gone = 0.0, 0.0
    writes = dict(zip(revisits["position"].tolist(), revisits["writes"].tolist(), strict=True))
    for step in sorted(writes):
        index = np.flatnonzero(events.step == step)
        mass = events.target_mass[index].astype(np.float64)
        missing = np.zeros_like(mass, np.bool_)
        left = np.zeros(mass.shape, np.int64)
        for row, event in enumerate(index):
            head = heads[head_of[event]]
            at = evicted.get((head["layer"], head["kv_head"]))
            if at is not None:
                left[row] = at[np.maximum(events.target[event], 0)]
                missing[row] = (left[row] < step) & (events.target[event] >= 0)
        of_step = float((mass * missing).sum())
        wanted += float(mass.sum())
        gone += of_step
        if of_step > 0:
            row, column = divmod(int(np.argmax(mass * missing)), mass.shape[1])
            place = int(events.target[index[row], column])
            head = heads[head_of[index[row]]]
            rows.append(
                {
                    "position": step,
                    "writes": writes[step],
                    "lost_share": of_step / float(mass.sum()),
                    "lost_position": place,
                    "evicted_at": int(left[row, column]),
                    "head": head_name(head["layer"], head["kv_head"], head["query_head"]),
                    "text": text.text(max(0, place - _AROUND), min(step, place + _AROUND + 1)),
                }
            )
    frame = pd.DataFrame(rows, columns=_COLUMNS)
    frame = frame.sort_values(["lost_share", "position"], ascending=[False, True], ignore_index=True)
    rest = slice(steps.start, steps.stop)
    total = float(distant[rest].sum())
    return {
        "evicts": True,
        "distant_lost": float(lost[rest].sum()) / total if total else None,
        "revisit_lost": gone / wanted if wanted else None,
        "revisits_hit": int((frame["lost_share"] >= 0.5).sum()),
    }, frame
