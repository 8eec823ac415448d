"""One recorded layer as tensors, with what its attention needs beside queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.rotary import Rotary
from beaconscope.kv.step import AttentionStep
from beaconscope.trace import Trace


@dataclass(frozen=True)
class LayerData:
    """H recorded KV heads of a layer, G query heads in each, T positions."""

    layer: int
    kv_heads: tuple[int, ...]
    query: Tensor  # [1, H, G, T, D], post-RoPE
    key: Tensor  # [1, H, T, D], post-RoPE
    value: Tensor | None  # [1, H, T, Dv]
    rotary: Rotary
    scaling: float
    softcap: float | None
    sink_logit: Tensor | None  # [H, G]
    window: int | None
    passes: tuple[int, ...]
    """Tokens of each forward pass of the prompt."""

    @property
    def length(self) -> int:
        """T, positions in the trace."""
        return self.query.shape[3]

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt; decoding begins at this position."""
        return sum(self.passes)

    def heads(self) -> HeadInfo:
        """The heads as a policy's state is told of them."""
        return HeadInfo(
            layer=self.layer,
            kv_heads=self.kv_heads,
            rows=1,
            group_size=self.query.shape[2],
            size=self.query.shape[4],
            scaling=self.scaling,
            device=self.query.device,
            rotary=self.rotary,
        )

    def step(self, start: int, stop: int, held: Tensor) -> AttentionStep:
        """The tokens ``start`` to ``stop`` attending to the positions ``held``, int64 [1, H, N], the new ones last."""
        return AttentionStep(
            rows=None,
            first_position=start,
            query=self.query[:, :, :, start:stop],
            key=self.entries(self.key, held),
            value=self.entries(self.key if self.value is None else self.value, held),
            key_positions=held,
            scaling=self.scaling,
            softcap=self.softcap,
            sink_logit=self.sink_logit,
            window=self.window,
        )

    def entries(self, of: Tensor, held: Tensor) -> Tensor:
        """Keys or values [1, H, T, D] of the positions ``held`` [1, H, N]: [1, H, N, D]."""
        return of.gather(2, held.unsqueeze(-1).expand(*held.shape, of.shape[-1]))


def load_layer(
    trace: Trace, layer: int, kv_heads: Sequence[int] | None = None, *, values: bool = True, device: str = "cpu"
) -> LayerData:
    """Read a layer of a trace.

    Parameters
    ----------
    trace
        The trace.
    layer
        A recorded layer.
    kv_heads
        Recorded KV heads of it; None for all of them.
    values
        Read values too, where they are recorded.
    device
        Where the tensors go.

    Raises
    ------
    BeaconScopeError
        When the layer or a head is not in the trace, or the trace does not say how its layers attend.
    """
    heads = tuple(trace.kv_heads(layer) if kv_heads is None else kv_heads)
    try:
        facts = trace.metadata["attention"][str(layer)]
        rotary = trace.metadata["rotary"]
        kind = rotary["layers"][str(layer)]
        turned = None if kind is None else Rotary.from_dict(rotary["kinds"][kind])
        scaling, softcap, sinks, window = (facts[key] for key in ("scaling", "softcap", "sink_logit", "window"))
        passes = tuple(int(size) for size in trace.metadata.get("prefill_passes") or [trace.prompt_length])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BeaconScopeError(
            f"{trace.path} does not say how layer {layer} attends, so it cannot be replayed; record it anew"
        ) from error
    read = [trace.head(layer, head) for head in heads]

    def stacked(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(arrays)).to(device).float().unsqueeze(0)

    query = stacked([head.query.transpose(1, 0, 2) for head in read])  # [1, H, G, T, D]
    recorded = [head.value for head in read if head.value is not None]
    return LayerData(
        layer=layer,
        kv_heads=heads,
        query=query,
        key=stacked([head.key for head in read]),
        value=stacked(recorded) if values and len(recorded) == len(heads) else None,
        rotary=Rotary.none(query.shape[-1]) if turned is None else turned,
        scaling=float(scaling),
        softcap=softcap,
        sink_logit=None if sinks is None else torch.tensor(sinks, device=device)[list(heads)],
        window=window,
        passes=_within(passes, trace.length),
    )


def _within(passes: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The passes of a prompt, cut where the trace was cut."""
    kept, total = [], 0
    for size in passes:
        size = min(size, length - total)
        if size > 0:
            kept.append(size)
            total += size
    return tuple(kept)
