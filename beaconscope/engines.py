"""Run tasks in processes of this machine, or on a Dask or Ray cluster, whatever becomes of single workers.

1. Tasks are small and independent, and do no harm when they are done twice.
2. Results come as they are there, in any order.
3. A task whose worker died is given to another. A task that three workers died of ends the run: it is likely what
   kills them.
4. An address where nobody answers is refused within seconds: both libraries would wait for minutes.

Processes here are joblib's (loky). On a cluster tasks go by the cluster's own futures and actors, so that results come
one by one and the death of a worker is known.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal, TypeVar, get_args

from beaconscope.errors import BeaconScopeError, UsageError

Engine = Literal["loky", "dask", "ray"]

_DEATHS = 3
"""Workers that may die of a task."""
_ANSWER_SECONDS = 5.0

T = TypeVar("T")


class WorkersDied(BeaconScopeError):
    """Workers kept dying."""


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
    if address is not None and workers > 1:
        raise UsageError(f"the cluster at {address} has workers of its own; leave out --jobs")


def run_tasks(
    tasks: Mapping[str, Callable[[], T]],
    *,
    workers: int = 1,
    engine: Engine = "loky",
    address: str | None = None,
    gpus: bool = False,
) -> Iterator[tuple[str, T]]:
    """Do all tasks and yield what each gives, by its name, as it comes.

    Parameters
    ----------
    tasks
        What to do; picklable unless one process does it all.
    workers
        Processes. A cluster that is there (``address``) has its own number.
    engine
        What runs them.
    address
        Of the cluster's scheduler; None starts a cluster on this machine.
    gpus
        Each worker wants a GPU for itself where there are any. Ray is told so; the others leave it to the task.

    Raises
    ------
    UsageError
        For what :func:`check_engine` refuses.
    WorkersDied
        Where workers keep dying.
    BeaconScopeError
        Where the engine is not installed or the cluster does not answer, or from a task.
    """
    check_engine(engine, workers, address)
    if engine == "dask":
        yield from _dask(tasks, workers, address)
    elif engine == "ray":
        yield from _ray(tasks, workers, address, gpus)
    elif workers == 1:
        for name, task in tasks.items():
            yield name, task()
    else:
        yield from _processes(tasks, workers)


def _processes(tasks: Mapping[str, Callable[[], T]], workers: int) -> Iterator[tuple[str, T]]:
    from concurrent.futures.process import BrokenProcessPool

    from joblib import Parallel, delayed

    def finished(batch: list[str]) -> Iterator[tuple[str, T]]:
        parallel = Parallel(
            n_jobs=workers, backend="loky", return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs"
        )
        for name, result in parallel(delayed(_named)(name, waiting[name]) for name in batch):
            del waiting[name]
            yield name, result

    # A worker that has grown by some 300 MB makes way for a fresh one; nobody has to do anything about that.
    warnings.filterwarnings("ignore", "A worker stopped while some jobs were given", UserWarning)
    waiting = dict(tasks)
    deaths = dict.fromkeys(tasks, 0)
    while waiting:
        try:
            yield from finished(list(waiting))
        except BrokenProcessPool:
            # One worker's death takes all of them along, and which task it died of is not known. Those that can have
            # been under way are done one at a time: whoever is innocent is finished.
            for name in list(waiting)[: 2 * workers]:
                try:
                    yield from finished([name])
                except BrokenProcessPool as error:
                    deaths[name] += 1
                    waiting[name] = waiting.pop(name)
                    if deaths[name] == _DEATHS:
                        raise _died_of_one_task("give fewer --jobs") from error


def _named(name: str, task: Callable[[], T]) -> tuple[str, T]:
    return name, task()


def _dask(tasks: Mapping[str, Callable[[], T]], workers: int, address: str | None) -> Iterator[tuple[str, T]]:
    try:
        import dask
        from distributed import Client, KilledWorker, LocalCluster, as_completed
    except ImportError:
        raise BeaconScopeError("--engine dask needs the extra: pip install 'beaconscope[dask]'") from None
    with ExitStack() as stack:
        # What a worker that dies leaves in the logs is said once, by whoever gives up.
        stack.enter_context(dask.config.set({"distributed.scheduler.allowed-failures": _DEATHS - 1}))
        if address is None:
            cluster = LocalCluster(
                n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs="CRITICAL"
            )
            client = stack.enter_context(Client(stack.enter_context(cluster)))
        else:
            _check_answers("Dask scheduler", address, 8786, "dask scheduler")
            try:
                client = stack.enter_context(Client(address, timeout=_ANSWER_SECONDS))
            except (OSError, ValueError) as error:
                raise _nobody("Dask scheduler", address, "dask scheduler") from error
            if not client.scheduler_info()["workers"]:
                raise BeaconScopeError(
                    f"the Dask scheduler at {address} has no workers; start some: dask worker {address}"
                )
        names = {client.submit(task, pure=False): name for name, task in tasks.items()}
        completed = as_completed(list(names))
        try:
            for future in completed:
                try:
                    result = future.result()
                except KilledWorker as error:
                    raise _died_of_one_task("give them more of it") from error
                yield names[future], result
                future.release()
        finally:
            client.cancel(list(names))


def _ray(
    tasks: Mapping[str, Callable[[], T]], workers: int, address: str | None, gpus: bool
) -> Iterator[tuple[str, T]]:
    try:
        import ray
        from ray.exceptions import RayActorError, RayTaskError
    except ImportError:
        raise BeaconScopeError("--engine ray needs the extra: pip install 'beaconscope[ray]'") from None
    if address is not None and address != "auto":
        _check_answers("Ray cluster", address, 6379, "ray start --head")
    with ExitStack() as stack:
        if not ray.is_initialized():
            _start_ray(ray, workers, address)
            stack.callback(ray.shutdown)
        resources = ray.cluster_resources()
        wants_gpu = gpus and resources.get("GPU", 0) >= 1
        count = workers if address is None else max(1, int(resources["GPU" if wants_gpu else "CPU"]))
        kind = ray.remote(num_cpus=1, num_gpus=1 if wants_gpu else 0)(_Worker)
        waiting = list(tasks.items())[::-1]
        deaths = dict.fromkeys(tasks, 0)
        running: dict[Any, tuple[Any, str, Callable[[], T]]] = {}
        idle = [kind.remote() for _ in range(min(count, len(tasks)))]
        while waiting or running:
            while waiting and idle:
                worker, (name, task) = idle.pop(), waiting.pop()
                running[worker.run.remote(task)] = (worker, name, task)
            (ready,), _ = ray.wait(list(running), num_returns=1)
            worker, name, task = running.pop(ready)
            try:
                result = ray.get(ready)
            except RayActorError as error:
                deaths[name] += 1
                if deaths[name] == _DEATHS:
                    raise _died_of_one_task("give them more of it") from error
                waiting.append((name, task))
                idle.append(kind.remote())
                continue
            except RayTaskError as error:
                # Ray's own error says the whole traceback.
                raise error.cause if isinstance(error.cause, BeaconScopeError) else error from None
            idle.append(worker)
            yield name, result


class _Worker:
    """A Ray actor: a process that keeps what its tasks keep, such as a model."""

    def run(self, task: Callable[[], T]) -> T:
        return task()


def _start_ray(ray: Any, workers: int, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        # With "local" a cluster that happens to run here is left alone.
        ray.init("local", num_cpus=workers, include_dashboard=False, **quiet)
        return
    try:
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        if "ray[client]" in str(error):
            raise BeaconScopeError(
                f"Ray's client, which {address} asks for, is not installed; give host:port of the head, or "
                "pip install 'ray[client]'"
            ) from error
        raise _nobody("Ray cluster", address, "ray start --head") from error


def _check_answers(what: str, address: str, port: int, command: str) -> None:
    """Refuse an address that nobody listens at.

    Raises
    ------
    BeaconScopeError
        Saying so.
    """
    scheme, separator, place = address.rpartition("://")
    if separator and scheme not in ("tcp", "tls", "ray"):
        return  # a way that only the library knows
    host, _, given = place.rpartition(":")
    if not host:
        host, given = place, str(port)
    if not (given.isascii() and given.isdigit() and len(given) <= 5):
        raise BeaconScopeError(f"the address {address} is none; give one such as tcp://head:{port}")
    try:
        socket.create_connection((host.strip("[]"), int(given)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:  # the last where a host cannot be one
        raise _nobody(what, address, command) from error


def _nobody(what: str, address: str, command: str) -> BeaconScopeError:
    return BeaconScopeError(f"no {what} answers at {address}; start one ({command}) or correct --address")


def _died_of_one_task(remedy: str) -> WorkersDied:
    return WorkersDied(f"{_DEATHS} workers died of one task, perhaps for want of memory; {remedy}")
