"""What ``beaconscope replay`` and ``beaconscope policies`` show."""

from __future__ import annotations

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from beaconscope.cli.terminal import in_bytes
from beaconscope.replay import Answer

_PLAIN_WIDTH = 120


def show_replay(table: pd.DataFrame, answer: Answer, top: int) -> None:
    """Print the ranked table of each budget, the Pareto front and the answer."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    for budget in table["budget"].drop_duplicates():
        rows = table[table["budget"].isna() if pd.isna(budget) else table["budget"] == budget]
        title = "No budget" if pd.isna(budget) else f"Budget {budget:.0f}"
        _print(console, title, rows.head(top), answer.figure)
    front = table[table["pareto"]].sort_values("kv_bytes")
    _print(console, "Pareto front: most kept for the memory", front, answer.figure)
    console.print()
    console.print(Text(answer.text))


def _print(console: Console, title: str, rows: pd.DataFrame, figure: str) -> None:
    shown = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    shown.add_column("setting", overflow="fold")
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
