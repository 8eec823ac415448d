"""What must hold for an architecture, checked through the public interface of BeaconScope.

Expected numbers come from :mod:`testing.architectures.twin`. Every check gives the findings that are wrong; nothing
wrong is an empty list.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from beaconscope import BeaconKV, Trace
from beaconscope.analyze.attention import HeadAttention, evicted_at, layer_facts
from beaconscope.replay.layer import load_layer
from beaconscope.replay.simulate import drive
from testing.architectures.twin import Pass

TOLERANCE = 5e-4
LOGPROB_TOLERANCE = 1e-3


def check_tokens(trace: Trace, expected: list[int], truth: Pass, whose: str) -> list[str]:
    """The tokens are the ones expected, but where the two likeliest are as good as equal."""
    ours = token_ids(trace)[trace.prompt_length :]
    for step, (mine, theirs) in enumerate(zip(ours, expected, strict=False)):
        if mine != theirs:
            row = truth.logits[trace.prompt_length + step - 1]
            gap = float((row[mine] - row[theirs]).abs())
            return [] if gap < TOLERANCE else [f"tokens differ from {whose}, from number {step + 1} on"]
    return []


def check_logprobs(trace: Trace, truth: Pass) -> list[str]:
    """The log-probability of each new token is the twin's, and the token is the likeliest one."""
    ids = torch.tensor(token_ids(trace))
    rows = slice(trace.prompt_length - 1, trace.length - 1)
    expected = truth.logits[rows].float().log_softmax(dim=-1)
    new = ids[trace.prompt_length :, None]
    ours = trace.tokens["logprob"].to_numpy()[trace.prompt_length :]
    off = float(np.nan_to_num(np.abs(ours - expected.gather(-1, new)[:, 0].numpy()), nan=np.inf).max())
    found = [f"logprob is off by {off:.2g}"] if off > LOGPROB_TOLERANCE else []
    lost = float((expected.amax(dim=-1) - expected.gather(-1, new)[:, 0]).max())
    return found + ([f"a token is not the likeliest, by {lost:.2g}"] if lost > LOGPROB_TOLERANCE else [])


def check_attention(trace: Trace, truth: Pass) -> list[str]:
    """Hits, masses and recomputed attention of every head are the twin's attention."""
    worst: dict[str, tuple[float, int]] = {}
    for layer, kv_head in trace.heads:
        if layer not in truth.weights:
            continue
        head = trace.head(layer, kv_head)
        group = head.query.shape[1]
        weights = truth.weights[layer][kv_head * group : (kv_head + 1) * group]  # [G, T, T]
        if weights.shape[0] != group:
            return [f"layer {layer} has {truth.weights[layer].shape[0]} query heads, not those of the trace"]
        attention = HeadAttention(head, layer_facts(trace, layer), evicted_at(trace, layer, kv_head))
        off = {
            "hits": _hits_off(head.hit_position, head.hit_mass, weights),
            "masses": _masses_off(trace, head, weights),
            "recomputed attention": _off(attention.block(0, trace.length), weights),
        }
        for name, by in off.items():
            if by > worst.get(name, (TOLERANCE, -1))[0]:
                worst[name] = (by, layer)
    return [f"{name} of layer {layer} off by {by:.2g}" for name, (by, layer) in worst.items()]


def unchecked_layers(trace: Trace, truth: Pass) -> list[int]:
    """Recorded layers whose attention weights the twin does not give."""
    return [layer for layer in trace.layers if layer not in truth.weights]


def check_evictions(trace: Trace, policy: BeaconKV, truth: Pass, silent: bool) -> list[str]:
    """Layers that see everything are compressed, hold no more than they may, and are replayed as they were recorded.

    Parameters
    ----------
    trace
        Recorded with ``policy``.
    policy
        What it was recorded with.
    truth
        Of the same tokens with a full cache.
    silent
        Whether nothing was said of layers that are not compressed.
    """
    found = []
    left = []
    most = policy.budget + policy.interval
    for layer in trace.layers:
        compressed = [head for head in trace.kv_heads(layer) if trace.evictions(layer, head)]
        if not compressed:
            if silent and layer in truth.weights and sees_everything(truth.weights[layer]):
                left.append(layer)
            continue
        for head in trace.kv_heads(layer):
            held = max(len(trace.kept(layer, head, p)) for p in range(trace.prompt_length - 1, trace.length))
            if held > most:
                found.append(f"layer {layer} holds {held} entries, more than {most}")
        kept = drive(policy, load_layer(trace, layer))
        for number, head in enumerate(trace.kv_heads(layer)):
            recorded = [(each.position, each.evicted.tolist()) for each in trace.evictions(layer, head)]
            replayed = [(position, dropped.tolist()) for position, dropped in kept.evicted(number)]
            if recorded != replayed:
                found.append(f"replay evicts otherwise than layer {layer}, KV head {head}, was recorded")
    if left:
        found.append(f"nothing was evicted from layers {left}, which see everything, and nothing says so")
    return found


def sees_everything(weights: Tensor) -> bool:
    """Whether every query of attention [Hq, T, T] gives something to every position up to its own."""
    seen = (weights > 0).any(dim=0)
    return bool(seen[torch.ones_like(seen).tril()].float().mean() > 0.999)


def hidden_entries(trace: Trace) -> dict[int, Tensor]:
    """Which entries the trace says that a query could not see, bool [Hq, T, T] by layer."""
    hidden = {}
    for layer in trace.layers:
        heads = []
        for kv_head in trace.kv_heads(layer):
            gone = torch.full((trace.length,), trace.length)
            for eviction in reversed(trace.evictions(layer, kv_head)):
                gone[torch.from_numpy(eviction.evicted.astype(np.int64))] = eviction.position
            heads.append(gone < torch.arange(trace.length)[:, None])
        group = trace.layout.of(layer).group_size
        hidden[layer] = torch.stack(heads).repeat_interleave(group, dim=0)
    return hidden


def token_ids(trace: Trace) -> list[int]:
    """Ids of all tokens of a trace."""
    return trace.tokens["token_id"].tolist()


def _hits_off(position: np.ndarray, mass: np.ndarray, weights: Tensor) -> float:
    """How far hits [T, G, M] are from the largest weights [G, T, T] of each row."""
    by_row = weights.transpose(0, 1)  # [T, G, T]
    largest = by_row.topk(mass.shape[-1], dim=-1).values
    at = by_row.gather(-1, torch.from_numpy(position.astype(np.int64)).clamp(min=0))
    named = torch.from_numpy(position >= 0)
    return max(_off(torch.from_numpy(mass), largest), _off(at * named, torch.from_numpy(mass) * named))


def _masses_off(trace: Trace, head: object, weights: Tensor) -> float:
    """How far the three masses are from sums of weights [G, T, T]."""
    options = trace.options
    back = torch.arange(trace.length)[:, None] - torch.arange(trace.length)
    sink = (torch.arange(trace.length) < options["sink_positions"]).expand_as(back)
    local = (back <= options["local_window"]) & ~sink
    parts: Mapping[str, Tensor] = {"mass_sink": sink, "mass_local": local, "mass_distant": ~sink & ~local}
    return max(
        _off(torch.from_numpy(np.array(getattr(head, name))), (weights * part).sum(dim=-1).T)
        for name, part in parts.items()
    )


def _off(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).abs().nan_to_num(nan=torch.inf).max())
