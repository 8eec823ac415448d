"""BigBird's mask: window, global tokens and random blocks (Zaheer et al., arXiv 2007.14062, section 2).

1. The first ``global_tokens`` positions are seen by every query.
2. Queries come in blocks; each block draws ``random_blocks`` earlier blocks of keys, for each KV head, among those that
   hold something that is neither global nor within the window of the block's first query.
3. A query also sees the last positions, its own included, as many as the budget leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from beaconscope.errors import UsageError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.static_mask import StaticMask


@dataclass(frozen=True)
class BigBird(StaticMask):
    """See the first ``global_tokens`` positions, a sliding window and random blocks."""

    name: ClassVar[str] = "bigbird"
    summary: ClassVar[str] = "static mask: a sliding window, global tokens and random blocks (replay only)"
    source: ClassVar[str] = "Zaheer et al. 2020, arXiv 2007.14062"

    global_tokens: int = 16
    """First positions that every query sees."""
    random_blocks: int = 3
    """Earlier blocks that each block of queries draws."""
    block: int = 16
    """Positions in a block."""
    seed: int = 0
    """Of the draws; each KV head has a stream of its own."""

    def __post_init__(self) -> None:
        self._check_least(global_tokens=0, random_blocks=0, block=1, seed=0)
        if self.budget < self.protected + 1:
            raise UsageError(
                f"a budget of {self.budget} does not hold {self.global_tokens} global tokens, {self.random_blocks} "
                f"blocks of {self.block} and one more entry; give a budget of at least {self.protected + 1}"
            )
        super().__post_init__()

    @property
    def protected(self) -> int:
        return self.global_tokens + self.random_blocks * self.block

    def mask(self, queries: Tensor, keys: Tensor, heads: HeadInfo) -> Tensor:
        back = queries[:, None] - keys[None, :]  # [T, N]
        certain = (keys < self.global_tokens) | (back < self.budget - self.protected)
        query_block = queries // self.block
        drawn = torch.zeros((len(heads.kv_heads), *back.shape), dtype=torch.bool, device=back.device)
        for index in sorted(set(query_block.tolist())):
            of_block = query_block == index
            for h, head in enumerate(heads.kv_heads):
                blocks = torch.tensor(self._draw(index, heads.layer, head), dtype=torch.int64, device=back.device)
                drawn[h, of_block] = torch.isin(keys // self.block, blocks)
        return (certain | drawn) & (back >= 0)

    def _draw(self, query_block: int, layer: int, head: int) -> list[int]:
        """Blocks of keys that a block of queries sees at random."""
        first = self.global_tokens // self.block
        window_starts = query_block * self.block - (self.budget - self.protected) + 1
        eligible = np.arange(first, max(first, -(-window_starts // self.block)))
        stream = np.random.default_rng([self.seed, layer, head, query_block])
        return stream.choice(eligible, min(self.random_blocks, len(eligible)), replace=False).tolist()  # type: ignore[no-any-return]
