"""The heads of one layer that a policy decides for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from beaconscope.attention.rotary import Rotary
from beaconscope.attention.spec import AttentionSpec


@dataclass(frozen=True)
class HeadInfo:
    """The heads of one layer that a state decides for. R sequences, H KV heads, G query heads in each, size D."""

    layer: int
    kv_heads: tuple[int, ...]
    """Index of each of the H KV heads in the layer; a seeded policy draws by it, whichever heads are at hand."""
    rows: int
    group_size: int
    size: int
    spec: AttentionSpec
    device: torch.device
    rotary: Rotary
    prompt: int = 0
    """Tokens of the prompt: what is there before anything is generated."""
    shared: bool = False
    """The heads share one stored entry (latent attention), so they have to keep the same set."""
    follow: bool = False
    """Log what :class:`~beaconscope.kv.beacons.BeaconTracker` sees, for a recording."""
