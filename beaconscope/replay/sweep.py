"""Run many settings on many traces, in one process or many.

A job is a path, a layer, its heads and the settings: never tensors. Whoever runs it reads the layer from the trace
itself. What a job finds is a few hundred numbers, which its worker writes beside the output as soon as they are there,
so that a sweep that was stopped goes on from them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from beaconscope.engines import Engine, WorkersDied, run_tasks
from beaconscope.errors import BeaconScopeError
from beaconscope.files import valid_unicode, whole_file
from beaconscope.kv.policies import Policy
from beaconscope.progress import Progress
from beaconscope.replay.grid import label
from beaconscope.replay.kept import Kept
from beaconscope.replay.layer import LayerData, load_layer
from beaconscope.replay.measure import HeadMeasures, MeasureOptions, measure_head
from beaconscope.replay.simulate import timed_simulation
from beaconscope.trace import Trace, load_trace
from beaconscope.trace.facts import attention_of

_FORMAT = 2
"""Of what a job finds; parts of another format are not taken up by a sweep that goes on."""


@dataclass(frozen=True)
class Job:
    """Settings to be measured on heads of one layer of one trace."""

    path: str
    layer: int
    kv_heads: tuple[int, ...]
    settings: tuple[Policy, ...]
    options: MeasureOptions
    revisits: tuple[int, ...]
    """Positions that are thought-revisiting tokens."""
    per_token: bool = False
    """Keep the measures of every query, not only their means."""
    device: str = "cpu"
    folder: str = ""
    """What ``path`` is relative to; a worker on a cluster has a current folder of its own."""

    def fingerprint(self) -> str:
        """What tells a result of this job from that of any other, whatever the file is called."""
        from beaconscope import __version__

        described = {
            "version": __version__,  # another version may keep otherwise
            "format": _FORMAT,
            "recording": load_trace(Path(self.folder, self.path)).metadata["recording_id"],
            "layer": self.layer,
            "kv_heads": self.kv_heads,
            "settings": [[policy.name, policy.params()] for policy in self.settings],
            "options": asdict(self.options),
            "revisits": self.revisits,
            "per_token": self.per_token,
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Found:
    """What jobs found; the columns are specified in ``docs/replay.md``."""

    settings: pd.DataFrame
    """One row for each setting (seed by seed) and KV head."""
    tokens: pd.DataFrame
    """One row for each setting, KV head and decoding query; empty unless asked for."""


def make_jobs(
    trace: Trace,
    settings: Sequence[Policy],
    *,
    revisits: Sequence[int] = (),
    options: MeasureOptions | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    per_token: bool = False,
    device: str = "cpu",
) -> list[Job]:
    """One job for each layer of a trace.

    Parameters
    ----------
    trace
        The trace.
    settings
        What to measure.
    revisits
        Positions of its thought-revisiting tokens.
    options
        How to measure.
    heads
        (layer, KV head) to measure; None for all that are recorded. Layers with a sliding window that is shorter than
        the text could get are left out, since no cache compresses them.
    per_token
        Keep the measures of every query.
    device
        Where to compute.

    Raises
    ------
    BeaconScopeError
        Where nothing is left to measure.
    """
    layers: dict[int, list[int]] = {}
    for layer, head in trace.heads if heads is None else heads:
        if (attention_of(trace, layer) or {}).get("compressible", True):
            layers.setdefault(layer, []).append(head)
    if not layers:
        raise BeaconScopeError(
            f"{trace.path} has only layers with a sliding window among these, whose cache nothing compresses; record "
            "others"
        )
    if trace.length <= trace.prompt_length:
        raise BeaconScopeError(f"{trace.path} has a prompt and nothing generated, so no query is there to be measured")
    return [
        Job(
            path=str(trace.path),
            layer=layer,
            kv_heads=tuple(chosen),
            settings=tuple(settings),
            options=options or MeasureOptions(),
            revisits=tuple(int(position) for position in revisits),
            per_token=per_token,
            device=device,
            folder=str(Path.cwd()),
        )
        for layer, chosen in layers.items()
    ]


def run_job(job: Job) -> Found:
    """Do a job, here.

    Raises
    ------
    BeaconScopeError
        Where the trace cannot be replayed.
    """
    trace = load_trace(Path(job.folder, job.path))
    # All heads of the layer, since some policies keep one set for all of them.
    data = load_layer(trace, job.layer, device=job.device)
    kept, seconds = timed_simulation(job.settings, data)
    revisits = np.zeros(data.length, np.bool_)
    revisits[list(job.revisits)] = True
    rows: list[dict[str, Any]] = []
    tokens: list[pd.DataFrame] = []
    together = any(policy.one_set for policy in job.settings)
    for head in job.kv_heads:
        number = data.kv_heads.index(head)
        # All settings are measured on the same queries, so that their means compare.
        until = data.known_until(None if together else number)
        measured = measure_head(data, number, kept, job.options, revisits, until)
        for setting, policy in enumerate(job.settings):
            row = {"trace": valid_unicode(job.path), "layer": job.layer, "kv_head": head, **_describe(policy)}
            rows.append(
                row
                | _means(measured, setting, revisits)
                | _memory(kept[setting], number, data, until if policy.ragged else data.length, trace)
                | {"compressions": len(kept[setting].fired), "seconds": seconds[setting]}
            )
            if job.per_token:
                tokens.append(_per_token(row, measured, setting, revisits))
    return Found(pd.DataFrame(rows), pd.concat(tokens, ignore_index=True) if tokens else pd.DataFrame())


def _describe(policy: Policy) -> dict[str, Any]:
    params = {name: getattr(policy, name) for name in policy.parameters()}
    return {
        "setting": label(policy),
        "policy": policy.name,
        "budget": params.get("budget"),
        "interval": params.get("interval"),
        "seed": params.pop("seed", None),
        "live": policy.live,
        "params": json.dumps(params),
    }


def _means(measured: HeadMeasures, setting: int, revisits: np.ndarray) -> dict[str, Any]:
    """Means over the decoding queries that were measured and over those of them that are TRTs; NaN for none."""
    of_trt = revisits[measured.positions]
    there = ~np.isnan(measured.mass[setting])
    found: dict[str, Any] = {
        "queries": int(there.sum()),
        "missing": int((~there).sum()),
        "trts": int((of_trt & there).sum()),
    }
    for name in ("mass", "hit_rate", "output_error", "regrets", "regret_delay"):
        values = getattr(measured, name)[setting].astype(np.float64)
        found[name] = _mean(values)
        if name != "regret_delay":
            found[f"{name}_trt"] = _mean(values[of_trt])
    return found


def _mean(values: np.ndarray) -> float:
    """The mean of what is no NaN; exactly 1 where all are."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else float("nan")


