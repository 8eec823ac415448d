"""What ``beaconscope replay`` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from beaconscope.cli.terminal import printable
from beaconscope.replay import Answer
from beaconscope.units import in_bytes

_PLAIN_WIDTH = 120
_NAME_WIDTH = 34
"""Letters of a setting's name that columns of numbers leave room for; longer ones are broken."""
_NOTHING = "nothing evicted"
_SAID = 200
"""Letters of an answer that are shown."""


def show_replay(table: pd.DataFrame, answer: Answer, top: int) -> None:
    """Print the ranked table of each budget, the Pareto front and the answer."""
    console = _console()
    for budget in table["budget"].drop_duplicates():
        rows = table[table["budget"].isna() if pd.isna(budget) else table["budget"] == budget]
        title = "Without a budget" if pd.isna(budget) else f"Budget {budget:.0f}"
        _print(console, title, rows.head(top), answer.figure, budget)
    front = table[table["pareto"]].sort_values("kv_bytes")
    _print(console, "Pareto front: most kept for the memory", front, answer.figure)
    console.print()
    console.print(Text(answer.text))


def show_live(table: pd.DataFrame, answer: Answer, checked: Sequence[Mapping[str, Any]]) -> None:
    """Print what settings did with the model, beside what the replay said of them."""
    console = _console()
    figure = dict(zip(table["setting"], table[answer.figure], strict=True))
    shown = _table("Run with the model, against the full cache")
    names = [
        "TRT mass" if answer.figure == "mass_trt" else "mass",
        "KL",
        "perplexity",
        "same top",
        "diverges",
        "answer",
    ]
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    for each in checked:
        shown.add_row(
            _foldable(each["setting"]),
            _number(figure.get(each["setting"], float("nan"))),
            *_forced_cells(each["forced"]),
            *_free_cells(each["free"]),
        )
    console.print()
    console.print(shown)
    console.print()
    console.print("KL (nats), perplexity and same top: on the recorded text. Diverges and answer: writing by itself.")
    if any(each["forced"]["kl"] is None or each["free"]["same_answer"] is None for each in checked):
        console.print(
            "Nothing evicted: the text was too short for the setting to drop anything, so it did what the full cache "
            "does."
        )
    for each in checked:
        said = printable(each["free"]["answer"])
        said = said if len(said) <= _SAID else f"{said[:_SAID]} ..."
        console.print(Text(f"{each['setting']}: {said or '(no answer)'}"))


def _forced_cells(forced: Mapping[str, Any]) -> tuple[str, ...]:
    """KL, perplexity and same top of a setting."""
    if forced["kl"] is None:
        return _NOTHING, "-", "-"
    return f"{forced['kl']:.3f}", f"{forced['perplexity']:.2f}", f"{100 * forced['agreement']:.0f} %"


def _free_cells(free: Mapping[str, Any]) -> tuple[str, ...]:
    """Where what a setting wrote diverges, and its answer."""
    if free["same_answer"] is None:
        return _NOTHING, "-"
    diverges = "never" if free["first_divergence"] is None else f"token {free['first_divergence']}"
    right = {None: "", True: ", right", False: ", wrong"}[free["right"]]
    return diverges, ("same" if free["same_answer"] else "other") + right


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def _table(title: str) -> Table:
    shown = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    shown.add_column("setting", overflow="fold")
    return shown


def _print(console: Console, title: str, rows: pd.DataFrame, figure: str, budget: float | None = None) -> None:
    """Print a table of settings; in one of a single ``budget`` the names need not say it."""
    cells = {
        "TRT mass": rows["mass_trt"].map(_number),
        "mass": rows["mass"].map(_number),
        "to oracle": rows["to_oracle"].map(_number),
        "memory": rows["kv_bytes"].map(lambda size: "-" if pd.isna(size) else in_bytes(size)),
        "over random": rows["over_random"].map(_number),
        "spread": rows["spread"].map(_number),
        "regrets": rows["regrets"].map(_number),
        "hits": rows["hit_rate"].map(_number),
        "error": rows["output_error"].map(_number),
    }
    if figure == "mass":
        del cells["TRT mass"]
    names = [_without_budget(name, budget) for name in rows["setting"]]
    shown = _table(title)
    # On a narrow terminal the last ones are left out: --json and the file have all.
    room = console.width - min(max(map(len, names), default=0), _NAME_WIDTH)
    for name, column in cells.items():
        room -= 2 + max(len(name), column.str.len().max() if len(column) else 0)
        if room < 0:
            break
        shown.add_column(name, justify="right", no_wrap=True)
    count = len(shown.columns) - 1
    for name, row in zip(names, zip(*cells.values(), strict=True), strict=True):
        shown.add_row(_foldable(name), *row[:count])
    console.print()
    console.print(shown)


def _without_budget(setting: str, budget: float | None) -> str:
    if budget is None or pd.isna(budget):
        return setting
    policy, _, params = setting.partition(":")
    left = [param for param in params.split(",") if param != f"budget={budget:.0f}"]
    return f"{policy}:{','.join(left)}" if left else policy


def _foldable(setting: str) -> Text:
    """The name of a setting, broken after commas where it must be."""
    return Text(setting.replace(",", ", "))


def _number(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.3f}"
