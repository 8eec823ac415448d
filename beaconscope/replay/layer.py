"""One recorded layer as tensors, with what its attention needs beside queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.entries import pick_entries
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.kinds import token_kinds
from beaconscope.kv.rotary import Rotary
from beaconscope.kv.step import AttentionStep, all_usable, usable
from beaconscope.trace import Trace
from beaconscope.trace.facts import attention_of, prefill_passes, rotary_of


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
    shared: bool = False
    """The heads share one stored entry (latent attention), so they have to keep the same set."""
    kinds: Tensor | None = None  # uint8 [1, T], a TokenKind each
    finite: tuple[int, ...] = ()
    """Positions of each head before its first query, key or value that is not finite; empty where all are finite.
    From there on the vectors that are not finite are zeros, and nothing that follows from them may be reported."""

    @property
    def length(self) -> int:
        """T, positions in the trace."""
        return self.query.shape[3]

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt; decoding begins at this position."""
        return sum(self.passes)

    def known_until(self, head: int | None = None) -> int:
        """The position from which on it is not known what a cache would keep, of a head by its index or of any head.

        It is that of the first vector that is not finite: a policy that sees it decides by numbers that nobody has.
        Where heads share one entry, they decide together.
        """
        if not self.finite:
            return self.length
        return min(self.finite) if self.shared or head is None else self.finite[head]

    @cached_property
    def unit_key(self) -> Tensor:
        """Keys of norm 1, [1, H, T, D]."""
        return normalize(self.key, dim=-1)

    @cached_property
    def key_norm(self) -> Tensor:
        """Norms of the keys, [1, H, T]."""
        norm: Tensor = self.key.norm(dim=-1)
        return norm

    @cached_property
    def value_norm(self) -> Tensor:
        """Norms of the values, or of the keys where no values are recorded, [1, H, T]."""
        norm: Tensor = (self.key if self.value is None else self.value).norm(dim=-1)
        return norm

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
            softcap=self.softcap,
            sink_logit=self.sink_logit,
            prompt=self.prompt_length,
            shared=self.shared,
        )

    def alone(self, head: int) -> LayerData:
        """The same layer with only its KV head number ``head``."""
        one = slice(head, head + 1)
        return replace(
            self,
            kv_heads=self.kv_heads[one],
            query=self.query[:, one],
            key=self.key[:, one],
            value=None if self.value is None else self.value[:, one],
            sink_logit=None if self.sink_logit is None else self.sink_logit[one],
            finite=self.finite[one],
        )

    def step(self, start: int, stop: int, held: Tensor, *, padded: bool = False) -> AttentionStep:
        """The tokens ``start`` to ``stop`` attending to the positions ``held``, int64 [1, H, N], the new ones last.

        A head that holds fewer than N has -1 in the first columns, where ``padded`` says that there are such heads.
        """
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
            kinds=None if self.kinds is None else self.kinds[:, start:stop],
            padded=padded,
        )

    def everything(self, start: int, stop: int) -> AttentionStep:
        """The tokens ``start`` to ``stop`` attending to all positions up to the last of them."""
        heads = len(self.kv_heads)
        return AttentionStep(
            rows=None,
            first_position=start,
            query=self.query[:, :, :, start:stop],
            key=self.key[:, :, :stop],
            value=(self.key if self.value is None else self.value)[:, :, :stop],
            key_positions=torch.arange(stop, device=self.key.device).expand(1, heads, stop),
            scaling=self.scaling,
            softcap=self.softcap,
            sink_logit=self.sink_logit,
            window=self.window,
        )

    def entries(self, of: Tensor, held: Tensor) -> Tensor:
        """Keys or values [1, H, T, D] of the positions ``held`` [1, H, N]: [1, H, N, D]; any entry for -1."""
        return pick_entries(of, held.clamp(min=0))


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
    facts = attention_of(trace, layer)
    if facts is None or str(layer) not in (trace.metadata.get("rotary", {}).get("layers") or ()):
        raise BeaconScopeError(
            f"{trace.path} does not say how layer {layer} attends, so it cannot be replayed; record it anew"
        )
    scaling, softcap, sinks, window = (facts[key] for key in ("scaling", "softcap", "sink_logit", "window"))
    turned = rotary_of(trace, layer)
    read = [trace.head(layer, head) for head in heads]

    def stacked(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(arrays)).to(device).float().unsqueeze(0)

    query = stacked([head.query.transpose(1, 0, 2) for head in read])  # [1, H, G, T, D]
    key = stacked([head.key for head in read])
    recorded = [head.value for head in read if head.value is not None]
    value = stacked(recorded) if values and len(recorded) == len(heads) else None
    finite: tuple[int, ...] = ()
    if not all(all_usable(each) for each in (query, key, value) if each is not None):
        finite = _finite_positions(query, key, value)
        query, key = _zeroed(query), _zeroed(key)
        value = None if value is None else _zeroed(value)
    return LayerData(
        layer=layer,
        kv_heads=heads,
        query=query,
        key=key,
        value=value,
        finite=finite,
        rotary=Rotary.none(query.shape[-1]) if turned is None else Rotary.from_dict(turned),
        scaling=float(scaling),
        softcap=softcap,
        sink_logit=None if sinks is None else torch.tensor(sinks, device=device)[list(heads)],
        window=window,
        passes=prefill_passes(trace),
        shared=layer in trace.metadata.get("shared_layers", ()),
        kinds=_kinds(trace, device),
    )


def _finite_positions(query: Tensor, key: Tensor, value: Tensor | None) -> tuple[int, ...]:
    """Positions of each head before the first at which a query, the key or the value is not usable."""
    there = usable(query).all(dim=2) & usable(key)  # [1, H, T]
    if value is not None:
        there &= usable(value)
    return tuple(there[0].long().cumprod(dim=1).sum(dim=1).tolist())


def _zeroed(vectors: Tensor) -> Tensor:
    """The vectors with zeros in place of those that are not usable."""
    return vectors.where(usable(vectors).unsqueeze(-1), 0)


def _kinds(trace: Trace, device: str) -> Tensor | None:
    """The kind of every token, uint8 [1, T]; None where the trace does not say which ids are special."""
    special = trace.metadata.get("tokenizer", {}).get("special_ids")
    if special is None:
        return None
    tokens = trace.tokens
    pieces = [
        str(text).encode() if data is None else bytes(data)
        for text, data in zip(tokens["token"], tokens["token_bytes"], strict=True)
    ]
    return token_kinds(pieces, np.flatnonzero(tokens["token_id"].isin(special)).tolist()).unsqueeze(0).to(device)
