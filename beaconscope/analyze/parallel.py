"""Heads side by side, on threads that each compute with one thread of their own.

So the numbers are the same for any number of threads: a head's are computed by one of them, in one order, and put
together in the order of the heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import joblib
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from beaconscope.errors import UsageError

_MOST = 8
"""Threads at most unless asked for more: each holds a head and a block of its attention in memory."""


@contextmanager
def workers(jobs: int | None) -> Iterator[ThreadPoolExecutor]:
    """Threads for heads.

    Parameters
    ----------
    jobs
        How many; None is one for each core that the process may use, at most eight.

    Raises
    ------
    UsageError
        For fewer than one.
    """
    if jobs is None:
        jobs = min(_MOST, joblib.cpu_count())
    if jobs < 1:
        raise UsageError(f"jobs is {jobs}; give at least 1")
    before = torch.get_num_threads()
    with threadpool_limits(1):
        pool = ThreadPoolExecutor(jobs, "head", initializer=torch.set_num_threads, initargs=(1,))
        try:
            yield pool
        finally:
            # Heads that wait are not begun after an error or Ctrl-C.
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)
