"""From queries and keys to post-softmax attention, as a model computes it. Masks are written here and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor

from beaconscope.attention.spec import AttentionSpec

HIDDEN = float("-inf")
"""The logit of an entry that a query does not see."""


def scaled_products(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return the products of queries [R, H, G, t, D] with the keys [R, H, N, D] of their heads, times ``scaling``.

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


def attention_weights(logits: Tensor, spec: AttentionSpec, visible: Tensor | None = None) -> Tensor:
    """Return post-softmax attention from the scaled products of queries and keys.

    Parameters
    ----------
    logits
        float32 [R, H, G, t, N]; overwritten.
    spec
        Soft cap and learned sinks are applied. The window is not: ``visible`` says what a query sees.
    visible
        Which of the last n entries a query sees, bool, broadcast to [R, H, G, t, n]; it sees all before. None for all.

    Returns
    -------
    Tensor
        float32 [R, H, G, t, N]; rows sum to one, less what a learned sink takes.
    """
    cap_logits_(logits, spec)
    if visible is not None:
        logits[..., logits.shape[-1] - visible.shape[-1] :].masked_fill_(~visible, HIDDEN)
    sink = None if spec.sink_logit is None else spec.sink_logit.float()[None, :, :, None, None]
    return softmax_beside(logits, sink)


def softmax_beside(logits: Tensor, sink_logit: Tensor | None) -> Tensor:
    """Return the softmax over the entries of logits [..., N] and a learned sink, without the sink's share.

    ``sink_logit`` is broadcast to [..., 1]; None where there is no sink.
    """
    if sink_logit is None:
        return logits.softmax(dim=-1)
    sink = sink_logit.expand(*logits.shape[:-1], 1)
    return torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]


def cap_logits_(logits: Tensor, spec: AttentionSpec) -> Tensor:
    """Apply a layer's soft cap to scaled products, in place."""
    if spec.softcap is not None:
        logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return logits


def visible_entries(position: Tensor, entry: Tensor, spec: AttentionSpec) -> Tensor:
    """Return which entries queries see: none after them, and none before their window.

    Parameters
    ----------
    position
        Positions of the queries, int64.
    entry
        Positions of the entries, int64; broadcast with ``position``.
    """
    back = position - entry
    return back >= 0 if spec.window is None else (back >= 0) & (back < spec.window)


def hide_unseen_(logits: Tensor, position: Tensor, spec: AttentionSpec) -> Tensor:
    """Hide what queries do not see of the entries at positions 0 to N - 1, in place.

    Parameters
    ----------
    logits
        [..., t, N].
    position
        Positions of the queries, int64 [t], ascending.
    """
    count = logits.shape[-1]
    # All queries see what lies before the first of them, but for the window.
    first = int(position[0])
    if spec.window is not None and count > spec.window:
        first = 0
    entry = torch.arange(first, count, device=logits.device)
    logits[..., first:].masked_fill_(~visible_entries(position[:, None], entry, spec), HIDDEN)
    return logits
