"""Read the rotary embedding off a model, and prove it.

The model's own ``apply_rotary_pos_emb`` is linear in the vector it rotates, so three calls on unit vectors say which
dimensions pair, with which sign, and which frequency turns each. What comes out is arithmetic that needs no model
(:class:`~beaconscope.kv.rotary.Rotary`), and two checks stand behind it:

1. it gives what the model's function gives, on random vectors;
2. the un-rotated queries of one hidden state at several positions agree, in every layer.

Where there is no such function, or it is called on a part of a head, the usual layouts are tried (half-split or
interleaved pairs, on the first or the last dimensions, either direction); the second check says which it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.rotary import Rotary
from beaconscope.models.hooks import function_beside

PROBE_POSITIONS = (0, 1, 7, 61)
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 6e-2, torch.float16: 2e-2}


class RotaryMismatch(BeaconScopeError):
    """The rotary embedding of a layer could not be undone."""


def derive_rotary(
    module: nn.Module, position_embeddings: Any, queries: Tensor, positions: Tensor, model: nn.Module
) -> Rotary:
    """Return the rotary embedding of one attention layer.

    Parameters
    ----------
    module
        The attention layer; its module of code holds ``apply_rotary_pos_emb``, in most architectures.
    position_embeddings
        What the model handed to the layer for ``positions``: cosine and sine, each [P, 1, F], in most architectures.
    queries
        Post-RoPE queries of one and the same hidden state at ``positions``, [P, heads, D].
    positions
        int64 [P], the first of them 0.
    model
        The whole model, in whose rotary modules the frequencies are looked up.

    Raises
    ------
    RotaryMismatch
        When no reading passes the checks.
    """
    tolerance = _TOLERANCE.get(queries.dtype, 1e-4)
    queries = queries.float()
    tolerance = tolerance * float(queries.norm(dim=-1).mean().clamp(min=1e-6))
    if _spread(queries) <= tolerance * 1e-1:
        return Rotary.none(queries.shape[-1])  # a layer without rotary embedding
    for candidate in _candidates(module, position_embeddings, positions, model, queries.shape[-1]):
        if _spread(candidate.unrotate(queries, positions[:, None])) <= tolerance:
            return candidate
    raise RotaryMismatch(
        f"the rotary embedding of layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__}) could not be "
        "undone, so its pre-RoPE queries are not known"
    )


def _spread(queries: Tensor) -> float:
    """Return the largest difference between a hidden state's queries [P, heads, D] at different positions."""
    return float((queries - queries[:1]).abs().max())


def _candidates(
    module: nn.Module, position_embeddings: Any, positions: Tensor, model: nn.Module, size: int
) -> Iterator[Rotary]:
    """Yield readings of the model's own rotary function first, then every usual layout of rotated dimensions."""
    handed = _cosine_and_sine(position_embeddings, len(positions))
    if handed is not None:
        yield from _from_function(module, handed, positions, model, size)
    dtype = torch.float32 if handed is None else handed[0].dtype
    for inv_freq, scaling, limit in (*_frequencies(model), *_conventional(module)):
        rotated = 2 * len(inv_freq)
        if rotated > size:
            continue
        for first, interleaved, turn in itertools.product(
            dict.fromkeys((0, size - rotated)), (False, True), (1.0, -1.0)
        ):
            partner, sign, frequency = torch.arange(size), torch.ones(size), torch.full((size,), -1)
            index = torch.arange(len(inv_freq))
            one, other = (2 * index, 2 * index + 1) if interleaved else (index, index + len(inv_freq))
            one, other = one + first, other + first
            partner[one], partner[other] = other, one
            sign[one], sign[other] = -turn, turn
            frequency[one] = frequency[other] = index
            yield Rotary(partner, sign, frequency, inv_freq, scaling, dtype, limit)


def _cosine_and_sine(position_embeddings: Any, count: int) -> tuple[Tensor, Tensor] | None:
    """Return cosine and sine, each [P, 1, F] on the CPU, where that is what the model hands to its layers."""
    if not isinstance(position_embeddings, tuple) or len(position_embeddings) != 2:
        return None
    cos, sin = position_embeddings
    if not isinstance(cos, Tensor) or cos.dim() != 3 or cos.shape[0] != count or cos.is_complex():
        return None
    return cos.detach().cpu(), sin.detach().cpu()


def _from_function(
    module: nn.Module, position_embeddings: tuple[Tensor, Tensor], positions: Tensor, model: nn.Module, size: int
) -> Iterator[Rotary]:
    """Yield readings of the model's own function: on the whole head, or on its last dimensions (latent attention)."""
    apply = function_beside(module, "apply_rotary_pos_emb")
    if apply is None:
        return
    cos, _ = position_embeddings
    rotated = getattr(module, "qk_rope_head_dim", None)
    for part in dict.fromkeys([size, rotated or size]):
        structure = _structure(apply, part, cos.shape[-1])
        if structure is None:
            continue
        partner, sign, column = structure
        spare = size - part  # dimensions before them that do not turn
        for inv_freq, scaling, limit in _frequencies(model):
            if not _made_of(cos, inv_freq, scaling, positions):
                continue
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
                yield rotary


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


def _frequencies(model: nn.Module) -> list[tuple[Tensor, float, int | None]]:
    """Return frequencies, scaling and limit of every rotary module of the model."""
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
        limit = _switch(owner, model, kind, prefix.rstrip("_"))
        # A copy: dynamic rotary changes its buffer as a sequence grows.
        found.append((buffer.detach().float().cpu().clone(), scaling, limit))
    return found


def _conventional(module: nn.Module) -> list[tuple[Tensor, float, int | None]]:
    """Return the frequencies, to base 10,000, of a layer that keeps sines and cosines in a table (GPT-J, CodeGen)."""
    rotated = getattr(module, "rotary_dim", None)
    if not isinstance(rotated, int) or rotated < 2:
        return []
    return [(1.0 / 10_000.0 ** (torch.arange(0, rotated, 2).float() / rotated), 1.0, None)]


def _made_of(cos: Tensor, inv_freq: Tensor, scaling: float, positions: Tensor) -> bool:
    """Return whether a table of cosines [P, 1, F] may be that of these frequencies."""
    expected = (positions.float().cpu()[:, None] * inv_freq).cos() * scaling  # [P, F]
    given = cos.float().reshape(len(positions), -1)[:, : len(inv_freq)]
    return given.shape == expected.shape and torch.allclose(expected, given, atol=1e-2)


def _switch(owner: nn.Module, model: nn.Module, kind: Any, layer_type: str) -> int | None:
    """Return the tokens past which a rotary module changes its frequencies; None where it never does."""
    config: Any = getattr(owner, "config", getattr(model, "config", None))
    context: int | None = getattr(config, "max_position_embeddings", None)
    if kind == "dynamic":
        known: int | None = getattr(owner, "original_max_seq_len", context)
        return known
    if kind != "longrope":
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(layer_type, parameters)
    length: int | None = parameters.get("original_max_position_embeddings") if isinstance(parameters, dict) else None
    return length or getattr(config, "original_max_position_embeddings", None) or context


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