def _memory(kept: Kept, head: int, data: LayerData, until: int, trace: Trace) -> dict[str, Any]:
    """Entries that a decoding query before ``until`` found, and what the most of them take in the model's own type."""
    sizes = kept.sizes(head)[data.prompt_length : until]
    if not len(sizes):
        return dict.fromkeys(("entries", "entries_peak", "evicted", "kv_bytes"), float("nan"))
    dtype = str(trace.metadata.get("model", {}).get("dtype", "float32"))
    width = data.key.shape[-1] + (data.key if data.value is None else data.value).shape[-1]
    kind = getattr(torch, dtype, None)
    entry = width * (kind if isinstance(kind, torch.dtype) else torch.float32).itemsize
    return {
        "entries": float(sizes.mean()),
        "entries_peak": int(sizes.max()),
        "evicted": int(data.prompt_length + len(sizes) - sizes[-1]),
        "kv_bytes": int(sizes.max()) * entry,
    }


def _per_token(row: dict[str, Any], measured: HeadMeasures, setting: int, revisits: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(
        {
            **{name: row[name] for name in ("trace", "layer", "kv_head", "setting", "seed")},
            "position": measured.positions.astype(np.int32),
            "trt": revisits[measured.positions],
            **{
                name: getattr(measured, name)[setting]
                for name in ("mass", "hit_rate", "output_error", "regrets", "regret_delay")
            },
        }
    )


class Parts:
    """What finished jobs found, in a folder beside the output.

    Parameters
    ----------
    folder
        The folder; it is made when the first part is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> Found | None:
        """A part, None where it is not there or not whole."""
        found = []
        for kind in ("settings", "tokens"):
            try:
                # pyarrow refuses paths that are not UTF-8.
                with (self.folder / f"{name}.{kind}.parquet").open("rb") as file:
                    found.append(pd.read_parquet(file))
            except (OSError, ValueError):  # pyarrow's own errors are ValueErrors
                return None
        return Found(*found)

    def write(self, name: str, found: Found) -> None:
        """Write a part; it appears when it is whole."""
        self.folder.mkdir(exist_ok=True)
        # The settings last: they are what says that the part is there.
        for kind, frame in (("tokens", found.tokens), ("settings", found.settings)):
            write_whole(self.folder / f"{name}.{kind}.parquet", frame)

    def remove(self) -> None:
        """Remove all parts, and the folder if nothing else is in it."""
        for kind in ("settings", "tokens"):
            for part in self.folder.glob(f"*.{kind}.parquet*"):
                part.unlink()
        with suppress(OSError):
            self.folder.rmdir()


def write_whole(path: Path, frame: pd.DataFrame, metadata: dict[str, str] | None = None) -> None:
    """Write a frame as Parquet to a temporary file and rename it, so that ``path`` is whole or not there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    if metadata:
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata})
    with whole_file(path) as partial, partial.open("wb") as file:
        pq.write_table(table, file, compression="zstd")


