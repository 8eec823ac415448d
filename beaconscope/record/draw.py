"""Choose the next token of each sequence of a batch, as ``generate`` would with that sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from beaconscope.errors import BeaconScopeError
from beaconscope.record.decoding import Decoding, Text, logits_rules, logits_warpers

_BLOCK = 256
"""Columns by which the buffer of ids grows, at least."""


class Draw:
    """Chooses tokens. Each row has its own processors, its own ids and its own stream of random numbers.

    Nothing here waits for the device, unless a processor of transformers does.

    Parameters
    ----------
    decoding
        The settings in force.
    texts
        The text of each row, B in all.
    device
        Device of the logits.

    Raises
    ------
    ValueError
        For a setting that transformers refuses.
    """

    def __init__(self, decoding: Decoding, texts: Sequence[Text], device: torch.device) -> None:
        self._greedy = decoding.greedy
        self._names = ", ".join(decoding.rules())
        self._rules = [logits_rules(decoding, text, device) for text in texts]
        self._warpers = logits_warpers(decoding, device)
        # Each starts as `torch.manual_seed` before `generate` does.
        self._streams = [torch.Generator(device).manual_seed(decoding.seed) for _ in texts]
        if any(self._rules):
            self._columns = max(len(text.prompt) for text in texts)
            self._starts = [self._columns - len(text.prompt) for text in texts]
            rows = [[0] * start + list(text.prompt) for start, text in zip(self._starts, texts, strict=True)]
            self._ids = torch.tensor(rows, device=device)  # [B, columns], ends aligned
            self._prompt = self._columns
            self._stuck = torch.full((len(texts),), -1, device=device)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the next tokens [B], from the model's ``logits`` [B, V]."""
        scores = self._ruled(logits) if any(self._rules) else logits
        if self._greedy:
            token = _applied(self._warpers, scores).argmax(dim=-1)
        else:
            # From a row without a usable score anything is drawn: an error reports it when the tokens are read.
            usable = scores.amax(dim=-1, keepdim=True).isfinite()
            probabilities = _applied(self._warpers, torch.where(usable, scores, 0.0)).softmax(dim=-1)
            rows = zip(probabilities, self._streams, strict=True)
            token = torch.cat([torch.multinomial(row, 1, generator=stream) for row, stream in rows])
        if any(self._rules):
            self._keep(token)
        return token

    def _ruled(self, logits: Tensor) -> Tensor:
        """Return the scores [B, V] after the rules of each row, which read the ids of that row."""
        rows = zip(self._rules, self._starts, range(len(logits)), strict=True)
        scores = torch.cat(
            [
                _applied(rules, logits[row, None], self._ids[row, None, start : self._columns])
                for rules, start, row in rows
            ]
        )
        highest = scores.amax(dim=-1)
        # Greedy decoding can choose a score of +inf, sampling cannot.
        stuck = highest.isnan() | highest.isneginf() if self._greedy else ~highest.isfinite()
        self._stuck = torch.where(stuck & (self._stuck < 0), self._columns - self._prompt, self._stuck)
        return scores

    def _keep(self, token: Tensor) -> None:
        """Append tokens [B] to the ids of the rows."""
        if self._columns == self._ids.shape[1]:
            grown = max(_BLOCK, self._columns // 2)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(len(token), grown)], dim=1)
        self._ids[:, self._columns] = token
        self._columns += 1

    def check(self, written: Sequence[int]) -> None:
        """Refuse a row in which the rules left no token to choose.

        Waits for the device.

        Parameters
        ----------
        written
            New tokens of each row so far, those after its end left out.

        Raises
        ------
        BeaconScopeError
            Naming the settings.
        """
        if not any(self._rules):
            return
        for index, count in zip(self._stuck.tolist(), written, strict=True):
            if 0 <= index < count:
                raise BeaconScopeError(
                    f"after {index} new tokens, the model's generation settings ({self._names}) leave no token to "
                    "choose; change its generation config"
                )


def _applied(processors: Sequence[LogitsProcessor], scores: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return the scores [B, V] after all processors; only rules read ``ids`` [B, T]."""
    given: Any = ids
    for processor in processors:
        scores = processor(given, scores)
    return scores
