"""Read the rotary embedding off a model, and prove it.

The model's own ``apply_rotary_pos_emb`` is linear in the vector it rotates, so three calls on unit vectors say which
dimensions pair, with which sign, and which frequency turns each. What comes out is arithmetic that needs no model
(:class:`~beaconscope.kv.rotary.Rotary`), and two checks stand behind it:

1. it gives what the model's function gives, on random vectors;
2. one token, alone in its sequence, attends to itself only, so every layer sees the same input at whatever position it
   stands; the un-rotated queries of that token at several positions must therefore agree, in every layer.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.rotary import Rotary

PROBE_POSITIONS = (0, 1, 7, 61)
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}


class RotaryMismatch(BeaconScopeError):
    """The rotary embedding of a layer could not be undone."""


def derive_rotary(
    module: nn.Module, position_embeddings: tuple[Tensor, Tensor], queries: Tensor, positions: Tensor, model: nn.Module
) -> Rotary:
    """The rotary embedding of one attention layer.

    Parameters
    ----------
    module
        The attention layer; its module of code holds ``apply_rotary_pos_emb``.
    position_embeddings
        Cosine and sine that the model handed to the layer for ``positions``, each [P, 1, F].
    queries
        Post-RoPE queries of one and the same token at ``positions``, [P, heads, D].
    positions
        int64 [P], the first of them 0.
    model
        The whole model, in whose rotary modules the frequencies are looked up.

    Raises
    ------
    RotaryMismatch
        When no reading passes the checks.
    """
    size = queries.shape[-1]
    queries = queries.float()
    scale = queries.norm(dim=-1).mean().clamp(min=1e-6)
    tolerance = _TOLERANCE.get(position_embeddings[0].dtype, 1e-4) * scale
    plain = Rotary.none(size)
    if _spread(queries) <= tolerance * 1e-1:
        return plain  # a layer without rotary embedding
    for candidate in _candidates(module, position_embeddings, positions, model, size):
        if _spread(candidate.unrotate(queries, positions[:, None])) <= tolerance:
            return candidate
    raise RotaryMismatch(
        f"the rotary embedding of layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__}) could not be "
        "undone, so its pre-RoPE queries are not known"
    )


def _spread(queries: Tensor) -> Tensor:
    """Largest difference between a token's queries at different positions, [P, heads, D] -> []."""
    return (queries - queries[:1]).abs().max()


def function_beside(module: nn.Module, name: str) -> Any:
    """The function ``name`` of the file that a module's class, or one that it derives from, is written in."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules[kind.__module__], name, None)
        if found is not None:
            return found
    return None


def _candidates(
    module: nn.Module, position_embeddings: tuple[Tensor, Tensor], positions: Tensor, model: nn.Module, size: int
) -> list[Rotary]:
    """Readings of the model's own rotary function: on the whole head, or on its last dimensions (latent attention)."""
    apply = function_beside(module, "apply_rotary_pos_emb")
    if apply is None:
        return []
    cos, _ = position_embeddings
    found = []
    rotated = getattr(module, "qk_rope_head_dim", None)
    for part in dict.fromkeys([size, rotated or size]):
        structure = _structure(apply, part, cos.shape[-1])
        if structure is None:
            continue
        partner, sign, column = structure
        spare = size - part  # dimensions before them that do not turn
        for inv_freq, scaling, limit in _frequencies(model, position_embeddings, positions):
            # The cosine may be there twice, once for each dimension of a pair.
            frequency = torch.where(column >= 0, column % len(inv_freq), -1)
            rotary = Rotary(
                partner=torch.cat([torch.arange(spare), partner + spare]),
                sign=torch.cat([torch.ones(spare), sign]),
                frequency=torch.cat([torch.full((spare,), -1), frequency]),
                inv_freq=inv_freq,
                scaling=scaling,
                dtype=cos.dtype,
                limit=limit,
            )
            if _agrees(apply, rotary, position_embeddings, positions, spare):
                found.append(rotary)
    return found


