"""Run a model token by token on a batch of prompts, drawing the next tokens or forcing given ones.

The loop waits for the device only to see whether sequences have ended: at every token on a CPU, where nothing is
queued, and once in a while on an accelerator, where the tokens drawn past an end are dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from beaconscope.errors import BeaconScopeError
from beaconscope.kv.cache import CompressedCache
from beaconscope.models import cache_argument
from beaconscope.models.finite import finite_logits
from beaconscope.record.decoding import Decoding, Text
from beaconscope.record.draw import Draw

_SETTLE_STEPS = 32
_SETTLE_SECONDS = 0.5
_FORCED_AT_ONCE = 256
"""Given tokens are fed in passes of at most this many."""


@dataclass
class Written:
    """What has been written of one sequence beyond its prompt. The lists have equal length."""

    tokens: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    """Of each token under the model, before any generation setting changes the logits."""
    entropy: list[float] = field(default_factory=list)
    """Of the model's distribution for each token, before any generation setting changes the logits, nats."""
    ended: bool = False
    """The last token ends the text."""
    done: bool = False
    """Nothing comes after the last token: it ends the text, or the limit is reached."""


class NotFinite(BeaconScopeError):
    """A model's logits are not finite, so that no token follows from them.

    Parameters
    ----------
    row
        Number of the sequence in the batch.
    prompt
        Tokens of its prompt.
    ids
        All tokens up to the one after which the logits are not finite, the prompt's included.
    """

    def __init__(self, row: int, prompt: int, ids: Sequence[int]) -> None:
        self.row = row
        self.ids = list(ids)
        new = len(ids) - prompt
        self.place = f"after {new} new token{'s' * (new != 1)}" if new else "after the prompt"
        super().__init__(f"the model's logits are not finite {self.place}")


