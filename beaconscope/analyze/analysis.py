"""The outcome of an analysis: data frames, and the same as JSON and Parquet."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from beaconscope.analyze.options import AnalyzeOptions
from beaconscope.files import whole_file

SCHEMA_VERSION = "1.1"
"""Of the JSON; ``docs/analysis.md`` specifies it. A minor version adds keys, a major one changes them."""


@dataclass(frozen=True)
class Analysis:
    """What an analysis found. The columns of the frames are specified in ``docs/analysis.md``."""

    options: AnalyzeOptions
    summary: dict[str, Any]
    """Counts, rates, thresholds in effect, and what was computed how."""
    verdict: dict[str, Any]
    """``answer`` (``yes``, ``no``, ``not enough``, ``not asked``), ``text``, and the numbers behind it."""
    tokens: pd.DataFrame
    """One row per position."""
    revisits: pd.DataFrame
    """One row per thought-revisiting token, by falling score."""
    targets: pd.DataFrame
    """One row per revisit and span that it looks at."""
    anchors: pd.DataFrame
    """One row per revisited sentence, most visited first."""
    heads: pd.DataFrame
    """One row per query head."""
    clusters: pd.DataFrame
    """One row per clustered query head and query space."""
    sweep: pd.DataFrame
    """One row per clustered query head, query space and number of clusters."""
    beacons: pd.DataFrame
    """One row per query head with recorded beacons."""
    cache: dict[str, Any]
    """What the recording's cache had evicted of what was looked at; ``evicts`` is false where it never evicts."""
    lost: pd.DataFrame
    """Revisits that looked at evicted positions, worst first."""
    causal: dict[str, Any] | None = None
    """How the revisits compare with the long-range gain, where it was computed."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``--json`` prints them."""
        frames = ("revisits", "targets", "anchors", "heads", "clusters", "sweep", "beacons", "lost")
        return {
            "schema": "beaconscope.analysis",
            "schema_version": SCHEMA_VERSION,
            "options": dataclasses.asdict(self.options),
            "summary": plain(self.summary),
            "verdict": plain(self.verdict),
            **{name: plain(getattr(self, name).to_dict(orient="records")) for name in frames},
            "cache": plain(self.cache),
            "causal": plain(self.causal),
        }

    def save(self, path: str | Path) -> Path:
        """Write the per-token table as Parquet, with everything else as JSON under the key ``beaconscope.analysis``.

        The file appears at once when it is whole.

        Raises
        ------
        BeaconScopeError
            Where the system refuses.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = Path(path)
        table = pa.Table.from_pandas(self.tokens, preserve_index=False)
        table = table.replace_schema_metadata({"beaconscope.analysis": json.dumps(self.to_dict(), allow_nan=False)})
        # pyarrow refuses paths that are not UTF-8.
        with whole_file(path) as partial, partial.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
        return path


def plain(value: Any) -> Any:
    """Reduce a value to what JSON can say; numbers that are not finite become null."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if value is pd.NA or value is pd.NaT:
        return None
    return value
