"""One forward pass through one attention layer, as policies and recorders see it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_BYTES = 32 << 20
"""Attention of many tokens is computed in blocks of at most this size."""
_SAFE_NORM = 1e19
"""Its square is within the range of float32."""


def scaled_products(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Products of queries [R, H, G, t, D] with the keys [R, H, N, D] of their heads, times ``scaling``.

    Returns
    -------
    Tensor
        float32 [R, H, G, t, N].
    """
    # Scaled before the product, which has more numbers.
    query = query.float() * scaling
    r, h, g, t, d = query.shape
    products = query.reshape(r, h, g * t, d) @ key.float().transpose(-1, -2)
    return products.view(r, h, g, t, key.shape[2])


def usable(vectors: Tensor) -> Tensor:
    """Which vectors [..., D] attention can be computed from, bool [...].

    Their numbers are finite, and not so large that a product of two of them may leave the range of float32.
    """
    return vectors.float().square().sum(dim=-1).isfinite()


def all_usable(vectors: Tensor) -> bool:
    """Whether all vectors [..., D] are :func:`usable`; False, at worst, for vectors near the end of the range."""
    if not vectors.numel():
        return True
    # The least and the largest number are nan where one is, and finding them takes no memory.
    low, high = vectors.aminmax()
    largest: float = max(-float(low), float(high))
    return largest < _SAFE_NORM / math.sqrt(vectors.shape[-1])


def attention_weights(
    logits: Tensor,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Post-softmax attention from the scaled products of queries and keys, as a model works it out.

    Parameters
    ----------
    logits
        float32 [R, H, G, t, N]; overwritten where some are not visible.
    softcap, sink_logit
        As in :class:`AttentionStep`.
    visible
        Which of the last n entries a query sees, bool, broadcast to [R, H, G, t, n]; it sees all before. None for all.

    Returns
    -------
    Tensor
        float32 [R, H, G, t, N]; rows sum to one, less what a learned sink takes.
    """
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None:
        logits[..., logits.shape[-1] - visible.shape[-1] :].masked_fill_(~visible, float("-inf"))
    if sink_logit is None:
        return logits.softmax(dim=-1)
    sink = sink_logit.float()[None, :, :, None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]


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
    scaling: float
    softcap: float | None = None
    """Logits are squashed to ``softcap * tanh(logit / softcap)`` where a model does so."""
    sink_logit: Tensor | None = None
    """Learned logits that take a share of the softmax and attend to nothing (gpt-oss), [H, G]."""
    window: int | None = None
    """A query of a sliding layer sees this many positions, its own included."""
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
        logits = scaled_products(self.query[:, :, :, start:stop], self.key, self.scaling)
        masked = self.tokens > 1 or self.window is not None or self.padded
        visible = self._visible(start, logits.shape[3]) if masked else None
        return attention_weights(logits, self.softcap, self.sink_logit, visible)

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
        back = position[:, None] - self.key_positions[:, :, None, None, :]  # [R, H, 1, count, N]
        visible = back >= 0
        if self.padded:
            visible = visible & (self.key_positions >= 0)[:, :, None, None, :]
        return visible if self.window is None else visible & (back < self.window)
