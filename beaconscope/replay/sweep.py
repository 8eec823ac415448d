"""Run many settings on many traces, in one process or many.

A job is a path, a layer, its heads and the settings: never tensors. Whoever runs it reads the layer from the trace
itself. What a job finds is a few hundred numbers, which its worker writes beside the output as soon as they are there,
so that a sweep that was stopped goes on from them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import pandas as pd
import torch

from beaconscope.errors import BeaconScopeError, UsageError
from beaconscope.kv.policies import Policy
from beaconscope.replay.grid import label
from beaconscope.replay.kept import Kept
from beaconscope.replay.layer import LayerData, load_layer
from beaconscope.replay.measure import HeadMeasures, MeasureOptions, measure_head
from beaconscope.replay.simulate import Simulation
from beaconscope.trace import Trace, load_trace

Engine = Literal["loky", "dask", "ray"]

_DEATHS = 3
"""Times that workers may die without anything being finished in between."""


class Progress(Protocol):
    """Told how far a sweep is."""

    def __call__(self, done: int, total: int | None) -> None:
        """``done`` of ``total`` jobs are done."""


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

    def fingerprint(self) -> str:
        """What tells a result of this job from that of any other, whatever the file is called."""
        described = {
            "recording": load_trace(self.path).metadata["recording_id"],
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
        (layer, KV head) to measure; None for all that are recorded. Layers with a sliding window are left out, since
        no cache compresses them.
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
        if trace.metadata.get("attention", {}).get(str(layer), {}).get("window") is None:
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
    trace = load_trace(job.path)
    # All heads of the layer, since some policies keep one set for all of them.
    data = load_layer(trace, job.layer, device=job.device)
    simulation = Simulation(job.settings, data)
    kept: list[Kept] = []
    seconds: list[float] = []
    for policy in job.settings:
        started = time.perf_counter()
        kept.append(simulation.run(policy))
        seconds.append(time.perf_counter() - started)
    revisits = np.zeros(data.length, np.bool_)
    revisits[list(job.revisits)] = True
    rows: list[dict[str, Any]] = []
    tokens: list[pd.DataFrame] = []
    for head in job.kv_heads:
        number = data.kv_heads.index(head)
        measured = measure_head(data, number, kept, job.options, revisits)
        for setting, policy in enumerate(job.settings):
            row = {"trace": str(job.path), "layer": job.layer, "kv_head": head, **_describe(policy)}
            rows.append(
                row
                | _means(measured, setting, revisits)
                | _memory(kept[setting], number, data, trace)
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
    """Means over all decoding queries and over those that are TRTs; NaN where there are none."""
    of_trt = revisits[measured.positions]
    found: dict[str, Any] = {"queries": len(of_trt), "trts": int(of_trt.sum())}
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


def _memory(kept: Kept, head: int, data: LayerData, trace: Trace) -> dict[str, Any]:
    """Entries that a decoding query found, and the bytes of the most of them in the model's own type."""
    sizes = kept.sizes(head)[data.prompt_length :]
    dtype = str(trace.metadata.get("model", {}).get("dtype", "float32"))
    width = data.key.shape[-1] + (data.key if data.value is None else data.value).shape[-1]
    entry = width * getattr(torch, dtype, torch.float32).itemsize
    return {
        "entries": float(sizes.mean()),
        "entries_peak": int(sizes.max()),
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
                found.append(pd.read_parquet(self.folder / f"{name}.{kind}.parquet"))
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
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        pq.write_table(table, partial, compression="zstd")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Task:
    """A job, and where what it finds goes."""

    job: Job
    name: str
    folder: Path | None
    run: Callable[[Job], Found]

    def __call__(self) -> tuple[str, Found]:
        found = self.run(self.job)
        if self.folder is not None:
            Parts(self.folder).write(self.name, found)
        return self.name, found


def check_engine(engine: Engine, workers: int, address: str | None) -> None:
    """Refuse what cannot run.

    Raises
    ------
    UsageError
        Saying why.
    """
    if workers < 1:
        raise UsageError(f"jobs is {workers}; give at least 1")
    if engine not in get_args(Engine):
        raise UsageError(f"engine is {engine!r}; give one of {', '.join(get_args(Engine))}")
    if engine == "loky" and address is not None:
        raise UsageError("an address is that of a cluster; give --engine dask or --engine ray with it")


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
        Processes, for ``loky``; a cluster has its own number.
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
    """
    check_engine(engine, workers, address)
    names = [job.fingerprint() for job in jobs]
    done: dict[str, Found] = {}
    if resume and parts is not None:
        done = {name: found for name in names if (found := Parts(parts).read(name)) is not None}
    waiting = {name: _Task(job, name, parts, run) for name, job in zip(names, jobs, strict=True) if name not in done}
    report = progress or (lambda done, total: None)
    report(len(done), len(names))
    with ExitStack() as stack:
        start = _engine(engine, workers, address, stack)
        deaths = 0
        while waiting:
            try:
                for name, found in start(list(waiting.values())):
                    done[name] = found
                    del waiting[name]
                    deaths = 0
                    report(len(done), len(names))
            except Exception as error:
                if not _is_death(error):
                    raise
                deaths += 1
                if deaths == _DEATHS:
                    kept = "" if parts is None else f"; what is finished is kept in {parts}: go on with --resume"
                    raise BeaconScopeError(
                        f"workers died {deaths} times in a row, perhaps for want of memory; give fewer --jobs{kept}"
                    ) from error
    ordered = [done[name] for name in names]
    return Found(*(pd.concat([getattr(each, kind) for each in ordered], ignore_index=True) for kind in _KINDS))


_KINDS = ("settings", "tokens")


def _is_death(error: Exception) -> bool:
    """Whether an error says that a worker died, and not that a job failed."""
    from concurrent.futures.process import BrokenProcessPool

    # Dask and Ray need not be installed for their errors to be known.
    return isinstance(error, BrokenProcessPool) or type(error).__name__ in ("KilledWorker", "WorkerCrashedError")


Start = Callable[[Sequence[_Task]], Iterable[tuple[str, Found]]]


def _engine(engine: Engine, workers: int, address: str | None, stack: ExitStack) -> Start:
    """What runs tasks and yields what they find, as it comes."""
    if engine == "loky" and workers == 1:
        return lambda tasks: (task() for task in tasks)
    from joblib import Parallel, delayed, parallel_config

    if engine == "dask":
        stack.enter_context(parallel_config(backend="dask"))
        stack.enter_context(_dask_client(address))
    elif engine == "ray":
        _connect_ray(address)
        stack.enter_context(parallel_config(backend="ray"))
    else:
        stack.enter_context(parallel_config(backend="loky"))

    def start(tasks: Sequence[_Task]) -> Iterator[tuple[str, Found]]:
        count = workers if engine == "loky" else -1
        # Ray's backend has no generators; its results come all at once.
        kind = "list" if engine == "ray" else "generator_unordered"
        yield from Parallel(n_jobs=count, return_as=kind, batch_size=1, pre_dispatch="2*n_jobs")(
            delayed(_call)(task) for task in tasks
        )

    return start


def _call(task: _Task) -> tuple[str, Found]:
    return task()


def _dask_client(address: str | None) -> Any:
    try:
        from distributed import Client
    except ImportError:
        raise BeaconScopeError("--engine dask needs the extra: pip install 'beaconscope[dask]'") from None
    try:
        return Client(address, timeout=10) if address else Client(processes=True)
    except (OSError, ValueError) as error:
        raise BeaconScopeError(
            f"no Dask scheduler answers at {address}; start one (dask scheduler) or correct --address"
        ) from error


def _connect_ray(address: str | None) -> None:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError:
        raise BeaconScopeError("--engine ray needs the extra: pip install 'beaconscope[ray]'") from None
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise BeaconScopeError(f"no Ray cluster answers at {address}; start one (ray start --head)") from error
    register_ray()
