"""From the measures of every setting and head to tables, a Pareto front and an answer in words.

The figure that settings are ranked by is the attention mass retained of TRT queries, or of all decoding queries where a
trace has no TRT. Settings are compared head by head: the difference of two settings on one head, mean over their seeds,
is one observation, and the bootstrap draws heads, and the seeds of each, with replacement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from beaconscope.kv.policies import BeaconKV, Policy
from beaconscope.replay.grid import label, random_queries, recent_only
from beaconscope.units import in_bytes

_HEAD = ["trace", "layer", "kv_head"]
_DRAWS = 2000
_NAMED = 6
"""KV heads that a sentence names."""
_NEAR = 0.01
"""Retained mass within this of the best is as good."""

MEANS = (
    "mass", "mass_trt", "hit_rate", "hit_rate_trt", "output_error", "output_error_trt", "regrets", "regrets_trt",
    "regret_delay", "entries", "entries_peak", "evicted", "compressions", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """How much more of a figure one setting has than another, paired by head."""

    than: str
    mean: float
    low: float
    """Lower end of the 95 % interval of the bootstrap."""
    high: float

    @property
    def exceeds_spread(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Answer:
    """What a sweep says."""

    text: str
    figure: str
    """``mass_trt``, or ``mass`` where there is no TRT."""
    best: str | None
    """The cheapest setting that is as good as the best."""
    beacon: str | None
    """The BeaconKV setting that was compared."""
    differences: dict[str, Difference]
    """By control: ``recent only``, ``random queries``, ``random eviction``."""
    missing: list[dict[str, Any]]
    """KV heads of which some decoding queries were not measured, as the recording is not finite there: ``trace``,
    ``layer``, ``kv_head``, ``queries`` (measured) and ``missing``."""


def ranked_by(frame: pd.DataFrame) -> str:
    """The figure that settings are ranked by."""
    return "mass_trt" if frame["trts"].sum() > 0 else "mass"


def by_setting(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per setting, best first within each budget.

    Parameters
    ----------
    frame
        Of :class:`~.sweep.Found`.

    Returns
    -------
    DataFrame
        ``setting``, ``policy``, ``budget`` (NaN where it has none), ``interval``, ``params``, ``live``, ``seeds``; the
        means over heads and seeds of all measures; ``kv_bytes``, ``queries`` and ``missing`` (decoding queries measured
        and not), sums over heads; ``spread``, the standard deviation over seeds of the ranked figure; ``to_oracle`` and
        ``over_random``, how far the ranked figure is below the oracle's and above random eviction's at the same budget
        and interval (or the nearest interval that was run); ``pareto``, whether no setting that works live has as much
        for less memory.
    """
    figure = ranked_by(frame)
    groups = frame.groupby("setting", sort=False)
    table = groups[["policy", "budget", "interval", "params", "live"]].first()
    table["seeds"] = groups["seed"].nunique().clip(lower=1)
    # Heads first: a trace with many heads would weigh no more for having more seeds.
    for name in MEANS:
        table[name] = groups[name].mean()
    for name in ("kv_bytes", "queries", "missing"):
        table[name] = groups[name].sum() / table["seeds"]
    # A sum without the head whose memory is not known would be too small.
    unknown = frame["kv_bytes"].isna().groupby(frame["setting"], sort=False).any()
    table["kv_bytes"] = table["kv_bytes"].where(~unknown)
    per_seed = frame.groupby(["setting", frame["seed"].fillna(0)], sort=False)[figure].mean()
    table["spread"] = per_seed.groupby(level=0).std()
    table = table.reset_index()
    for column, policy, sign in (("to_oracle", "oracle", -1), ("over_random", "random", 1)):
        distance = [sign * (row[figure] - _control(table, row, policy, figure)) for _, row in table.iterrows()]
        table[column] = np.array(distance) + 0.0  # no -0
    table["pareto"] = _pareto(table, figure)
    return table.sort_values(["budget", figure], ascending=[True, False], na_position="last", ignore_index=True)


def _control(table: pd.DataFrame, row: pd.Series, policy: str, figure: str) -> float:
    """The figure of a control at the budget of ``row``; NaN where it was not run there."""
    there = table[(table["policy"] == policy) & (table["budget"] == row["budget"])]
    if there.empty or pd.isna(row["budget"]):
        return float("nan")
    wanted = row["interval"] if not pd.isna(row["interval"]) else 1
    return float(there.iloc[(there["interval"] - wanted).abs().argmin()][figure])


