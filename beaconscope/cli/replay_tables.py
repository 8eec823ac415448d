"""What ``beaconscope replay`` and ``beaconscope policies`` show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from beaconscope.cli.terminal import in_bytes, printable
from beaconscope.replay import Answer

_PLAIN_WIDTH = 120
_SAID = 200
"""Letters of an answer that are shown."""


def show_replay(table: pd.DataFrame, answer: Answer, top: int) -> None:
    """Print the ranked table of each budget, the Pareto front and the answer."""
    console = _console()
    for budget in table["budget"].drop_duplicates():
        rows = table[table["budget"].isna() if pd.isna(budget) else table["budget"] == budget]
        title = "No budget" if pd.isna(budget) else f"Budget {budget:.0f}"
        _print(console, title, rows.head(top), answer.figure)
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
        forced, free = each["forced"], each["free"]
        diverges = "never" if free["first_divergence"] is None else f"token {free['first_divergence']}"
        right = {None: "", True: ", right", False: ", wrong"}[free["right"]]
        shown.add_row(
            Text(each["setting"]),
            _number(figure.get(each["setting"], float("nan"))),
            f"{forced['kl']:.3f}",
            f"{forced['perplexity']:.2f}",
            f"{100 * forced['agreement']:.0f} %",
            diverges,
            ("same" if free["same_answer"] else "other") + right,
        )
    console.print()
    console.print(shown)
    console.print()
    console.print("KL (nats), perplexity and same top: on the recorded text. Diverges and answer: writing by itself.")
    for each in checked:
        said = printable(each["free"]["answer"])
        console.print(Text(f"{each['setting']}: {said if len(said) <= _SAID else said[:_SAID] + ' ...'}"))


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def _table(title: str) -> Table:
    shown = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    shown.add_column("setting", overflow="fold")
    return shown


def _print(console: Console, title: str, rows: pd.DataFrame, figure: str) -> None:
    shown = _table(title)
    names = ["TRT mass", "mass", "spread", "to oracle", "over random", "hits", "error", "regrets", "memory"]
    if figure == "mass":
        names.remove("TRT mass")
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    for _, row in rows.iterrows():
        cells = {
            "TRT mass": _number(row["mass_trt"]),
            "mass": _number(row["mass"]),
            "spread": _number(row["spread"]),
            "to oracle": _number(row["to_oracle"]),
            "over random": _number(row["over_random"]),
            "hits": _number(row["hit_rate"]),
            "error": _number(row["output_error"]),
            "regrets": _number(row["regrets"]),
            "memory": in_bytes(row["kv_bytes"]),
        }
        shown.add_row(Text(str(row["setting"])), *(cells[name] for name in names))
    console.print()
    console.print(shown)


def _number(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.3f}"
