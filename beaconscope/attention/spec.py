"""What a layer's attention does besides multiplying queries with keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer turns products of queries and keys into attention. H KV heads, G query heads in the group of each."""

    scaling: float
    """Products of queries and keys are multiplied by it."""
    softcap: float | None = None
    """Scaled products become ``softcap * tanh(product / softcap)``, in models that do so."""
    sink_logit: Tensor | None = None
    """Learned logits that take a share of the softmax and attend to nothing (gpt-oss), [H, G]."""
    window: int | None = None
    """Positions that a query of a sliding layer sees, its own included; None where it sees everything before it."""

    def of_heads(self, heads: slice | Sequence[int]) -> AttentionSpec:
        """Return the spec of some of the KV heads."""
        if self.sink_logit is None:
            return self
        return replace(self, sink_logit=self.sink_logit[heads if isinstance(heads, slice) else list(heads)])

    def to(self, device: torch.device | str) -> AttentionSpec:
        """Return the spec with its tensors on another device."""
        return self if self.sink_logit is None else replace(self, sink_logit=self.sink_logit.to(device))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, for the metadata of a trace."""
        return {
            "scaling": self.scaling,
            "softcap": self.softcap,
            "sink_logit": None if self.sink_logit is None else self.sink_logit.float().tolist(),
            "window": self.window,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionSpec:
        """Return the spec of which :meth:`to_dict` gave ``data``; other keys are passed over."""
        sink = data["sink_logit"]
        return cls(
            scaling=float(data["scaling"]),
            softcap=data["softcap"],
            sink_logit=None if sink is None else torch.tensor(sink, dtype=torch.float32),
            window=data["window"],
        )

    def without_window(self) -> AttentionSpec:
        """Return the spec for texts in which the window hides nothing."""
        return replace(self, window=None)
