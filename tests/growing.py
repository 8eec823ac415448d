"""A task whose worker grows, in a module of its own that imports nothing large."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

kept: list[bytearray] = []


@dataclass(frozen=True)
class Grow:
    """Keep 200 MB for good; gives the process that does."""

    number: int

    def __call__(self) -> int:
        kept.append(bytearray(b"\1") * (200 << 20))
        time.sleep(1.1)  # loky looks once a second
        return os.getpid()
