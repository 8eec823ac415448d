"""Recordings made up from a seed, so that a test can say what a trace must hold without running a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from beaconscope.trace import (
    BeaconChange,
    Eviction,
    HeadBlock,
    Journal,
    LayerLayout,
    TokenBlock,
    TraceLayout,
    journal_path,
)

SMALL = TraceLayout(
    layers=(
        LayerLayout(layer=0, kv_heads=(0, 1), group_size=2, key_size=8, value_size=8),
        LayerLayout(layer=3, kv_heads=(1,), group_size=2, key_size=8, value_size=8),
    ),
    vector_type="float32",
    hits=3,
)


def many_layers(count: int) -> TraceLayout:
    """A layout of ``count`` layers alike."""
    layers = tuple(LayerLayout(layer, (0, 1), 2, 16, 16) for layer in range(count))
    return TraceLayout(layers, "float32", 3)


METADATA: dict[str, Any] = {
    "model": {"id": "tiny", "revision": None, "config": {"layers": 4}, "dtype": "bfloat16", "parameters": 1000},
    "tokenizer": {"id": "tiny"},
    "rotary": {"default": {"theta": 10000.0}},
    "prompt": "plan first",
    "prompt_length": 5,
    "think_open": "<think>",
    "think_close": "</think>",
    "options": {"hits": 3},
    "policy": {"name": "beacon", "params": {"budget": 16}},
    "versions": {"torch": "2.13.0"},
    "device": "cpu",
    "attention_over": "what the cache held",
}


@dataclass
class MadeLayer:
    """Everything a recording holds of one layer, over all T positions."""

    layout: LayerLayout
    query: npt.NDArray[np.float32]  # [T, H, G, D]
    key: npt.NDArray[np.float32]  # [T, H, D]
    value: npt.NDArray[np.float32] | None  # [T, H, Dv]
    beacon: npt.NDArray[np.int16]  # [T, H, G]
    beacon_similarity: npt.NDArray[np.float32]  # [T, H, G]
    mass: npt.NDArray[np.float32]  # [3, T, H, G]
    hit_position: npt.NDArray[np.int32]  # [T, H, G, M]
    hit_mass: npt.NDArray[np.float32]  # [T, H, G, M]
    changes: list[BeaconChange] = field(default_factory=list)
    evictions: list[Eviction] = field(default_factory=list)

    def block(self, first: int, stop: int) -> HeadBlock:
        rows = slice(first, stop)
        return HeadBlock(
            layer=self.layout.layer,
            first_position=first,
            query=self.query[rows],
            key=self.key[rows],
            value=None if self.value is None else self.value[rows],
            beacon=self.beacon[rows],
            beacon_similarity=self.beacon_similarity[rows],
            mass_sink=self.mass[0, rows],
            mass_local=self.mass[1, rows],
            mass_distant=self.mass[2, rows],
            hit_position=self.hit_position[rows],
            hit_mass=self.hit_mass[rows],
            beacon_changes=[change for change in self.changes if first <= change.position < stop],
            evictions=[eviction for eviction in self.evictions if first <= eviction.position < stop],
        )


@dataclass
class Made:
    """A recording that never was."""

    layout: TraceLayout
    length: int
    token_id: npt.NDArray[np.int32]
    token_bytes: list[bytes]
    logprob: npt.NDArray[np.float32]
    entropy: npt.NDArray[np.float32]
    layers: list[MadeLayer]

    def tokens(self, first: int, stop: int) -> TokenBlock:
        rows = slice(first, stop)
        return TokenBlock(first, self.token_id[rows], self.token_bytes[rows], self.logprob[rows], self.entropy[rows])

    def append(self, journal: Journal, first: int, stop: int) -> None:
        """Hand positions ``first`` to ``stop`` to a journal, as a recording does."""
        journal.append_tokens(self.tokens(first, stop))
        for layer in self.layers:
            journal.append(layer.block(first, stop))

    def record(self, output: Path, *, block: int = 16, metadata: dict[str, Any] | None = None) -> Path:
        """Record it all."""
        with Journal.create(output, self.layout, METADATA | (metadata or {})) as journal:
            for first in range(0, self.length, block):
                self.append(journal, first, min(first + block, self.length))
            return journal.finalize({"timings": {"generation": 1.5}})


def make(layout: TraceLayout = SMALL, length: int = 40, *, seed: int = 0, prompt_length: int = 5) -> Made:
    """Make up a recording whose vectors are bfloat16 values, with beacons, evictions and hits."""
    random = np.random.default_rng(seed)
    words = [b"a", b" plan", b"\xf0\x9f", b"\x98\x80", b"\xff", b"", b"\n", " é".encode()]
    choice = random.integers(0, len(words), length)
    known = np.arange(length) >= prompt_length
    return Made(
        layout=layout,
        length=length,
        token_id=choice.astype(np.int32),
        token_bytes=[words[i] for i in choice],
        logprob=np.where(known, -random.random(length), np.nan).astype(np.float32),
        entropy=np.where(known, random.random(length), np.nan).astype(np.float32),
        layers=[_layer(layer, layout.hits, length, random) for layer in layout.layers],
    )


def interrupted(output: Path, length: int = 40, stop: int = 32, block: int = 8) -> Path:
    """Leave the journal of a recording of ``length`` positions that ended after ``stop``."""
    made = make(length=length)
    with Journal.create(output, SMALL, METADATA) as journal:
        for first in range(0, stop, block):
            made.append(journal, first, min(first + block, stop))
    return journal_path(output)


def bfloat16(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float32]:
    """Cut float32 to the digits of bfloat16."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _layer(layout: LayerLayout, hits: int, length: int, random: np.random.Generator) -> MadeLayer:
    heads, groups, size = len(layout.kv_heads), layout.group_size, layout.key_size
    shape = (length, heads, groups)
    start = length // 3
    beacon = np.full(shape, -1, np.int16)
    beacon[start + 1 :] = random.integers(0, 2, beacon[start + 1 :].shape)
    similarity = np.where(beacon < 0, np.nan, random.random(shape)).astype(np.float32)
    past = np.arange(length)[:, None, None, None]
    rank = np.arange(hits)
    hit_position = np.where(rank <= past, (random.random((*shape, hits)) * (past + 1)).astype(np.int32), -1)
    changes, evictions = [], []
    for head in layout.kv_heads:
        gone: set[int] = set()
        for position in range(start, length, 7):
            query_head = np.repeat(np.arange(groups, dtype=np.int16), 2)
            centroid = bool(random.integers(2))
            changes.append(
                BeaconChange(
                    position=position,
                    kv_head=head,
                    query_head=query_head,
                    source=np.full(len(query_head), -1, np.int32)
                    if centroid
                    else random.integers(0, position + 1, len(query_head)).astype(np.int32),
                    members=random.integers(0, 9, len(query_head)).astype(np.int32),
                    vector=random.standard_normal((len(query_head), size)).astype(np.float32) if centroid else None,
                )
            )
            left = np.array(sorted(set(range(position + 1)) - gone), np.int32)
            dropped = np.sort(random.choice(left, min(len(left) // 4, 6), replace=False)).astype(np.int32)
            gone.update(dropped.tolist())
            evictions.append(Eviction(position, head, dropped))
    return MadeLayer(
        layout=layout,
        query=bfloat16(random.standard_normal((*shape, size))),
        key=bfloat16(random.standard_normal((length, heads, size))),
        value=None
        if layout.value_size is None
        else bfloat16(random.standard_normal((length, heads, layout.value_size))),
        beacon=beacon,
        beacon_similarity=similarity,
        mass=random.random((3, *shape)).astype(np.float32),
        hit_position=hit_position.astype(np.int32),
        hit_mass=np.where(hit_position < 0, 0, random.random((*shape, hits))).astype(np.float32),
        changes=changes,
        evictions=evictions,
    )
