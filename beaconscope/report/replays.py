"""A replay, as the report needs it, read from a file that `replay -o` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from beaconscope.errors import BeaconScopeError


def load_replay(path: Path) -> dict[str, Any]:
    """Read the JSON of a replay (see ``docs/replay.md``) from the file that ``replay -o`` wrote.

    Raises
    ------
    BeaconScopeError
        Where it is none, is of a newer version, or contradicts itself.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    remedy = "give a file that `beaconscope replay TRACE -o FILE` wrote"
    try:
        with path.open("rb") as file:
            metadata = pq.read_schema(file).metadata or {}
        found: dict[str, Any] = json.loads(metadata[b"beaconscope.replay"])
        settings = found["settings"]
        version = str(found["schema_version"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException) as error:
        raise BeaconScopeError(f"{path} is no replay; {remedy}") from error
    if version.split(".")[0] != "1":
        raise BeaconScopeError(f"{path} has version {version} and this BeaconScope reads 1; {remedy}")
    figure = found.get("ranked_by")
    if not (
        isinstance(figure, str) and isinstance(settings, list) and all(_is_setting(row, figure) for row in settings)
    ):
        raise BeaconScopeError(f"{path} contradicts itself; {remedy}")
    return found


def _is_setting(row: Any, figure: str) -> bool:
    """Whether a row of a replay has what is drawn of it."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("policy"), str)
        and isinstance(row.get("params"), dict | None)
        and isinstance(row.get(figure), int | float | None)
        and isinstance(row.get("spread"), int | float | None)
        and (
            # It is not known what a head kept of which nothing could be measured.
            row.get("kv_bytes") is None or (isinstance(row["kv_bytes"], int | float) and 0 < row["kv_bytes"] < 1e18)
        )
    )
