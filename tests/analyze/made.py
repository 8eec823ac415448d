"""Traces whose revisits are known, because their queries and keys are built to have them.

A head of size D has three parts: a dimension that every key of position 0 and every query share (the sink), 32
dimensions that turn with the position so that a query matches the keys just before it, and the rest, in which a
revisiting query is aimed at the key of its target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from beaconscope.trace import Eviction, HeadBlock, Journal, LayerLayout, TokenBlock, TraceLayout
from tests.trace.made import METADATA

_LOCAL = 32
_NEAR = 9.0
_SINK = 7.0


@dataclass(frozen=True)
class Plan:
    """What a made trace holds."""

    length: int = 400
    prompt_length: int = 60
    layers: int = 2
    kv_heads: int = 2
    group: int = 2
    size: int = 128
    revisiting: int = 3
    """Query heads, the first ones, that look back at every revisit."""
    rate: float = 0.04
    """Share of the generated steps that revisit."""
    noise: float = 1.0
    """Standard deviation of the logits of unrelated keys, about."""
    strength: float = 12.0
    """Logit of a revisit's target."""
    targets: int = 6
    """Places that are revisited."""
    least: int = 60
    """Tokens back to a target, at least."""


@dataclass(frozen=True)
class Planted:
    """A made trace and its truth."""

    path: Path
    revisits: dict[int, int]
    """Target of each revisit, by the step whose query looks."""


def plant(
    path: Path,
    plan: Plan = Plan(),
    seed: int = 0,
    *,
    shuffled: bool = False,
    metadata: dict[str, Any] | None = None,
    evictions: dict[int, npt.NDArray[np.int32]] | None = None,
    spoil: Any = None,
) -> Planted:
    """Write a trace with revisits.

    Parameters
    ----------
    path
        Where to.
    plan, seed
        What it holds.
    shuffled
        Permute each query head's queries over time, so that nothing is local and no step stands out.
    metadata
        Beside the usual.
    evictions
        Positions dropped by every head, by the step that drops them.
    spoil
        Called with the queries [T, L, H, G, D] and keys [T, L, H, D] before they are written.
    """
    random = np.random.default_rng(seed)
    t, shape = plan.length, (plan.length, plan.layers, plan.kv_heads)
    places = np.sort(random.choice(np.arange(8, max(9, plan.length // 3)), plan.targets, replace=False))
    steps = np.arange(max(plan.prompt_length, int(places[0]) + plan.least), t - 1)
    chosen = steps[random.random(len(steps)) < plan.rate]
    revisits: dict[int, int] = {}
    for step in chosen.tolist():
        far = places[places <= step - plan.least]
        if len(far):
            revisits[step] = int(random.choice(far))

    content = plan.size - _LOCAL - 1
    scale = plan.size**0.5  # what the model's scaling takes away
    key = np.zeros((*shape, plan.size), np.float32)
    query = np.zeros((*shape, plan.group, plan.size), np.float32)
    key[..., :content] = random.standard_normal((*shape, content))
    query[..., :content] = random.standard_normal((*shape, plan.group, content)) * plan.noise * scale / content**0.5
    angle = np.arange(t)[:, None] * np.geomspace(0.1, 2.5, _LOCAL // 2)
    turning = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    key[..., content : content + _LOCAL] = turning[:, None, None]
    query[..., content : content + _LOCAL] = turning[:, None, None, None] * (scale * _NEAR / (_LOCAL // 2))
    key[0, ..., -1] = 1.0
    query[..., -1] = _SINK * scale * random.uniform(0.8, 1.2, (*shape, plan.group))
    heads = [(la, h, g) for la in range(plan.layers) for h in range(plan.kv_heads) for g in range(plan.group)]
    for step, place in revisits.items():
        for layer, head, group in heads[: plan.revisiting]:
            aim = key[place, layer, head, :content]
            query[step, layer, head, group, :content] += aim * (plan.strength * scale / float(aim @ aim))
    if shuffled:
        for layer, head, group in heads:
            query[:, layer, head, group] = query[random.permutation(t), layer, head, group]
    if spoil is not None:
        spoil(query, key)
    _write(path, plan, query, key, random, metadata or {}, evictions or {})
    return Planted(path, revisits)


def _write(
    path: Path,
    plan: Plan,
    query: npt.NDArray[np.float32],
    key: npt.NDArray[np.float32],
    random: np.random.Generator,
    metadata: dict[str, Any],
    evictions: dict[int, npt.NDArray[np.int32]],
) -> None:
    t, g = plan.length, plan.group
    heads = tuple(range(plan.kv_heads))
    layout = TraceLayout(
        tuple(LayerLayout(layer, heads, g, plan.size, None) for layer in range(plan.layers)), "float32", 1
    )
    words = [b" a", b" step", b" plan", b" so", b" it", b" gives"]
    choice = random.integers(0, len(words), t)
    stops = np.arange(t) % 12 == 11
    about = METADATA | {
        "prompt_length": plan.prompt_length,
        "rotary": {"kinds": [], "layers": {}},
        "attention": {
            str(layer): {
                "scaling": plan.size**-0.5, "softcap": None, "sink_logit": None, "window": None, "kv_heads":
                plan.kv_heads
            }
            for layer in range(plan.layers)
        },
        "attention_over": "everything",
    }  # fmt: skip
    with Journal.create(path, layout, about | metadata) as journal:
        journal.append_tokens(
            TokenBlock(
                0,
                np.where(stops, 99, choice).astype(np.int32),
                [b"." if stop else words[word] for word, stop in zip(choice, stops, strict=True)],
                np.full(t, np.nan, np.float32),
                np.full(t, np.nan, np.float32),
            )
        )
        marks = (t, plan.kv_heads, g)
        for layer in range(plan.layers):
            journal.append(
                HeadBlock(
                    layer=layer,
                    first_position=0,
                    query=query[:, layer],
                    key=key[:, layer],
                    value=None,
                    beacon=np.full(marks, -1, np.int16),
                    beacon_similarity=np.full(marks, np.nan, np.float32),
                    mass_sink=np.zeros(marks, np.float32),
                    mass_local=np.zeros(marks, np.float32),
                    mass_distant=np.zeros(marks, np.float32),
                    hit_position=np.full((*marks, 1), -1, np.int32),
                    hit_mass=np.zeros((*marks, 1), np.float32),
                    evictions=[
                        Eviction(step, head, gone) for step, gone in sorted(evictions.items()) for head in heads
                    ],
                )
            )
        journal.finalize()
