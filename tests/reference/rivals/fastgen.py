"""FastGen: each head takes, at the end of the prompt, the cheapest kind of memory that recovers its attention.

The kinds, in this order: special tokens; punctuation too; the heavy hitters too (30 % of the tokens so far, those that
got most attention so far); the last 10 too; everything. A kind recovers the share of all attention of the prompt's
queries that lies on what it would keep at the prompt's end. Later compressions, every I tokens, keep the head's kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .h2o import accumulated
from .past import Past, Sets, best

KINDS = ("special", "punctuation", "heavy", "local", "full")


@dataclass
class FastGen:
    recovery: float = 0.9
    heavy: float = 0.3
    local: int = 10
    interval: int = 128
    taken: dict[int, str] = field(default_factory=dict)
    last: int = -1

    def fires(self, past: Past) -> bool:
        if past.newest == past.prompt - 1 or (past.newest >= past.prompt and past.newest - self.last >= self.interval):
            self.last = past.newest
            return True
        return False

    def keep(self, past: Past) -> Sets:
        sets = []
        for head in past.heads:
            if head not in self.taken:
                got = accumulated(past, head)
                for kind in KINDS:
                    recovered = sum(got[p] for p in self.of_kind(past, head, kind)) / (past.prompt * past.group)
                    if recovered >= self.recovery or kind == "full":
                        self.taken[head] = kind
                        break
            sets.append(sorted(self.of_kind(past, head, self.taken[head])))
        return sets

    def of_kind(self, past: Past, head: int, kind: str) -> set[int]:
        cached = past.cached[head]
        if kind == "full":
            return set(cached)
        kept = {p for p in cached if past.kinds[p] == "special"}
        if kind == "special":
            return kept
        kept |= {p for p in cached if past.kinds[p] == "punctuation"}
        if kind == "punctuation":
            return kept
        kept |= set(best(accumulated(past, head), int(self.heavy * (past.newest + 1))))
        if kind == "heavy":
            return kept
        return kept | {p for p in cached if p > past.newest - self.local}
