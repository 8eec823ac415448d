"""One forward pass through one attention layer, as policies and recorders see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from beaconscope.attention.spec import AttentionSpec
from beaconscope.attention.weights import attention_weights, scaled_products, visible_entries

_BLOCK_BYTES = 32 << 20
"""Attention of many tokens is computed in blocks of at most this size."""


@dataclass(frozen=True)
class AttentionStep:
    """What T new tokens of R sequences of equal length brought to a layer, and what they attended to.

    H is the number of KV heads, G the query heads in the group of each, N the entries attended to (the T new ones are
    the last), D the size of a query or key, Dv that of a value.
    """

    rows: Tensor | None
    """Rows of the batch that these sequences are, int64 [R]; None for all of them."""
    first_position: int
    """Position of the first of the T new tokens."""
    query: Tensor  # [R, H, G, T, D], post-RoPE
    key: Tensor  # [R, H, N, D], post-RoPE
    value: Tensor  # [R, H, N, Dv]
    key_positions: Tensor  # [R, H, N], int64; -1 where a head holds fewer than N
    spec: AttentionSpec
    kinds: Tensor | None = None
    """Kinds of the T new tokens, uint8 [R, T] (:class:`~beaconscope.kv.kinds.TokenKind`), where a policy needs them."""
    padded: bool = False
    """Heads may hold fewer than N entries."""

    @property
    def tokens(self) -> int:
        """T, how many tokens are new."""
        return self.query.shape[3]

    @property
    def last_position(self) -> int:
        """Position of the newest token."""
        return self.first_position + self.tokens - 1

    def attention(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Post-softmax attention of the new tokens ``start`` to ``stop`` (default: all), float32 [R, H, G, t, N].

        These are the model's own weights: its scaling, soft cap, learned sinks and window are applied. Rows sum to one,
        less what a learned sink takes.
        """
        logits = scaled_products(self.query[:, :, :, start:stop], self.key, self.spec.scaling)
        masked = self.tokens > 1 or self.spec.window is not None or self.padded
        visible = self._visible(start, logits.shape[3]) if masked else None
        return attention_weights(logits, self.spec, visible)

    def blocks(self, start: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Attention of the new tokens from ``start`` on, in blocks of bounded size.

        Yields
        ------
        int
            First token of the block.
        Tensor
            Its :meth:`attention`, [R, H, G, t, N].
        """
        r, h, g, t, _ = self.query.shape
        size = max(1, _BLOCK_BYTES // (4 * r * h * g * self.key.shape[2]))
        for first in range(start, t, size):
            yield first, self.attention(first, min(first + size, t))

    def _visible(self, start: int, count: int) -> Tensor:
        """Which entries new token ``start + i`` may see, bool [R, H, 1, count, N]."""
        position = self.first_position + start + torch.arange(count, device=self.key.device)
        entry = self.key_positions[:, :, None, None, :]  # [R, H, 1, 1, N]
        visible = visible_entries(position[:, None], entry, self.spec)
        return visible & (entry >= 0) if self.padded else visible
