"""Jobs that go wrong, picklable so that workers anywhere can be given them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from beaconscope.errors import BeaconScopeError
from beaconscope.replay.sweep import run_job


@dataclass(frozen=True)
class DieOnce:
    """Do a job; the first one to come kills its worker, and leaves ``marker``."""

    marker: str

    def __call__(self, job):
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return run_job(job)
        os.kill(os.getpid(), signal.SIGKILL)
        return None


@dataclass(frozen=True)
class DieOf:
    """Do a job; that of one layer kills its worker."""

    layer: int

    def __call__(self, job):
        if job.layer == self.layer:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_job(job)


@dataclass(frozen=True)
class RefuseOf:
    """Do a job; that of one layer cannot be done."""

    layer: int

    def __call__(self, job):
        if job.layer == self.layer:
            raise BeaconScopeError("this cannot be; do that")
        return run_job(job)
