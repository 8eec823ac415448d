"""Longformer's mask: a sliding window and a few global tokens (Beltagy et al., arXiv 2004.05150, section 3.1).

1. The first ``global_tokens`` positions are seen by every query.
2. A query also sees the last positions, its own included, as many as the budget leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.static_mask import StaticMask


@dataclass(frozen=True)
class Longformer(StaticMask):
    """See the first ``global_tokens`` positions and a sliding window."""

    name: ClassVar[str] = "longformer"
    summary: ClassVar[str] = "static mask: a sliding window and a few global tokens (replay only)"
    source: ClassVar[str] = "Beltagy et al. 2020, arXiv 2004.05150"

    global_tokens: int = 16
    """First positions that every query sees."""

    def __post_init__(self) -> None:
        self._check_least(global_tokens=0)
        super().__post_init__()

    @property
    def protected(self) -> int:
        return self.global_tokens

    def mask(self, queries: Tensor, keys: Tensor, heads: HeadInfo) -> Tensor:
        back = queries[:, None] - keys[None, :]  # [T, N]
        window = self.budget - self.global_tokens
        seen = (back >= 0) & ((keys < self.global_tokens) | (back < window))
        return seen.expand(len(heads.kv_heads), -1, -1)
