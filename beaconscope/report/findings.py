"""What an analysis found, as the report needs it: of an analysis just made, or of a file that `analyze -o` wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from beaconscope.errors import BeaconScopeError

if TYPE_CHECKING:
    from beaconscope.analyze import Analysis
    from beaconscope.trace import Trace

_KEY = b"beaconscope.analysis"
_COLUMNS = {"position", "sentence", "distant_share", "distant_share_max", "global_heads", "q", "revisit", "lost_share"}


@dataclass(frozen=True)
class Findings:
    """An analysis: its JSON (see ``docs/analysis.md``) and one row per position."""

    result: dict[str, Any]
    tokens: pd.DataFrame


def findings_of(analysis: Analysis) -> Findings:
    """Take an analysis that was just made."""
    return Findings(analysis.to_dict(), analysis.tokens)


def load_findings(path: Path, trace: Trace) -> Findings:
    """Read an analysis of ``trace`` from the file that ``analyze -o`` wrote.

    Raises
    ------
    BeaconScopeError
        Where it is none, is of a newer version, or is of another trace.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    remedy = f"give a file that `beaconscope analyze {trace.path} -o FILE` wrote"
    try:
        with path.open("rb") as file:
            table = pq.read_table(file)
        result = json.loads((table.schema.metadata or {})[_KEY])
        version = str(result["schema_version"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException) as error:
        raise BeaconScopeError(f"{path} is no analysis; {remedy}") from error
    if version.split(".")[0] != "1":
        raise BeaconScopeError(f"{path} has version {version} and this BeaconScope reads 1; {remedy}")
    tokens = table.to_pandas()
    if missing := sorted(_COLUMNS - set(tokens.columns)):
        raise BeaconScopeError(f"{path} lacks the column {missing[0]}; {remedy}")
    if len(tokens) != trace.length:
        raise BeaconScopeError(f"{path} is of {len(tokens)} tokens and {trace.path} has {trace.length}; {remedy}")
    ids = trace.tokens["token_id"].to_numpy()
    if "token_id" in tokens and (tokens["token_id"].to_numpy() != ids).any():
        raise BeaconScopeError(f"{path} is of another text than {trace.path}; {remedy}")
    if (
        not _is_result(result, trace.length)
        or any(tokens[name].dtype.kind not in "biuf" for name in _COLUMNS)
        or (tokens["position"] != tokens.index).any()
    ):
        raise BeaconScopeError(f"{path} contradicts itself; {remedy}")
    return Findings(result, tokens)


def _is_result(result: Any, length: int) -> bool:
    """Whether the JSON of an analysis has what a report takes from it."""

    def rows(name: str, *whole: str) -> bool:
        """Whether there is a list of rows in which the fields of these names are whole numbers of at least 0."""
        found = result.get(name)
        return isinstance(found, list) and all(
            isinstance(row, dict) and all(_is_whole(row.get(field)) for field in whole) for row in found
        )

    head = ("layer", "kv_head", "query_head")
    if not (
        isinstance(result, dict)
        and all(isinstance(result.get(name), dict) for name in ("summary", "options", "verdict", "cache"))
        and isinstance(result.get("causal"), dict | None)
        and rows("revisits", "position")
        and all(rows(name, *head) for name in ("heads", "clusters", "beacons"))
        and all(
            row.get(name) is None or _is_whole(row[name]) for row in result["heads"] for name in ("revisits", "events")
        )
        and all(rows(name) for name in ("targets", "anchors", "lost"))
    ):
        return False
    summary = result["summary"]
    sinks = summary.get("sinks")
    return (
        _is_whole(summary.get("window"))
        and isinstance(sinks, list)
        and all(isinstance(sink, dict) and _is_whole(sink.get("position")) for sink in sinks)
        and all(row["position"] < length and isinstance(row.get("score"), int | float) for row in result["revisits"])
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 31
