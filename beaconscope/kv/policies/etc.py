"""ETC's mask: a sliding window and one global token for each segment (Ainslie et al., arXiv 2004.08483, section 3).

1. The text is cut into segments; the last token of a finished segment stands for it and is seen by every later query,
   in place of the summary token that the architecture has for it.
2. A query also sees the last positions, its own included, as many as the budget leaves, and never less than a segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from beaconscope.errors import UsageError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.static_mask import StaticMask


@dataclass(frozen=True)
class ETC(StaticMask):
    """See the last token of each ``segment`` and a sliding window."""

    name: ClassVar[str] = "etc"
    summary: ClassVar[str] = "static mask: a sliding window and one global token for each segment (replay only)"
    source: ClassVar[str] = "Ainslie et al. 2020, arXiv 2004.08483"

    segment: int = 64
    """Tokens in a segment."""

    def __post_init__(self) -> None:
        self._check_least(segment=1)
        if self.budget < self.segment:
            raise UsageError(
                f"a budget of {self.budget} does not hold a segment of {self.segment}; give a budget of at least "
                f"{self.segment}"
            )
        super().__post_init__()

    def mask(self, queries: Tensor, keys: Tensor, heads: HeadInfo) -> Tensor:
        back = queries[:, None] - keys[None, :]  # [T, N]
        finished = (queries + 1) // self.segment
        window = (self.budget - finished).clamp(min=self.segment)
        seen = (back >= 0) & (((keys + 1) % self.segment == 0) | (back < window[:, None]))
        return seen.expand(len(heads.kv_heads), -1, -1)