class Generation:
    """One batch on its way.

    Parameters
    ----------
    model
        The model, tapped.
    cache
        A fresh cache of that model.
    prompts
        Token ids of each prompt; shorter ones are padded on the left.
    decoding
        How tokens are chosen.
    limits
        New tokens of each sequence at most.
    end_tokens
        Ids that end a text.
    forced
        Ids to be fed instead of drawn ones, for a batch of one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CompressedCache,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        limits: Sequence[int],
        end_tokens: frozenset[int],
        forced: Sequence[int] | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._cache_argument = cache_argument(model)
        self._prompts = prompts
        self._limits = limits
        self._end_tokens = end_tokens
        self._forced = forced
        self._device = model.device
        self._columns = max(len(prompt) for prompt in prompts)
        padding = [self._columns - len(prompt) for prompt in prompts]
        self._padded = any(padding)
        filler = model.config.get_text_config(decoder=True).pad_token_id or 0
        rows = [[filler] * missing + list(prompt) for missing, prompt in zip(padding, prompts, strict=True)]
        self._ids = torch.tensor(rows, device=self._device)  # [B, columns]
        self._mask = torch.tensor(
            [[0] * missing + [1] * len(prompt) for missing, prompt in zip(padding, prompts, strict=True)],
            device=self._device,
        )
        self._prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)  # [B]
        ends = tuple(sorted(end_tokens))
        texts = [Text(prompt, limit, ends) for prompt, limit in zip(prompts, limits, strict=True)]
        self._draw = Draw(decoding, texts, self._device)
        self._unsettled: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, logprob, entropy, each [B]
        self.written = [Written() for _ in prompts]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence so far, its prompt included."""
        return [len(prompt) + len(row.tokens) for prompt, row in zip(self._prompts, self.written, strict=True)]

    def prefill(self, chunk: int | None) -> list[int]:
        """Feed the prompts, in passes of ``chunk`` tokens or whole; returns the size of each pass.

        Raises
        ------
        NotFinite
            When the logits after a prompt are not finite.
        """
        self._cache.expect_prompt(self._columns)
        sizes = []
        for start in range(0, self._columns, chunk or self._columns):
            stop = min(start + (chunk or self._columns), self._columns)
            position = (self._mask.cumsum(dim=1) - 1).clamp(min=0)[:, start:stop]
            self._logits = self._forward(self._ids[:, start:stop], position, stop)[:, -1]
            sizes.append(stop - start)
        finite = finite_logits(self._logits).tolist()
        if not all(finite):
            self._stop(finite.index(False), [])
        return sizes

    def run(self, settled: Callable[[], bool]) -> None:
        """Write until every sequence ends or reaches its limit.

        ``settled`` is called whenever new tokens have arrived in :attr:`written`; True from it stops the loop.

        Raises
        ------
        NotFinite
            When the logits of a sequence are not finite. In :attr:`written` are the tokens before the one after which
            they are not, since what the model makes of that one is not finite either.
        """
        if self._forced is not None:
            self._force(self._forced, settled)
            return
        queues = _queues_work(self._device)
        reported, last = 0, time.monotonic()
        for step in range(1, max(self._limits) + 1):
            # Where steps are not settled one by one, what is not finite is drawn from before it is known.
            token = self._draw(_drawable(self._logits) if queues else self._logits)
            self._note(token, self._logits)
            position = (self._prompt_lengths + step - 1)[:, None]
            self._logits = self._forward(token[:, None], position, self._columns + step)[:, -1]
            if not queues:
                self._settle()
            due = step - reported >= _SETTLE_STEPS or time.monotonic() - last >= _SETTLE_SECONDS
            if due or self._done or step == max(self._limits):
                self._settle()
                reported, last = step, time.monotonic()
                self._draw.check([len(row.tokens) for row in self.written])
                if settled() or self._done:
                    return

    @property
    def _done(self) -> bool:
        return all(row.done for row in self.written)

    def _force(self, forced: Sequence[int], settled: Callable[[], bool]) -> None:
        """Feed given tokens, in passes that end where the cache would compress."""
        ids = torch.tensor([list(forced)], device=self._device)
        start = 0
        while start < len(forced):
            count = min(self._cache.room(), _FORCED_AT_ONCE, len(forced) - start)
            part = ids[:, start : start + count]
            position = self._prompt_lengths[:, None] + torch.arange(start, start + count, device=self._device)
            after = self._forward(part, position, self._columns + start + count, every=True)  # [1, count, V]
            before = torch.cat([self._logits[:, None], after[:, :-1]], dim=1)
            for index in range(count):
                self._note(part[:, index], before[:, index])
            self._logits = after[:, -1]
            start += count
            self._settle()
            if settled():
                return

    def _forward(self, ids: Tensor, position: Tensor, columns: int, every: bool = False) -> Tensor:
        """Logits of the last of the tokens ``ids`` [B, T], or of ``every`` one, [B, 1 or T, V]."""
        mask = None
        if self._padded:
            if columns > self._mask.shape[1]:
                grown = torch.ones_like(self._mask[:, :1]).expand(-1, max(256, columns - self._mask.shape[1]))
                self._mask = torch.cat([self._mask, grown], dim=1)
            mask = self._mask[:, :columns]
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            logits_to_keep=0 if every else 1,
            **{self._cache_argument: self._cache},
        )
        return output.logits.float()  # type: ignore[no-any-return]

    def _note(self, token: Tensor, logits: Tensor) -> None:
        """Let tokens [B], chosen after ``logits`` [B, V], wait to be settled."""
        log_probabilities = logits.log_softmax(dim=-1)
        entropy = -(log_probabilities.exp() * log_probabilities.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)
        self._unsettled.append((token, log_probabilities.gather(-1, token[:, None])[:, 0], entropy))

    def _settle(self) -> None:
        """Bring the tokens that wait to the host, up to the end of each text.

        A token is taken if the logits after it are finite, as those that it was drawn from are: then what the model
        computed of it is.
        """
        if not self._unsettled:
            return
        tokens, logprob, entropy = (torch.stack(part, dim=1).tolist() for part in zip(*self._unsettled, strict=True))
        self._unsettled.clear()
        last = finite_logits(self._logits).tolist()
        broken: tuple[int, int] | None = None  # the first sequence that is not finite, and the token after which
        for index, (row, limit) in enumerate(zip(self.written, self._limits, strict=True)):
            # The entropy of logits that are not finite is not finite.
            after = [*map(math.isfinite, entropy[index][1:]), last[index]]
            for token, probability, nats, finite in zip(
                tokens[index], logprob[index], entropy[index], after, strict=True
            ):
                if row.done:
                    break
                if not finite:
                    broken = broken or (index, token)
                    break
                row.tokens.append(token)
                row.logprob.append(probability)
                row.entropy.append(nats)
                row.ended = self._forced is None and token in self._end_tokens
                row.done = row.ended or len(row.tokens) == limit
        if broken is not None:
            index, token = broken
            self._stop(index, [*self.written[index].tokens, token])

    def _stop(self, row: int, tokens: Sequence[int]) -> NoReturn:
        prompt = self._prompts[row]
        raise NotFinite(row, len(prompt), [*prompt, *tokens])


def _drawable(logits: Tensor) -> Tensor:
    """The logits [B, V] with zeros in place of rows from which nothing can be drawn."""
    return logits.masked_fill(~finite_logits(logits)[:, None], 0.0)


def _queues_work(device: torch.device) -> bool:
    """Whether a device works behind the host's back, so that to look at a result is to wait for it."""
    return device.type != "cpu"
