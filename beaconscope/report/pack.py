"""Numbers on their way into the page: typed arrays one after another, compressed, in base64.

A page reads them back without parsing: each array is a view into one buffer. `Pack.manifest` says what lies where.
"""

from __future__ import annotations

import base64
import gzip
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGN = 8
_DTYPES = {"uint8", "uint16", "uint32", "int16", "int32", "float32"}
_NOTHING = {"uint8": 0xFF, "uint16": 0xFFFF}
"""What stands for "there is no value": never a number that could be drawn."""


@dataclass
class Pack:
    """Named arrays in the order they were added."""

    manifest: dict[str, dict[str, Any]] = field(default_factory=dict)
    _parts: dict[str, bytes] = field(default_factory=dict)
    _size: int = 0

    def copy(self) -> Pack:
        """A pack of the same arrays, to which others can be added."""
        return Pack(dict(self.manifest), dict(self._parts), self._size)

    def add(self, name: str, array: npt.NDArray[Any], **how: Any) -> None:
        """Add an array of any shape; ``how`` goes into its entry of the manifest.

        Raises
        ------
        ValueError
            Where the name is taken or the type is not one that a page reads.
        """
        kind = array.dtype.name
        if kind not in _DTYPES or name in self.manifest:
            raise ValueError(f"{name} cannot be added as {kind}")
        raw = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        raw += b"\0" * (-len(raw) % _ALIGN)
        self.manifest[name] = {"type": kind, "shape": list(array.shape), "at": self._size, **how}
        self._parts[name] = raw
        self._size += len(raw)

    def add_numbers(self, name: str, values: npt.NDArray[np.floating[Any]], *, bits: int = 16, **how: Any) -> None:
        """Add floating-point numbers in 8 or 16 bits, evenly between the least and the largest.

        A number that is not finite is missing and stays so. The error is at most half a step, which is the range
        divided by 254 or 65534.
        """
        kind = np.uint8 if bits == 8 else np.uint16
        most = _NOTHING[np.dtype(kind).name] - 1
        values = np.asarray(values, np.float64)
        there = np.isfinite(values)
        low = float(values[there].min()) if there.any() else 0.0
        step = (float(values[there].max()) - low) / most if there.any() else 0.0
        quantised = np.full(values.shape, most + 1, kind)
        quantised[there] = np.rint((values[there] - low) / (step or 1.0)).astype(kind)
        self.add(name, quantised, low=low, step=step or 1.0, **how)

    def array(self, name: str) -> npt.NDArray[Any]:
        """An array as it was added."""
        entry = self.manifest[name]
        shape: list[int] = entry["shape"]
        raw = np.frombuffer(self._parts[name], np.dtype(entry["type"]).newbyteorder("<"), math.prod(shape))
        return raw.reshape(shape)

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """Floating-point numbers as they were rounded; nan where one is missing."""
        entry, raw = self.manifest[name], self.array(name)
        return np.where(raw == _NOTHING[entry["type"]], np.nan, entry["low"] + entry["step"] * raw.astype(np.float64))

    def encode(self) -> str:
        """All arrays, compressed, in base64."""
        return compressed(b"".join(self._parts.values()))


def compressed(raw: bytes) -> str:
    """Gzip in base64; the same bytes for the same bytes."""
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode("ascii")


def smallest_unsigned(most: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type that holds 0 to ``most``."""
    return np.uint8 if most < 1 << 8 else np.uint16 if most < 1 << 16 else np.uint32
