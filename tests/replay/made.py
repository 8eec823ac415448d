"""Layers out of random numbers, with a few keys that draw attention, as traces have them."""

from __future__ import annotations

import torch

from beaconscope.attention.rotary import Rotary
from beaconscope.attention.spec import AttentionSpec
from beaconscope.replay.layer import LayerData


def made_layer(
    length: int = 150, prompt: int = 20, heads: int = 2, group: int = 2, size: int = 8, seed: int = 0, **fields
) -> LayerData:
    """A layer whose attention is neither flat nor on one entry; the first key is a sink."""
    draw = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn((1, heads, group, length, size), generator=draw)
    key = torch.randn((1, heads, length, size), generator=draw)
    key[:, :, 0] = query.mean(dim=(2, 3)) * 20
    spec = {name: fields.pop(name) for name in ("scaling", "softcap", "sink_logit", "window") if name in fields}
    return LayerData(
        **{
            "layer": 3,
            "kv_heads": tuple(range(heads)),
            "query": query,
            "key": key,
            "value": torch.randn((1, heads, length, size - 1), generator=draw),
            "rotary": Rotary.none(size),
            "spec": AttentionSpec(**{"scaling": size**-0.5, **spec}),
            "passes": (prompt,) if prompt else (),
            **fields,
        }
    )
