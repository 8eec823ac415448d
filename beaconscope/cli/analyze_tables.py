"""The tables of ``beaconscope analyze``; all fit 80 columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pandas as pd
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from beaconscope.analyze import Analysis, Comparison
from beaconscope.analyze.heads import busiest_heads, head_name
from beaconscope.cli.terminal import printable

_WIDTH = 80
_NAME_WIDTH = 24
_NAMED = 6
"""KV heads that a line names."""
_TEXT_WIDTH = 24
"""Of a column of text that is not the last."""


def show_analysis(analysis: Analysis, top: int) -> None:
    """Print an analysis on stdout: at most ``top`` rows of each table."""
    console = _console()
    summary = analysis.summary
    size = f"{_count(summary['length'], 'token')}, {_count(summary['heads'], 'query head')}"
    console.print(Text(f"{printable(summary['trace'])}: {size}"))
    for line in _summary_lines(analysis):
        console.print(Text(line))
    _section(console, "Verdict")
    console.print(Text(analysis.verdict["text"]))
    if analysis.verdict["would_change"]:
        console.print(Text(f"It would change with {analysis.verdict['would_change']}."), style="dim")

    shown = analysis.revisits.head(top)
    _table(
        console,
        _of("Thought-revisiting tokens", shown, analysis.revisits),
        ["at", "writes", "score", "q", "heads", "back", "looks at"],
        [
            [
                str(row.position), printable(row.writes), f"{row.score:.2f}",
                # A lone look is no coincidence of heads, so the null says nothing of it.
                row.reason if row.reason == "alone" else _number(row.q, 3), str(len(row.heads)),
                str(row.distance), printable(row.target_text),
            ]
            for row in _rows(shown)
        ],
        right=(0, 2, 3, 4, 5),
    )  # fmt: skip
    shown = analysis.anchors.head(top)
    _table(
        console,
        _of("Most revisited sentences", shown, analysis.anchors),
        ["visits", "at", "where", "from", "sentence"],
        [
            [
                str(row.visits), str(row.start), row.period, f"{row.first}-{row.last}", printable(row.text),
            ]
            for row in _rows(shown)
        ],
        right=(0, 1),
    )  # fmt: skip
    shown = busiest_heads(analysis.heads, top)
    _table(
        console,
        _of("Heads (layer.KV head.query head)", shown, analysis.heads),
        ["head", "kind", "revisits", "rate", "distant", "kurtosis", "retrieval", "sinks"],
        [
            [
                head_name(row.layer, row.kv_head, row.query_head), row.kind, str(row.revisits),
                _number(row.event_rate, 3), _number(row.distant_share, 2),
                _number(row.kurtosis, 1) + ("*" if row.receiver else ""),
                _number(row.retrieval, 2) + ("*" if row.retrieves else ""), ",".join(map(str, row.sinks[:3])),
            ]
            for row in _rows(shown)
        ],
        right=(2, 3, 4, 5, 6),
    )  # fmt: skip
    if len(shown):
        console.print(Text("* receiver head (highest kurtosis), retrieval head (score above 0.1)"), style="dim")
    _clusters(console, analysis, top)
    _beacons(console, analysis, top)
    _cache(console, analysis, top)
    _causal(console, analysis, top)


def show_comparison(compared: Comparison, top: int) -> None:
    """Print a comparison of traces on stdout."""
    console = _console()
    _table(
        console,
        "Traces",
        ["", "trace", "tokens", "revisits", "rate", "heads", "clusters"],
        [
            [
                str(number), _end(printable(Path(row["trace"]).name)), f"{row['length']:,}", str(row["revisits"]),
                _number(row["revisit_rate"], 3), str(row["revisiting_heads"]), row["answer"],
            ]
            for number, row in enumerate(compared.traces, 1)
        ],
        right=(0, 2, 3, 4, 5),
    )  # fmt: skip
    _table(
        console,
        "Same heads?",
        ["pair", "both", "either", "overlap", "rank correlation", "AMI", "centroids"],
        [
            [
                f"{row['first'] + 1}-{row['second'] + 1}", str(row["both"]), str(row["either"]),
                _number(row["overlap"], 2), _number(row["rank_correlation"], 2), _number(row["ami"], 2),
                _number(row["centroid_cosine"], 2),
            ]
            for row in compared.pairs
        ],
        right=(1, 2, 3, 4, 5, 6),
    )  # fmt: skip
    _table(
        console,
        "Clusters of the same head, matched",
        ["pair", "head", "space", "K", "AMI", "centroids", "chance"],
        [
            [
                f"{row['first'] + 1}-{row['second'] + 1}", row["head"], row["space"], str(row["clusters"]),
                _number(row["ami"], 2), _number(row["centroid_cosine"], 2),
                _number(row["centroid_cosine_by_chance"], 2),
            ]
            for row in compared.matches[:top]
        ],
        right=(3, 4, 5, 6),
    )  # fmt: skip
    _table(
        console,
        "Revisits by length",
        ["tokens generated", "steps", "revisits", "rate", "95 % interval"],
        [
            [
                f"{row['from']:,} to {row['to']:,}", f"{row['steps']:,}", str(row["revisits"]),
                _number(row["rate"], 3), f"{row['low']:.3f} to {row['high']:.3f}",
            ]
            for row in compared.by_length
        ],
        right=(1, 2, 3),
    )  # fmt: skip
    _section(console, "Verdict")
    console.print(Text(compared.text))
    for row in compared.traces:
        if row["missing_vectors"]:
            console.print(Text(f"{printable(Path(row['trace']).name)}: {_missing(row)}"))


def _summary_lines(analysis: Analysis) -> list[str]:
    summary = analysis.summary
    rate = (
        ""
        if summary["revisit_rate"] is None
        else f" ({100 * summary['revisit_rate']:.1f} % of {summary['steps']:,} steps)"
    )
    reasons = ", ".join(f"{count} {name}" for name, count in summary["reasons"].items() if count)
    lines = [
        f"Attention {summary['attention']}.",
        f"Distant is more than {summary['window']} tokens back; sinks at "
        + (", ".join(str(sink["position"]) for sink in summary["sinks"][:6]) or "no position")
        + ".",
        _count(summary["revisits"], "revisit") + rate + (f": {reasons}." if reasons else "."),
    ]
    if summary["steps"] and not summary["lone_counted"]:
        lines.append(
            f"Looks back by one head alone happen at {100 * summary['lone_rate']:.0f} % of steps: taken as noise."
        )
    if summary["missing_vectors"]:
        lines.append(_missing(summary))
    if summary["attention_assumed"]:
        lines.append("The trace does not say how its layers scale attention; the usual scale is assumed.")
    if not summary["whole"]:
        lines.append("The recording was cut short.")
    return lines


def _missing(summary: dict[str, Any]) -> str:
    """What is left out because it is not finite."""
    heads = summary["missing"]
    named = [f"layer {head['layer']} head {head['kv_head']} ({head['queries'] + head['keys']:,})" for head in heads]
    if len(named) > _NAMED:
        named[_NAMED - 1 :] = [f"{len(named) - _NAMED + 1} more"]
    text = f"{_count(summary['missing_vectors'], 'query or key', 'queries or keys')} not finite and left out: "
    text += f"{', '.join(named)}."
    if summary["missing_steps"]:
        text += f" {_count(summary['missing_steps'], 'step')} left out, at which some head is not known."
    return text


def _clusters(console: Console, analysis: Analysis, top: int) -> None:
    shown = analysis.clusters.head(2 * top)
    _table(
        console,
        "Clusters of queries (before and after the rotary embedding)",
        ["head", "space", "K", "silhouette", "Hopkins", "clustered", "revisits", "groups", "p", "ARI"],
        [
            [
                head_name(row.layer, row.kv_head, row.query_head), row.space.removesuffix("-rope"),
                _number(row.recommended, 0), _number(row.silhouette, 2), _number(row.hopkins, 2),
                _yes(row), str(row.revisits), _number(row.groups, 1), _number(row.concentration_p, 3),
                _number(row.ari_bootstrap, 2),
            ]
            for row in _rows(shown)
        ],
        right=(2, 3, 4, 5, 6, 7, 8, 9),
    )  # fmt: skip


def _yes(row: Any) -> str:
    """Whether queries cluster at all; unknown where they are all alike."""
    return "-" if pd.isna(row.silhouette_p) else "yes" if row.clustered else "no"


def _beacons(console: Console, analysis: Analysis, top: int) -> None:
    if analysis.beacons.empty:
        return
    shown = analysis.beacons.head(top)
    _table(
        console,
        "Recorded beacons (cosine distance of queries to theirs)",
        ["head", "mean", "largest", "churn", "balance", "returns", "same", "chance"],
        [
            [
                head_name(row.layer, row.kv_head, row.query_head), _number(row.mean_distance, 3),
                _number(row.largest_distance, 3), _number(row.churn, 2), _number(row.load_balance, 2),
                str(row.returns), _number(row.same_beacon, 2), _number(row.same_beacon_by_chance, 2),
            ]
            for row in _rows(shown)
        ],
        right=(1, 2, 3, 4, 5, 6, 7),
    )  # fmt: skip


def _cache(console: Console, analysis: Analysis, top: int) -> None:
    cache = analysis.cache
    if not cache["evicts"]:
        return
    _section(console, "What the recording's cache had evicted")
    console.print(
        Text(
            f"{_percent(cache['distant_lost'])} of distant attention and {_percent(cache['revisit_lost'])} of that of "
            f"revisits went to evicted positions; {cache['revisits_hit']} revisits lost at least half."
        )
    )
    shown = analysis.lost.head(top)
    _table(
        console,
        _of("Worst cases", shown, analysis.lost),
        ["at", "writes", "lost", "position", "evicted at", "text around it"],
        [
            [
                str(row.position), printable(row.writes), _percent(row.lost_share), str(row.lost_position),
                str(row.evicted_at), printable(row.text),
            ]
            for row in _rows(shown)
        ],
        right=(0, 2, 3, 4),
    )  # fmt: skip


def _causal(console: Console, analysis: Analysis, top: int) -> None:
    causal = analysis.causal
    if causal is None:
        return
    _section(console, f"Does it matter? Gain above {causal['threshold']:g} nat from what is far back")
    console.print(
        Text(
            f"{causal['mattering']} of {causal['steps']:,} steps need it, {causal['revisits']} revisit, "
            f"{causal['both']} do both: precision {_interval(causal['precision'])}, "
            f"recall {_interval(causal['recall'])}."
        )
    )
    for title, rows in (("Gain that no revisit showed", causal["unseen"]), ("Revisits without gain", causal["idle"])):
        shown = rows[:top]
        _table(
            console,
            title if len(shown) == len(rows) else f"{title}, the first {len(shown)}",
            ["at", "gain", "writes"],
            [[str(row["position"]), f"{row['gain']:.2f}", printable(row["writes"])] for row in shown],
            right=(0, 1),
        )


def _interval(value: list[float] | None) -> str:
    return "-" if value is None else f"{value[0]:.2f} ({value[1]:.2f}-{value[2]:.2f})"


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal and console.width < _WIDTH else Console(highlight=False, width=_WIDTH)


def _section(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title), style="bold")


def _of(title: str, shown: pd.DataFrame, all_of_them: pd.DataFrame) -> str:
    return title if len(shown) == len(all_of_them) else f"{title}, {len(shown)} of {len(all_of_them):,}"


def _table(
    console: Console, title: str, columns: list[str], rows: list[list[str]], right: tuple[int, ...] = ()
) -> None:
    """Print rows under a title, nothing where there are none; long texts are cut so that all fits."""
    if not rows:
        return
    _section(console, title)
    # The last column is the one that may be long; what the others leave is its own.
    widths = [max(cell_len(row[index]) for row in [columns, *rows]) for index in range(len(columns) - 1)]
    widths = [width if index in right else min(width, _TEXT_WIDTH) for index, width in enumerate(widths)]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for index, name in enumerate(columns):
        width = widths[index] if index < len(widths) else max(8, console.width - sum(widths) - len(widths))
        justify: Literal["left", "right"] = "right" if index in right else "left"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", max_width=width)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _rows(frame: pd.DataFrame) -> list[Any]:
    """Rows as named tuples, whose types pandas cannot tell."""
    return list(frame.itertuples(index=False))


def _end(name: str) -> str:
    """A file's name, or its end where it is long: names of one series differ there."""
    return name if len(name) <= _NAME_WIDTH else "…" + name[1 - _NAME_WIDTH :]


def _count(number: int, thing: str, things: str | None = None) -> str:
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def _number(value: Any, digits: int) -> str:
    return "-" if value is None or pd.isna(value) else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