def _pareto(table: pd.DataFrame, figure: str) -> list[bool]:
    """Which live settings no other live setting beats in memory and figure at once."""
    live = table[table["live"]]
    found = []
    for _, row in table.iterrows():
        no_worse = (live["kv_bytes"] <= row["kv_bytes"]) & (live[figure] >= row[figure])
        better = (live["kv_bytes"] < row["kv_bytes"]) | (live[figure] > row[figure])
        known = pd.notna(row["kv_bytes"]) and pd.notna(row[figure])
        found.append(bool(row["live"]) and known and not (no_worse & better).any())
    return found


def compare(frame: pd.DataFrame, one: str, other: str, figure: str, seed: int = 0) -> Difference | None:
    """How much more of ``figure`` the setting ``one`` has than ``other``, with a paired bootstrap.

    Returns
    -------
    Difference or None
        None where one of them was not run, or has no figure.
    """
    tables = [
        frame[frame["setting"] == name].pivot_table(index=_HEAD, columns="seed_", values=figure, dropna=False)
        for frame in [frame.assign(seed_=frame["seed"].fillna(0))]
        for name in (one, other)
    ]
    if any(table.empty for table in tables):
        return None
    common = tables[0].index.intersection(tables[1].index)
    values = [table.loc[common].to_numpy(dtype=float) for table in tables]  # [heads, seeds] each
    there = ~(np.isnan(values[0]).any(axis=1) | np.isnan(values[1]).any(axis=1))
    values = [each[there] for each in values]
    heads = len(values[0])
    if heads == 0:
        return None
    draw = np.random.default_rng(seed)
    means = np.zeros(_DRAWS)
    chosen = draw.integers(heads, size=(_DRAWS, heads))
    for sign, each in ((1, values[0]), (-1, values[1])):
        seeds = each.shape[1]
        # One draw of seeds for all heads: a seed is a run of the whole cache.
        drawn = draw.integers(seeds, size=(_DRAWS, seeds))
        for number in range(_DRAWS):
            means[number] += sign * each[chosen[number]][:, drawn[number]].mean()
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(other, float(values[0].mean() - values[1].mean()), float(low), float(high))


def answer(frame: pd.DataFrame, settings: list[Policy]) -> Answer:
    """Say which setting keeps most for the memory, and whether beacons are worth it.

    Parameters
    ----------
    frame
        Of :class:`~.sweep.Found`.
    settings
        What the user asked for, controls left out.
    """
    figure = ranked_by(frame)
    table: Any = by_setting(frame).set_index("setting")
    what = (
        "the attention of thought-revisiting tokens"
        if figure == "mass_trt"
        else "all attention (no revisiting token is known)"
    )
    asked = table.loc[[name for name in dict.fromkeys(map(label, settings)) if name in table.index]]
    usable = asked[asked["live"] & (asked["policy"] != "full") & asked[figure].notna()]
    sentences = []
    best = None
    if not usable.empty and not usable["evicted"].any():
        sentences.append("None of these settings evicted anything, so all of them do what a full cache does.")
    # What loses nothing because it never had to choose says nothing of how it chooses.
    usable = usable[usable["evicted"] > 0]
    if not usable.empty:
        good = usable[usable[figure] >= usable[figure].max() - _NEAR]
        best = str(good.sort_values(["kv_bytes", figure], ascending=[True, False], kind="stable").index[0])
        row = table.loc[best]
        sentence = f"{best} keeps {_percent(row[figure])} of {what} with {_share(row, table)}"
        if len(usable) > 1:
            sentence += f", the least memory within {_percent(_NEAR)} of the best of the {len(usable)} settings"
        if not np.isnan(row["to_oracle"]):
            sentence += f"; at its budget an oracle would keep {100 * row['to_oracle']:.1f} points more"
        sentences.append(sentence + ".")
    beacons = [each for each in settings if isinstance(each, BeaconKV) and each.beacons and each.selector != "none"]
    beacons = [each for each in beacons if label(each) in table.index and table.loc[label(each), "evicted"] > 0]
    chosen: str | None = None
    differences: dict[str, Difference] = {}
    if beacons:
        setting = max(beacons, key=lambda each: (-table.loc[label(each), "to_oracle"], -each.budget))
        if best is not None and best in [label(each) for each in beacons]:
            setting = next(each for each in beacons if label(each) == best)
        chosen = label(setting)
        differences = _controls(frame, setting, table, figure)
        sentences.append(_beacons_in_words(chosen, differences))
    heads = frame.loc[frame["queries"] > 0, _HEAD].drop_duplicates()
    sentences.append(
        f"Measured on {len(heads)} KV heads of {heads['trace'].nunique()} trace{'s' * (heads['trace'].nunique() > 1)}; "
        "a replay is teacher-forced: its queries are those of the recording."
    )
    every = frame.drop_duplicates(_HEAD)
    missing = every.loc[every["missing"] > 0, [*_HEAD, "queries", "missing"]]
    gaps = json.loads(missing.to_json(orient="records"))
    if gaps:
        sentences.append(_missing_in_words(gaps, len(every)))
    return Answer(" ".join(sentences), figure, best, chosen, differences, gaps)


