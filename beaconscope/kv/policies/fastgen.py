"""FastGen: every head keeps the kind of entries that it attends to (Ge et al., arXiv 2310.01801, algorithms 1 and 2).

1. At the end of the prompt each KV head takes the first of these kinds that recovers at least 90 % of its attention:
   special tokens; punctuation too; heavy hitters too; the most recent entries too; everything.
2. What a kind recovers is the share of the attention of all queries of the prompt, and of the group, that lies on the
   entries that the kind keeps at the prompt's end.
3. The heavy hitters are the 30 % of the tokens so far that have got most attention so far (among those in the cache).
4. After every I further tokens a head keeps what is of its kind then. So heads hold different numbers, and no budget
   bounds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from beaconscope.attention.step import AttentionStep
from beaconscope.errors import BeaconScopeError, UsageError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.kinds import TokenKind
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, keep_highest
from beaconscope.kv.policies.h2o import AccumulatedAttention


class FastGenState(PolicyState):
    """What every entry has got so far, what its token is, and the kind that each head took."""

    def __init__(self, policy: FastGen, heads: HeadInfo) -> None:
        super().__init__(policy)
        self.capacity = heads.prompt
        self._policy = policy
        self._shared = heads.shared
        self._got = AccumulatedAttention(heads)
        shape = (heads.rows, len(heads.kv_heads), 0)
        self._tokens = torch.zeros(shape, dtype=torch.uint8, device=heads.device)  # [R, H, N], TokenKind
        self.kind: Tensor | None = None
        """Kind that each head took, int64 [R, H]: 0 special, 1 punctuation, 2 heavy hitters, 3 recent, 4 everything."""

    def attend(self, step: AttentionStep) -> None:
        if step.kinds is None:
            raise BeaconScopeError(f"{self._policy.name} has to know the token ids, which were not given")
        self._got.add(step)
        self._tokens = pad(self._tokens, (0, step.tokens))
        self._tokens[..., -step.tokens :] = step.kinds[:, None]

    def keep(self, view: CacheView) -> Tensor:
        held = view.positions >= 0
        got = self._got.sum.mean(dim=1, keepdim=True).expand_as(self._got.sum) if self._shared else self._got.sum
        heavy = int(self._policy.heavy * (view.newest + 1))
        kinds = [
            held & (self._tokens == TokenKind.SPECIAL),
            held & (self._tokens == TokenKind.PUNCTUATION),
            held & keep_highest(got.masked_fill(~held, -1), torch.zeros_like(held), heavy),
            held & (view.positions > view.newest - self._policy.local),
            held,
        ]
        of_kind = torch.stack(kinds).cummax(dim=0).values  # [5, R, H, N]; each kind holds the ones before
        if self.kind is None:
            recovered = (of_kind * got).sum(dim=-1) / got.sum(dim=-1)  # [5, R, H]
            recovered[-1] = 1
            self.kind = (recovered >= self._policy.recovery).to(torch.uint8).argmax(dim=0)
        kept = of_kind.gather(0, self.kind[None, :, :, None].expand(1, *held.shape))[0]
        self.capacity = int(kept.sum(dim=-1).max()) + self._policy.interval
        return kept

    def evicted(self, index: Tensor) -> None:
        self._got.evicted(index)
        self._tokens = self._tokens.gather(-1, index.clamp(min=0))

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self._got.select_rows(rows)


@dataclass(frozen=True)
class FastGen(Policy):
    """Let each head keep the cheapest kind of entries that recovers its attention on the prompt."""

    name: ClassVar[str] = "fastgen"
    summary: ClassVar[str] = "gives each head the cheapest kind of entries that recovers its attention on the prompt"
    source: ClassVar[str] = "Ge et al. 2023, arXiv 2310.01801"
    needs_attention: ClassVar[bool] = True
    needs_kinds: ClassVar[bool] = True
    ragged: ClassVar[bool] = True
    unused: ClassVar[frozenset[str]] = frozenset({"budget"})

    interval: int = 128
    recovery: float = 0.9
    """Share of a head's attention that its kind has to recover."""
    heavy: float = 0.3
    """Heavy hitters, as a share of the tokens so far."""
    local: int = 10
    """Most recent entries of the kind that keeps them."""

    def __post_init__(self) -> None:
        self._check_least(local=0)
        for name in ("recovery", "heavy"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; give 0 to 1")
        super().__post_init__()

    @property
    def capacity(self) -> int | None:
        return None

    def start(self, heads: HeadInfo) -> PolicyState:
        return FastGenState(self, heads)
