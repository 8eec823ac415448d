"""The most memory that this process has held."""

from __future__ import annotations

import resource
from pathlib import Path


def peak_bytes() -> int:
    """Highest resident size so far.

    Linux counts ``ru_maxrss`` on from the process that this one was started by; ``VmHWM`` is this one's own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
