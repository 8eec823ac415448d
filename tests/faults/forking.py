"""The command line in a process of its own that costs no imports: a fork of this one, to be killed or starved."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """Exit code; of a signal its number, negative."""
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line on stderr."""
        assert "Traceback" not in self.err, self.err
        (line,) = self.err.splitlines()
        return line


class Child:
    """A fork of this process that runs the command line in another folder, until :meth:`wait`."""

    def __init__(self, *arguments: str | Path, cwd: Path, logs: Path, prepare: Callable[[], None] = lambda: None):
        logs.mkdir(exist_ok=True)
        number = len(list(logs.iterdir()))
        self._out, self._err = logs / f"{number}.out", logs / f"{number}.err"
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(cwd, self._out, self._err, [str(argument) for argument in arguments], prepare)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.running():
            os.kill(self.pid, number)

    def running(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is None

    def wait(self, seconds: float = 240) -> Ended:
        end = time.monotonic() + seconds
        while self.running():
            if time.monotonic() > end:
                self.kill(signal.SIGUSR1)
                time.sleep(0.5)
                self.end()
                pytest.fail(f"still runs after {seconds} s: {self._err.read_text()}")
            time.sleep(0.005)
        assert self._status is not None
        return Ended(os.waitstatus_to_exitcode(self._status), self._out.read_text(), self._err.read_text())

    def end(self) -> None:
        """Let it run no longer."""
        self.kill()
        while self.running():
            time.sleep(0.005)


def _become(cwd: Path, out: Path, err: Path, arguments: list[str], prepare: Callable[[], None]) -> None:
    """Be the command line, and never return."""
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # where it hangs
        os.setpgid(0, 0)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdin = open(os.devnull)  # noqa: SIM115 - as long as the process lives
        sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        os.chdir(cwd)
        import torch

        # Threads that this process had before the fork are not in it.
        torch.set_num_threads(1)
        from beaconscope.cli import main

        prepare()
        sys.argv = ["beaconscope", *arguments]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def without_privileges() -> None:
    """Let permissions hold for root too: give up all its capabilities, in this process alone."""
    if os.geteuid() != 0:
        return
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")
