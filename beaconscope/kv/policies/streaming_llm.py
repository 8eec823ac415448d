"""StreamingLLM: the first few positions and the most recent ones (Xiao et al., arXiv 2309.17453, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from beaconscope.errors import UsageError
from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState


class StreamingLLMState(PolicyState):
    """Needs no memory: position decides."""

    def __init__(self, policy: StreamingLLM) -> None:
        super().__init__(policy)
        self._sinks = policy.sinks
        self._recent = policy.budget - policy.sinks

    def keep(self, view: CacheView) -> Tensor:
        return (view.positions < self._sinks) | (view.positions > view.newest - self._recent)


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep the first ``sinks`` positions and the last B - ``sinks``."""

    name: ClassVar[str] = "streaming-llm"
    summary: ClassVar[str] = "keeps the first few positions and the most recent ones"
    source: ClassVar[str] = "Xiao et al. 2023, arXiv 2309.17453"

    sinks: int = 4
    """First positions that always stay."""

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise UsageError(f"sinks is {self.sinks}; give 0 or more")
        super().__post_init__()

    @property
    def protected(self) -> int:
        return self.sinks

    def start(self, heads: HeadInfo) -> PolicyState:
        return StreamingLLMState(self)