def _missing_in_words(gaps: Sequence[Mapping[str, Any]], heads: int) -> str:
    several = len({gap["trace"] for gap in gaps}) > 1
    named = [
        (f"{gap['trace']} " if several else "")
        + f"layer {gap['layer']} head {gap['kv_head']} ({gap['missing']} of {gap['queries'] + gap['missing']} queries)"
        for gap in gaps[:_NAMED]
    ]
    more = f" and {len(gaps) - _NAMED} more" if len(gaps) > _NAMED else ""
    return (
        f"Left out, because recorded queries, keys or values are not finite from there on, in {len(gaps)} of {heads} "
        f"KV heads: {', '.join(named)}{more}."
    )


def best_few(table: pd.DataFrame, answer: Answer, settings: list[Policy], count: int) -> list[Policy]:
    """Up to ``count`` settings that are worth a run with the model, of those that the user asked for.

    First the answer's best, then the best of each budget, largest first, then whatever is best; those that evicted
    nothing of the recorded text come last.

    Parameters
    ----------
    table
        Of :func:`by_setting`.
    answer
        Of :func:`answer`.
    settings
        What the user asked for.
    count
        How many at most.
    """
    known = {label(each): each for each in reversed(settings) if each.live and each.evicts}
    ranked = table[table["setting"].isin(list(known))].sort_values(answer.figure, ascending=False, kind="stable")
    evicting = ranked[ranked["evicted"] > 0]
    of_budgets = evicting.drop_duplicates("budget").sort_values("budget", ascending=False, kind="stable")
    first = [] if answer.best is None else [answer.best]
    names = dict.fromkeys([*first, *of_budgets["setting"], *evicting["setting"], *ranked["setting"]])
    return [known[name] for name in names if name in known][:count]


def _controls(frame: pd.DataFrame, setting: BeaconKV, table: pd.DataFrame, figure: str) -> dict[str, Difference]:
    """What a BeaconKV setting gains over each control that was run beside it."""
    twin = recent_only(setting)
    queries = random_queries(setting)
    random = table[(table["policy"] == "random") & (table["budget"] == setting.budget)]
    others = {
        "recent only": None if twin is None else label(twin),
        "random queries": label(queries[0]) if queries else None,
        "random eviction": None if random.empty else str((random["interval"] - setting.interval).abs().idxmin()),
    }
    found = {name: compare(frame, label(setting), other, figure) for name, other in others.items() if other is not None}
    return {name: difference for name, difference in found.items() if difference is not None}


def _beacons_in_words(setting: str, differences: dict[str, Difference]) -> str:
    names = {
        "recent only": "as many recent queries without beacons",
        "random queries": "a random handful of old queries",
        "random eviction": "random eviction",
    }
    if not differences:
        return f"The controls of {setting} were not run."
    parts = []
    for name, each in differences.items():
        if not each.exceeds_spread:
            verdict = "does not differ beyond the spread from"
        else:
            verdict = "beats" if each.mean > 0 else "loses to"
        points = f"{100 * each.mean:+.1f} points, 95 % interval {100 * each.low:+.1f} to {100 * each.high:+.1f}"
        parts.append(f"{verdict} {names[name]} ({points})")
    joined = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return f"{setting} {joined}, over heads and seeds."


def _share(row: pd.Series, table: pd.DataFrame) -> str:
    """The memory of a setting, against the full cache's where that was run."""
    full = table[table["policy"] == "full"]
    said = f"{in_bytes(row['kv_bytes'])} of keys and values"
    if full.empty:
        return said
    return f"{said}, {_percent(row['kv_bytes'] / full['kv_bytes'].iloc[0])} of the full cache"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def to_dict(table: pd.DataFrame, answer: Answer, live: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Plain values, as ``--json`` prints them; ``live`` is what settings did when they were run with the model."""
    rows = json.loads(table.to_json(orient="records", double_precision=9))
    for row in rows:
        row["params"] = json.loads(row["params"])
    return ({} if live is None else {"live": list(live)}) | {
        "schema": "beaconscope.replay",
        "schema_version": "1.1",
        "teacher_forced": True,
        "ranked_by": answer.figure,
        "settings": rows,
        "missing": answer.missing,
        "answer": {
            "text": answer.text,
            "best": answer.best,
            "beacon": answer.beacon,
            "differences": {
                name: {
                    "than": each.than,
                    "mean": each.mean,
                    "low": each.low,
                    "high": each.high,
                    "exceeds_spread": each.exceeds_spread,
                }
                for name, each in answer.differences.items()
            },
        },
    }
