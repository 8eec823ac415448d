"""The rotary embedding of one kind of layer, as plain arithmetic that needs no model.

Dimension ``i`` of a head turns with dimension ``partner[i]`` by the angle ``position * inv_freq[frequency[i]]``::

    out[i] = x[i] * cos + sign[i] * x[partner[i]] * sin

That one formula covers half-split, interleaved, partial and scaled rotary alike. ``beaconscope.models.rotary`` reads
its parameters off a model's own function and proves them; the live cache and the replay both rotate with it, so that
they compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """How the vectors of a head are rotated with their position. D is the size of a query or key.

    A layer without rotary embedding is one whose ``frequency`` is -1 everywhere.
    """

    partner: Tensor  # [D], int64
    sign: Tensor  # [D], float32, +1 or -1
    frequency: Tensor  # [D], int64, index into inv_freq; -1: the dimension passes through
    inv_freq: Tensor  # [F], float32, radians per position
    scaling: float
    """What the model multiplies cosine and sine with (YaRN); 1 for most."""
    dtype: torch.dtype
    """In which the model holds cosine and sine."""
    limit: int | None = None
    """Sequence length past which the model itself changes ``inv_freq`` (dynamic and long rotary), None for never."""

    @classmethod
    def none(cls, size: int, dtype: torch.dtype = torch.float32) -> Rotary:
        """The rotary embedding of a layer that has none. ``size`` is D."""
        return cls(
            partner=torch.arange(size),
            sign=torch.ones(size),
            frequency=torch.full((size,), -1),
            inv_freq=torch.zeros(1),
            scaling=1.0,
            dtype=dtype,
        )

    def to(self, device: torch.device) -> Rotary:
        """The same on another device."""
        if self.partner.device == device:
            return self
        return Rotary(
            partner=self.partner.to(device),
            sign=self.sign.to(device),
            frequency=self.frequency.to(device),
            inv_freq=self.inv_freq.to(device),
            scaling=self.scaling,
            dtype=self.dtype,
            limit=self.limit,
        )

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each frequency at ``positions`` [...], float32 [..., F], rounded as the model does."""
        angle = positions.to(torch.float32).unsqueeze(-1) * self.inv_freq
        cos = (angle.cos() * self.scaling).to(self.dtype).to(torch.float32)
        sin = (angle.sin() * self.scaling).to(self.dtype).to(torch.float32)
        return cos, sin

    def _each(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of each dimension, [..., D], from those of each frequency."""
        passes = self.frequency < 0
        index = self.frequency.clamp(min=0)
        return torch.where(passes, 1.0, cos[..., index]), torch.where(passes, 0.0, sin[..., index] * self.sign)

    def _partners(self, x: Tensor) -> Tensor:
        """For each dimension of ``x`` [..., D] the one that it turns with."""
        # Several times as fast as x[..., partner].
        return x.gather(-1, self.partner.expand(x.shape))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``x`` [..., D] to ``positions`` (broadcast against [...]); float32 in and out."""
        cos, sin = self._each(*self._turns(positions))
        return x * cos + self._partners(x) * sin

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undo :meth:`rotate`: the pre-RoPE vectors of post-RoPE ``x`` [..., D] at ``positions``."""
        cos, sin = self._each(*self._turns(positions))
        return (x * cos - self._partners(x) * sin) / (cos * cos + sin * sin)

    def mean_rotation(self, positions: Tensor) -> Callable[[Tensor], Tensor]:
        """What gives the mean of a vector [..., D] rotated to each of ``positions`` [P]; float32 in and out."""
        cos, sin = self._each(*(each.mean(dim=0) for each in self._turns(positions)))  # [D]
        return lambda x: x * cos + self._partners(x) * sin

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the metadata of a trace."""
        return {
            "partner": self.partner.tolist(),
            "sign": self.sign.tolist(),
            "frequency": self.frequency.tolist(),
            "inv_freq": self.inv_freq.tolist(),
            "scaling": self.scaling,
            "dtype": str(self.dtype).removeprefix("torch."),
            "limit": self.limit,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Rotary:
        """The inverse of :meth:`to_dict`; ``inv_freq`` comes back bit for bit."""
        return cls(
            partner=torch.tensor(data["partner"], dtype=torch.int64),
            sign=torch.tensor(data["sign"], dtype=torch.float32),
            frequency=torch.tensor(data["frequency"], dtype=torch.int64),
            inv_freq=torch.tensor(data["inv_freq"], dtype=torch.float32),
            scaling=float(data["scaling"]),
            dtype=getattr(torch, data["dtype"]),
            limit=data["limit"],
        )