def _structure(apply: Any, size: int, columns: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Partner, sign and cosine column of each dimension, by probing ``apply`` with unit vectors.

    ``columns`` is the width of the cosine table; the column is -1 for a dimension that does not turn. None where the
    function does not rotate pairs of dimensions.
    """
    unit = torch.eye(size)[None, None]  # [1, 1, size, size]: each token is a unit vector

    def turned(cos: Tensor, sin: Tensor) -> Tensor:
        table = (cos.expand(1, size, columns), sin.expand(1, size, columns))
        image: Tensor = apply(unit, unit, *table)[0][0, 0]  # row i is the image of unit vector i
        return image.T

    zero, one = torch.zeros(columns), torch.ones(columns)
    try:
        straight, crossed = turned(one, zero), turned(zero, one)
        column = turned(torch.arange(1, columns + 1, dtype=torch.float32), zero).diagonal()
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if not torch.equal(straight, torch.eye(size)):
        return None
    passes = (crossed == torch.eye(size)).all(dim=1)  # stays itself even where every cosine is zero
    partner = crossed.abs().argmax(dim=1)
    sign = crossed.gather(1, partner[:, None]).squeeze(1)
    if not torch.equal(torch.zeros(size, size).scatter(1, partner[:, None], sign[:, None]), crossed):
        return None
    return partner, sign, (column.round().long() - 1).where(~passes, torch.tensor(-1))


def _frequencies(
    model: nn.Module, position_embeddings: tuple[Tensor, Tensor], positions: Tensor
) -> list[tuple[Tensor, float, int | None]]:
    """Frequencies, scaling and limit of every rotary module of the model that could have made these embeddings."""
    found = []
    for name, buffer in model.named_buffers():
        leaf = name.rpartition(".")[2]
        if not leaf.endswith("inv_freq") or leaf.endswith("original_inv_freq") or not buffer.numel():
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        prefix = leaf.removesuffix("inv_freq")
        scaling = float(getattr(owner, f"{prefix}attention_scaling", 1.0))
        kind = getattr(owner, f"{prefix}rope_type", None) or getattr(owner, "rope_type", "default")
        if isinstance(kind, dict):
            kind = kind.get(prefix.rstrip("_"), "default")
        limit = None
        if kind in ("dynamic", "longrope"):
            limit = _original_context(owner, model)
        # A copy: dynamic rotary changes its buffer as a sequence grows.
        inv_freq = buffer.detach().float().cpu().clone()
        cos = (positions.float().cpu()[:, None] * inv_freq).cos() * scaling  # [P, F]
        width = len(inv_freq)
        given = position_embeddings[0].float().cpu().reshape(len(positions), -1)[:, :width]
        if given.shape == cos.shape and torch.allclose(cos, given, atol=1e-2):
            found.append((inv_freq, scaling, limit))
    return found


def _original_context(owner: nn.Module, model: nn.Module) -> int | None:
    config: Any = getattr(owner, "config", getattr(model, "config", None))
    scaling = getattr(config, "rope_parameters", None) or {}
    length = scaling.get("original_max_position_embeddings") if isinstance(scaling, dict) else None
    return (
        length
        or getattr(config, "original_max_position_embeddings", None)
        or getattr(config, "max_position_embeddings", None)
    )


def _agrees(
    apply: Any, rotary: Rotary, position_embeddings: tuple[Tensor, Tensor], positions: Tensor, spare: int
) -> bool:
    """Whether ``rotary`` gives what the model's function gives on random vectors."""
    size = len(rotary.partner)
    vectors = torch.randn(len(positions), 1, 1, size, generator=torch.Generator().manual_seed(0))
    cos, sin = (part.float().cpu() for part in position_embeddings)
    theirs = apply(vectors[..., spare:], vectors[..., spare:], cos, sin)[0]
    ours = rotary.rotate(vectors, positions.cpu()[:, None, None])[..., spare:]
    return bool(torch.allclose(ours, theirs, atol=_TOLERANCE.get(rotary.dtype, 1e-4)))
