"""The one error that BeaconScope raises for what a user can mend, and how to know that memory ran out."""

from __future__ import annotations

import re

_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


class BeaconScopeError(Exception):
    """A problem that the user can mend; its text is one line: what is wrong, then what to do."""


class UsageError(BeaconScopeError):
    """Options that cannot hold together; the command line answers it with exit code 2."""


def no_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out, be it that of Python, Arrow or torch."""
    # What torch raises is a RuntimeError, and torch must not be imported to ask which.
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))
