"""What an eviction policy is: settings that start a state for each layer, which live cache and replay drive alike."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from beaconscope.errors import UsageError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.softmax import exponentials
from beaconscope.kv.step import AttentionStep, scaled_products

Observers = Literal["recent", "beacons"]
"""Queries that observe at a compression: the most recent ones, or beacons rotated to the newest position."""


@dataclass(frozen=True)
class QueryBlock:
    """Queries of T consecutive positions, in order."""

    query: Tensor  # [R, H, G, T, D], post-RoPE
    first_position: int
    together: bool
    """The T tokens were fed in one forward pass (a prompt); otherwise they are T passes of one token each."""


@dataclass(frozen=True)
class CacheView:
    """The entries that a compression may keep or drop. N entries, oldest first."""

    key: Tensor  # [R, H, N, D], post-RoPE
    value: Tensor  # [R, H, N, Dv]
    positions: Tensor  # [R, H, N], int64, ascending; -1 where a head of a ragged policy holds fewer than N
    newest: int
    """Position of the newest entry, which is the current position."""

    @property
    def size(self) -> int:
        """N, the entries at hand."""
        return self.positions.shape[2]

    @property
    def unit_key(self) -> Tensor:
        """Keys of norm 1, float32 [R, H, N, D], the caller's own."""
        return normalize(self.key.float(), dim=-1)

    @property
    def key_norm(self) -> Tensor:
        """Norms of the keys, float32 [R, H, N]."""
        norm: Tensor = self.key.float().norm(dim=-1)
        return norm

    @property
    def value_norm(self) -> Tensor:
        """Norms of the values, float32 [R, H, N]."""
        norm: Tensor = self.value.float().norm(dim=-1)
        return norm

    def logits(self, scaling: float, *asked: tuple[Tensor, Observers | None]) -> Tensor:
        """Scaled products of queries with the keys at hand, float32 [R, H, G, Q, N], Q over all that is asked.

        Parameters
        ----------
        scaling
            What the model scales products by.
        asked
            Queries [R, H, G, q, D], post-RoPE, float32, and what they are, where a replay of many settings may have
            their products already: the last q queries, or the first q beacons.
        """
        return scaled_products(torch.cat([query for query, _ in asked], dim=3), self.key, scaling)

    def exponentials(self, scaling: float, *asked: tuple[Tensor, Observers | None]) -> Tensor:
        """The :func:`~beaconscope.kv.softmax.exponentials` of :meth:`logits`."""
        return exponentials(self.logits(scaling, *asked))


