"""Run a tiny model with a cache and remember what it attended with."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from beaconscope.attention.step import AttentionStep
from beaconscope.kv.layer import Compression


class Watcher:
    """An observer that keeps every query, key and compression by layer and sequence of the batch."""

    def __init__(self, attention: bool = False) -> None:
        self.queries: dict[tuple[int, int], list[Tensor]] = {}
        """(layer, row) -> pieces [H, G, T, D]."""
        self.keys: dict[tuple[int, int], list[Tensor]] = {}
        """(layer, row) -> pieces [H, T, D] of the new entries."""
        self.attention: dict[tuple[int, int], list[Tensor]] = {}
        """(layer, row) -> pieces [H, G, T, N]."""
        self.first_positions: dict[tuple[int, int], list[int]] = {}
        self.key_positions: dict[tuple[int, int], list[Tensor]] = {}
        self.compressions: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = {}
        """(layer, row) -> (newest position, kept positions [H, B])."""
        self._attention = attention

    def wants(self, layer: int) -> bool:
        return True

    def attended(self, layer: int, lane: int, step: AttentionStep) -> None:
        weights = step.attention() if self._attention else None
        for i, row in enumerate(_rows(step.rows, step.query)):
            at = (layer, row)
            self.queries.setdefault(at, []).append(step.query[i].detach().float().clone())
            self.keys.setdefault(at, []).append(step.key[i, :, -step.tokens :].detach().float().clone())
            self.key_positions.setdefault(at, []).append(step.key_positions[i].clone())
            self.first_positions.setdefault(at, []).append(step.first_position)
            if weights is not None:
                self.attention.setdefault(at, []).append(weights[i])

    def compressed(self, layer: int, lane: int, compression: Compression) -> None:
        for i, row in enumerate(_rows(compression.rows, compression.positions)):
            kept = [
                positions[keep].numpy()
                for positions, keep in zip(compression.positions[i], compression.kept[i], strict=True)
            ]
            self.compressions.setdefault((layer, row), []).append((compression.position, np.stack(kept)))

    def query(self, layer: int, row: int = 0) -> np.ndarray:
        """All queries of a layer, [H, T, G, D]."""
        return torch.cat(self.queries[layer, row], dim=2).movedim(2, 1).numpy()

    def key(self, layer: int, row: int = 0) -> np.ndarray:
        """All keys of a layer, [H, T, D]."""
        return torch.cat(self.keys[layer, row], dim=1).numpy()


def _rows(index: Tensor | None, x: Tensor) -> list[int]:
    return list(range(x.shape[0])) if index is None else index.tolist()


def cache_argument(model: torch.nn.Module, cache: Any) -> dict[str, Any]:
    """Name the cache as the installed transformers wants it: ``past_key_values`` in 5.2, ``cache`` later."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


def generate(model: Any, prompt: Tensor, cache: Any = None, *, new_tokens: int = 12, **options: Any) -> Tensor:
    """Generate greedily; the new tokens [B, N]."""
    given = {} if cache is None else cache_argument(model, cache)
    with torch.no_grad():
        output = model.generate(prompt, max_new_tokens=new_tokens, do_sample=False, **given, **options)
    return output[:, prompt.shape[1] :]


def feed(model: Any, tokens: Tensor, cache: Any, **options: Any) -> Tensor:
    """One forward pass of ``tokens`` [B, T]; logits [B, T, V]."""
    with torch.no_grad():
        return model(tokens, use_cache=True, **cache_argument(model, cache), **options).logits


def tokens(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    """Random bytes, [rows, length]."""
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(prompts: list[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """Batch prompts [1, T_i] with padding on the left; tokens and attention mask [B, T]."""
    length = max(prompt.shape[1] for prompt in prompts)
    ids = torch.full((len(prompts), length), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - prompt.shape[1] :] = prompt[0]
        mask[row, length - prompt.shape[1] :] = 1
    return ids, mask
