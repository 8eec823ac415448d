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
from testing.architectures.examine import examine, one_line
from testing.architectures.results import TRACEBACK, UNBUILT, Result
from testing.architectures.variants import AS_IT_IS, variants

SECONDS = 300
"""An architecture that is not heard of for so long is given up."""


@dataclass
class _Running:
    architecture: str
    process: Any
    connection: Connection
    since: float
    """When it was last heard of."""
    doing: str = AS_IT_IS

    def lost(self, why: str) -> Result:
        return Result(self.architecture, self.doing, TRACEBACK, [why])


def sweep(
    architectures: Iterable[str], workers: int = 2, wanted: Callable[[str, str], bool] | None = None
) -> Iterator[Result]:
    """Examine architectures, ``workers`` at a time, and give every result as it comes.

    Processes are forked, so that transformers is imported once. ``wanted`` chooses by architecture and variant.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(architectures)[::-1]
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(_start(context, waiting.pop(), wanted))
        for ready in wait([each.connection for each in running], timeout=1):
            one = next(each for each in running if each.connection is ready)
            try:
                message = one.connection.recv()
            except EOFError:
                one.process.join()
                running.remove(one)
                if one.process.exitcode:
                    yield one.lost(f"the process died with {one.process.exitcode}")
                continue
            one.since = time.monotonic()
            if isinstance(message, Result):
                yield message
            else:
                one.doing = message
        for one in [each for each in running if time.monotonic() - each.since > SECONDS]:
            one.process.kill()
            one.process.join()
            running.remove(one)
            yield one.lost(f"it took longer than {SECONDS} s")


def _start(context: Any, architecture: str, wanted: Callable[[str, str], bool] | None) -> _Running:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(architecture, theirs, wanted))
    process.start()
    theirs.close()
    return _Running(architecture, process, ours, time.monotonic())


def _work(architecture: str, connection: Connection, wanted: Callable[[str, str], bool] | None) -> None:
    """Examine every variant of an architecture; sends the name of each before its result."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in tried(architecture):
        if wanted is None or wanted(architecture, name):
            connection.send(name)
            connection.send(examine_variant(architecture, name))


def examine_variant(architecture: str, variant: str) -> Result:
    """Build one variant of an architecture and examine it, in this process."""
    try:
        config = tiny_config(architecture, **variants(architecture)[variant])
    except Exception as error:
        return Result(architecture, variant, UNBUILT, [one_line(error)])
    with tempfile.TemporaryDirectory() as folder:
        return examine(architecture, variant, config, Path(folder))


def tried(architecture: str) -> list[str]:
    """Names of the variants that are tried; only the first where none can be built."""
    try:
        return list(variants(architecture))
    except Exception:
        return [AS_IT_IS]
