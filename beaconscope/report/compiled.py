"""UMAP with its compiled code kept on disk.

UMAP compiles most of its own functions anew in every process, which takes longer than a dozen maps. numba keeps them
beside the package, or in the user's cache folder, once it is told to; it notices by itself when package, numba or
processor are others.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType

_KEPT = ("umap.umap_", "umap.layouts", "umap.utils")


@functools.cache
def load_umap() -> ModuleType:
    """The package ``umap``, told to keep what it compiles where that can be written."""
    umap = importlib.import_module("umap")
    for name in _KEPT:
        for each in vars(sys.modules[name]).values():
            if hasattr(each, "enable_caching") and each.py_func.__module__ == name:
                try:
                    each.enable_caching()
                except (RuntimeError, OSError):
                    return umap  # no folder for it; every process compiles for itself
    return umap
