"""Run the examination of many architectures, each in a process of its own, so that none can end the sweep."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import transformers

from testing.architectures.configs import tiny_config
from testing.architectures.examine import TRACEBACK, UNBUILT, Result, examine, one_line
from testing.architectures.variants import variants

SECONDS = 300
"""An architecture that takes longer is given up."""


@dataclass
class _Running:
    architecture: str
    process: Any
    connection: Connection
    started: float
    doing: str = ""


def sweep(
    architectures: Iterable[str], workers: int = 2, only_variant: Callable[[str], bool] | None = None
) -> Iterator[Result]:
    """Examine architectures, ``workers`` at a time, and give every result as it comes.

    Processes are forked, so that transformers is imported once.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(architectures)[::-1]
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(name, theirs, only_variant))
            process.start()
            theirs.close()
            running.append(_Running(name, process, ours, time.monotonic()))
        for ready in wait([each.connection for each in running], timeout=1):
            one = next(each for each in running if each.connection is ready)
            try:
                message = one.connection.recv()
            except EOFError:
                one.process.join()
                running.remove(one)
                if one.process.exitcode:
                    yield Result(
                        one.architecture, one.doing, TRACEBACK, [f"the process died with {one.process.exitcode}"]
                    )
                continue
            if isinstance(message, Result):
                yield message
            else:
                one.doing = message
        for one in [each for each in running if time.monotonic() - each.started > SECONDS]:
            one.process.kill()
            one.process.join()
            running.remove(one)
            yield Result(one.architecture, one.doing, TRACEBACK, [f"it took longer than {SECONDS} s"])


def _work(architecture: str, connection: Connection, only_variant: Callable[[str], bool] | None) -> None:
    """Examine every variant of an architecture; sends the name of each before its result."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        tried = variants(architecture)
    except Exception as error:
        connection.send(Result(architecture, "as it is", UNBUILT, [one_line(error)]))
        return
    for name, overrides in tried.items():
        with tempfile.TemporaryDirectory() as folder:
            if only_variant is not None and not only_variant(name):
                continue
            connection.send(name)
            try:
                config = tiny_config(architecture, **overrides)
            except Exception as error:
                connection.send(Result(architecture, name, UNBUILT, [one_line(error)]))
                continue
            connection.send(examine(architecture, name, config, Path(folder)))
