"""Wait for what a process of its own does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Wait until ``condition`` holds while ``process`` runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