@dataclass(frozen=True)
class _Task:
    """A job, and where what it finds goes."""

    job: Job
    name: str
    folder: Path | None
    run: Callable[[Job], Found]

    def __call__(self) -> Found:
        found = self.run(self.job)
        if self.folder is not None:
            Parts(self.folder).write(self.name, found)
        return found


def sweep(
    jobs: Sequence[Job],
    *,
    workers: int = 1,
    engine: Engine = "loky",
    address: str | None = None,
    parts: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    run: Callable[[Job], Found] = run_job,
) -> Found:
    """Do all jobs.

    Parameters
    ----------
    jobs
        What to do.
    workers
        Processes; a cluster that is there has its own number.
    engine
        What runs them: processes of this machine, or a Dask or Ray cluster.
    address
        Of the cluster's scheduler; None starts one on this machine.
    parts
        Folder for what finished jobs found; None keeps it in memory only.
    resume
        Take from that folder what an earlier sweep has finished.
    progress
        Told how far it is.
    run
        What does a job.

    Raises
    ------
    BeaconScopeError
        Where a job cannot be done, workers keep dying, or the cluster is not there; what was finished stays in
        ``parts``.
    KeyboardInterrupt
        After SIGINT (Ctrl-C), likewise.
    """
    names = [job.fingerprint() for job in jobs]
    done: dict[str, Found] = {}
    if resume and parts is not None:
        done = {name: found for name in names if (found := Parts(parts).read(name)) is not None}
    folder = None if parts is None else parts.absolute()
    waiting = {name: _Task(job, name, folder, run) for name, job in zip(names, jobs, strict=True) if name not in done}
    report = progress or (lambda done, total: None)
    report(len(done), len(names))
    kept = "" if parts is None else f"; what is finished is kept in {parts}: go on with --resume"
    try:
        for name, found in run_tasks(waiting, workers=workers, engine=engine, address=address):
            done[name] = found
            report(len(done), len(names))
    except WorkersDied as error:
        raise WorkersDied(f"{error}{kept}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped with {len(done)} of {len(names)} layers replayed{kept}") from None
    ordered = [done[name] for name in names]
    found = Found(*(pd.concat([getattr(each, kind) for each in ordered], ignore_index=True) for kind in _KINDS))
    if not found.settings["queries"].any():
        if parts is not None:
            Parts(parts).remove()
        raise BeaconScopeError(
            "no decoding query can be measured: the queries, keys or values of these heads are not finite from the "
            "prompt on; record again, with --dtype bfloat16 where the model ran in float16"
        )
    return found


_KINDS = ("settings", "tokens")
