"""Drive the rival policies by hand, as a cache would, and the slow readings of their rules beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from beaconscope.attention.step import AttentionStep
from beaconscope.kv.kinds import TokenKind
from beaconscope.kv.layer import Compression
from beaconscope.kv.policies import (
    H2O,
    RKV,
    RPC,
    TOVA,
    CacheView,
    ExpectedAttention,
    FastGen,
    HeadInfo,
    KeyDiff,
    Knorm,
    LazyEviction,
    Policy,
    QueryBlock,
    ScissorHands,
    SnapKV,
)
from tests.reference.beacon_kv import steps
from tests.reference.rivals import (
    expected_attention,
    fastgen,
    h2o,
    key_norms,
    lazy_eviction,
    past,
    rkv,
    rpc,
    scissorhands,
    snapkv,
    tova,
)

KINDS = {"plain": TokenKind.PLAIN, "special": TokenKind.SPECIAL, "punctuation": TokenKind.PUNCTUATION}

# Small enough for short texts to compress often. Each is written twice, once for the package and once for its reading.
CASES: dict[str, tuple[Policy, Callable[[dict], past.Rule]]] = {
    "h2o": (H2O(budget=12), lambda rope: h2o.H2O(12)),
    "h2o recent": (H2O(budget=12, recent=2, interval=5), lambda rope: h2o.H2O(12, recent=2, interval=5)),
    "scissorhands": (
        ScissorHands(budget=14, window=9, recent=3),
        lambda rope: scissorhands.ScissorHands(14, window=9, recent=3),
    ),
    "scissorhands drop": (
        ScissorHands(budget=16, window=400, recent=5, drop=4, interval=3),
        lambda rope: scissorhands.ScissorHands(16, recent=5, drop=4, interval=3),
    ),
    "fastgen": (FastGen(interval=7, local=3), lambda rope: fastgen.FastGen(interval=7, local=3)),
    "fastgen kinds": (
        FastGen(interval=1, recovery=0.62, heavy=0.35, local=4),
        lambda rope: fastgen.FastGen(interval=1, recovery=0.62, heavy=0.35, local=4),
    ),
    "snapkv": (SnapKV(budget=14, interval=6, window=5), lambda rope: snapkv.SnapKV(14, window=5, interval=6)),
    "snapkv max": (
        SnapKV(budget=14, interval=3, window=5, kernel=3, pooling="max"),
        lambda rope: snapkv.SnapKV(14, window=5, kernel=3, pooling="max", interval=3),
    ),
    "tova": (TOVA(budget=12), lambda rope: tova.Tova(12)),
    "tova interval": (TOVA(budget=12, interval=4), lambda rope: tova.Tova(12, interval=4)),
    "r-kv": (RKV(budget=15, interval=6), lambda rope: rkv.RKV(15, interval=6)),
    "r-kv alike": (
        RKV(budget=12, interval=4, window=4, kernel=3, weight=0.6, threshold=0.1),
        lambda rope: rkv.RKV(12, window=4, kernel=3, weight=0.6, threshold=0.1, interval=4),
    ),
    "rpc": (RPC(period=12, recent=4), lambda rope: rpc.RPC(period=12, recent=4)),
    "rpc dense": (RPC(period=6, recent=3, ratio=1, kernel=3), lambda rope: rpc.RPC(6, 3, 1, 3)),
    "lazy-eviction": (
        LazyEviction(budget=14, interval=5, alpha=0.05),
        lambda rope: lazy_eviction.LazyEviction(14, interval=5, alpha=0.05),
    ),
    "lazy-eviction default": (LazyEviction(budget=14, interval=5), lambda rope: lazy_eviction.LazyEviction(14, 5)),
    "keydiff": (KeyDiff(budget=14, interval=5), lambda rope: key_norms.KeyDiff(14, 5)),
    "keydiff recent": (KeyDiff(budget=14, interval=5, recent=3), lambda rope: key_norms.KeyDiff(14, 5, 3)),
    "knorm": (Knorm(budget=14, interval=5), lambda rope: key_norms.Knorm(14, 5)),
    "knorm recent": (Knorm(budget=14, interval=5, recent=3), lambda rope: key_norms.Knorm(14, 5, 3)),
    "expected-attention": (
        ExpectedAttention(budget=14, interval=5),
        lambda rope: expected_attention.ExpectedAttention(14, rope, interval=5),
    ),
    "expected-attention near": (
        ExpectedAttention(budget=14, interval=9, future=3, skip=0, sinks=1),
        lambda rope: expected_attention.ExpectedAttention(14, rope, future=3, skip=0, sinks=1, interval=9),
    ),
}


def drive(
    policy: Policy,
    heads: HeadInfo,
    query: Tensor,  # [R, H, G, T, D]
    key: Tensor,  # [R, H, T, D]
    value: Tensor,  # [R, H, T, Dv]
    prompt: int,
    kinds: Tensor | None = None,  # [R, T]
    chunks: Sequence[int] | None = None,
) -> list[tuple[int, list[list[list[int]]]]]:
    """What a policy keeps at every compression, by row and head."""
    state = policy.start(replace(heads, prompt=prompt))
    rows, count = key.shape[:2]
    held = torch.zeros((rows, count, 0), dtype=torch.int64)
    found = []
    for step in steps(query.shape[3], prompt, chunks):
        new = slice(step.start, step.stop)
        held = torch.cat([held, torch.arange(step.start, step.stop).expand(rows, count, -1)], dim=-1)
        keys, values = (_entries(part, held) for part in (key, value))
        if policy.needs_attention:
            state.attend(
                AttentionStep(
                    rows=None,
                    first_position=step.start,
                    query=query[:, :, :, new],
                    key=keys,
                    value=values,
                    key_positions=held,
                    spec=heads.spec,
                    kinds=None if kinds is None else kinds[:, new],
                    padded=policy.ragged,
                )
            )
        if policy.needs_queries:
            together = len(step) > 1 or step.start < prompt
            state.observe(QueryBlock(query[:, :, :, new], step.start, together=together))
        if state.capacity is None or held.shape[-1] < state.capacity:
            continue
        size = None if policy.ragged else state.kept_size(held.shape[-1])
        kept = state.keep(CacheView(key=keys, value=values, positions=held, newest=step.stop - 1))
        assert not (kept & (held < 0)).any()
        if size is not None:
            assert (kept.sum(-1) == size).all()
        size = int(kept.sum(-1).max())
        # Kept entries to the last slots, oldest first.
        order = kept.to(torch.uint8).argsort(dim=-1, stable=True)[..., held.shape[-1] - size :]
        index = order.where(kept.gather(-1, order), -1)
        state.evicted(index)
        held = held.gather(-1, order).where(index >= 0, -1)
        sets = [[row[head][row[head] >= 0].tolist() for head in range(count)] for row in held]
        found.append((step.stop - 1, sets))
    return found


def _entries(part: Tensor, held: Tensor) -> Tensor:
    index = held.clamp(min=0).unsqueeze(-1).expand(*held.shape, part.shape[-1])
    return part.gather(2, index)


def expected(
    rule: past.Rule,
    query: np.ndarray,  # [H, T, G, D]
    key: np.ndarray,  # [H, T, D]
    value: np.ndarray,  # [H, T, Dv]
    prompt: int,
    kinds: Sequence[str] | None = None,
    chunks: Sequence[int] | None = None,
    scaling: float | None = None,
) -> list[past.Kept]:
    """What the slow reading keeps of one sequence."""
    return past.simulate(
        rule,
        query.swapaxes(0, 1),
        key.swapaxes(0, 1),
        value.swapaxes(0, 1),
        prompt,
        kinds=kinds,
        chunks=chunks,
        scaling=scaling,
    )


class Watched:
    """An observer that keeps what one sequence of the batch brought to a layer, and what was kept of it."""

    def __init__(self, layer: int, row: int = 0) -> None:
        self._layer, self._row = layer, row
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self.kept: list[past.Kept] = []

    def wants(self, layer: int) -> bool:
        return layer == self._layer

    def attended(self, layer: int, lane: int, step: AttentionStep) -> None:
        at = _within(step.rows, self._row)
        if at is None:
            return
        new = slice(step.key.shape[2] - step.tokens, None)
        parts = (step.query[at].movedim(2, 1), step.key[at, :, new], step.value[at, :, new])
        self._parts.append(tuple(part.detach().clone() for part in parts))

    def compressed(self, layer: int, lane: int, compression: Compression) -> None:
        at = _within(compression.rows, self._row)
        if at is not None:
            both = zip(compression.positions[at], compression.kept[at], strict=True)
            self.kept.append(past.Kept(compression.position, [head[kept].tolist() for head, kept in both]))

    def vectors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries [H, T, G, D], keys [H, T, D] and values [H, T, Dv] so far."""
        query, key, value = (torch.cat(part, dim=1).numpy() for part in zip(*self._parts, strict=True))
        return query, key, value


def _within(rows: Tensor | None, row: int) -> int | None:
    if rows is None:
        return row
    return rows.tolist().index(row) if row in rows else None