class PolicyState(ABC):
    """What a policy remembers of one layer, for R sequences of equal length."""

    def __init__(self, policy: Policy) -> None:
        self.capacity: int | None = policy.capacity
        """Entries of the fullest head at which the next compression fires; None for never."""
        self._budget = policy.budget

    def observe(self, block: QueryBlock) -> None:
        """See the queries of a block. Every query comes once, in order; where blocks are cut makes no difference."""

    def attend(self, step: AttentionStep) -> None:
        """See a whole step, attention included; called only for a policy that ``needs_attention``."""

    @abstractmethod
    def keep(self, view: CacheView) -> Tensor:
        """Decide a compression: bool [R, H, N], True for the entries to keep."""

    def kept_size(self, size: int) -> int:
        """Entries that each head keeps of ``size``, asked before :meth:`keep`; never of a ragged policy."""
        return min(self._budget, size)

    def evicted(self, index: Tensor) -> None:
        """Follow a compression: slot ``j`` now holds what slot ``index[..., j]`` held, int64 [R, H, K].

        A ragged policy's heads keep their entries in the last slots; the index is -1 in the slots before.
        """

    def select_rows(self, rows: Tensor) -> None:
        """Keep the sequences ``rows`` (int64 [R'], repeats allowed), for beam search."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.index_select(0, rows.to(value.device)))


@dataclass(frozen=True)
class Policy(ABC):
    """Settings of an eviction policy. Sizes are entries per KV head."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line on what it keeps."""
    source: ClassVar[str]
    """Paper that the rule is from."""
    needs_attention: ClassVar[bool] = False
    """Its states see every step with its attention (:meth:`PolicyState.attend`)."""
    needs_kinds: ClassVar[bool] = False
    """The steps tell its states which tokens are special and which are punctuation."""
    live: ClassVar[bool] = True
    """Usable in a live cache. Where not, replay hands :meth:`PolicyState.keep` every position so far each time, and
    what it drops may come back."""
    ragged: ClassVar[bool] = False
    """Its heads keep different numbers of entries."""
    one_set: ClassVar[bool] = False
    """All heads of a layer keep one set, which their scores decide together."""
    unused: ClassVar[frozenset[str]] = frozenset()
    """Fields that have no meaning for it."""

    budget: int = 1024
    """B, entries kept after a compression."""
    interval: int = 1
    """I, new entries over the budget before the next compression; a cache holds at most B + I."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise UsageError(f"interval is {self.interval}; give at least 1")
        if self.budget < self.protected + 1:
            raise UsageError(
                f"a budget of {self.budget} is too small for {self.name}, which protects {self.protected} (entries "
                "that always stay, as the most recent ones) and needs one more; give a budget of at least "
                f"{self.protected + 1}"
            )

    @property
    def protected(self) -> int:
        """Entries that are kept whatever their score."""
        return 0

    @property
    def least_budget(self) -> int:
        """The smallest budget that its other settings allow."""

        def allowed(budget: int) -> bool:
            try:
                dataclasses.replace(self, budget=budget)
            except UsageError:
                return False
            return True

        return 1 + bisect_left(range(1, self.budget), True, key=allowed)

    @property
    def needs_queries(self) -> bool:
        """Its states see every query (:meth:`PolicyState.observe`)."""
        return False

    @property
    def needs_rotary(self) -> bool:
        """Its states undo or redo the rotary embedding, which a model has to let them know."""
        return False

    @property
    def evicts(self) -> bool:
        """Something may be evicted."""
        return True

    @property
    def capacity(self) -> int | None:
        """B + I, the most entries a head holds between steps; None where no number bounds them."""
        return self.budget + self.interval

    @abstractmethod
    def start(self, heads: HeadInfo) -> PolicyState:
        """A fresh state for the heads of one layer."""

    @classmethod
    def parameters(cls) -> tuple[str, ...]:
        """Names of the fields that mean something for it, in order."""
        return tuple(field.name for field in dataclasses.fields(cls) if field.name not in cls.unused)

    def params(self) -> dict[str, object]:
        """The fields that mean something, by name, as plain values."""
        return {name: getattr(self, name) for name in self.parameters()}

    def check_live(self) -> None:
        """Refuse a live cache where the policy works in replay only.

        Raises
        ------
        UsageError
            Where it does.
        """
        if not self.live:
            raise UsageError(
                f"{self.name} works in replay only; record with --cache full and give replay --policy {self.name}"
            )

    def _check_least(self, **least: int) -> None:
        """Refuse fields below the least value given for each; None passes."""
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"{name.replace('_', '-')} is {value}; give at least {low}")


def keep_highest(scores: Tensor, protected: Tensor, budget: int, shared: bool = False) -> Tensor:
    """The ``budget`` entries to keep of each head: the protected ones, then the highest scores, ties to the oldest.

    Parameters
    ----------
    scores
        float [R, H, N].
    protected
        bool, broadcast to [R, H, N]; at most ``budget`` in each head.
    budget
        Entries to keep; all are where N is not larger.
    shared
        All heads keep one set, by their highest score of each entry.

    Returns
    -------
    Tensor
        bool [R, H, N].
    """
    if shared:
        scores = scores.amax(dim=1, keepdim=True).expand_as(scores)
    count = scores.shape[-1]
    if count <= budget:
        return torch.ones_like(scores, dtype=torch.bool)
    if budget == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    ranked = scores.masked_fill(protected, float("inf"))
    # No sort: the lowest score that may stay, what is above it, and of what equals it the oldest.
    least = ranked.kthvalue(count - budget + 1, dim=-1, keepdim=True).values
    above, level = ranked > least, ranked == least
    room = budget - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1) <= room))
