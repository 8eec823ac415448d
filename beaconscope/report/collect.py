"""Everything that the page shows of one trace: numbers into a pack, the rest into plain values for JSON.

1. Read the trace a KV head at a time: hits, evictions, beacons, queries.
2. Where the cache evicted, compute anew what a full cache would have attended to.
3. Lay out the queries of each head.
4. Number query heads in the trace's order; everything that belongs to a head is named by that number.

Texts are never in the JSON but for the dictionary of tokens, so that redacting these redacts all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from beaconscope.files import valid_unicode
from beaconscope.progress import Progress
from beaconscope.report.beacons import BeaconTrack, beacon_track, cluster_curves
from beaconscope.report.command import recording_command
from beaconscope.report.findings import Findings
from beaconscope.report.looks import Looks, full_looks, gather, recorded_looks
from beaconscope.report.options import ReportOptions
from beaconscope.report.pack import Pack, smallest_unsigned
from beaconscope.report.space import lay_out, shown_positions
from beaconscope.report.words import redacted, shown_tokens
from beaconscope.trace import HeadTrace, Trace

if TYPE_CHECKING:
    from beaconscope.kv.rotary import Rotary

_PHASES = ("prompt", "think", "answer")
_HELD_HITS = 3_000_000
"""Hits held in memory while heads are read; more than any page has room for."""
_FULL_COST = 1.2e9
"""Query heads times tokens squared up to which full attention is computed for every step: about fifteen seconds."""
_FULL_STEPS = 3000
"""Revisits whose full attention is computed beyond that."""
_BEACON_ENTRIES = 400_000
"""Entries of beacons that a page holds; heads with fewer revisits go without beyond that."""
_TEXTS = ("token", "writes", "target_text", "text")
_PCA_QUERIES = 1000
"""Queries shown of a head that is laid out by PCA only."""
_CURVED_HEADS = 8
"""Query heads, those that revisit most, of which the clusters are measured over time."""


@dataclass(frozen=True)
class QueryHead:
    """A query head of a trace by its number."""

    number: int
    layer: int
    kv_head: int
    group: int

    @property
    def name(self) -> str:
        """As the analysis writes it."""
        return f"{self.layer}.{self.kv_head}.{self.group}"


@dataclass
class Collected:
    """What the page shows of a trace. The hits are apart, because they give way when the page grows too large."""

    about: dict[str, Any]
    pack: Pack
    recorded: Looks
    full: Looks | None
    left_out: list[str]


def query_heads(trace: Trace) -> list[QueryHead]:
    """All query heads, in the order of the trace."""
    heads: list[QueryHead] = []
    for layer, kv_head in trace.heads:
        for group in range(trace.layout.of(layer).group_size):
            heads.append(QueryHead(len(heads), layer, kv_head, group))
    return heads


def collect(
    trace: Trace,
    findings: Findings,
    options: ReportOptions,
    *,
    truth: list[dict[str, Any]] | None = None,
    replay: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Collected:
    """Read a trace and what was found in it.

    Parameters
    ----------
    trace
        From `load_trace`.
    findings
        Its analysis.
    options
        Settings of the report.
    truth
        What each token had to look back at, where that is known: ``position``, ``kind``, ``sources``.
    replay
        The JSON of a replay (see ``docs/replay.md``).
    progress
        Called after each KV head.
    """
    pack, left_out = Pack(), list[str]()
    heads = query_heads(trace)
    frame = trace.tokens
    texts = shown_tokens(frame["token_bytes"])
    _add_tokens(pack, frame, findings)
    dictionary, index = _dictionary(redacted(texts) if options.redact else texts)
    pack.add("text", index)

    revisits = np.array([row["position"] for row in findings.result["revisits"]], np.int64)
    summary = findings.result["summary"]
    reader = _HeadReader(trace, heads, findings, options, revisits, pack, left_out)
    for done, (layer, kv_head) in enumerate(trace.heads):
        reader.read(layer, kv_head)
        if progress is not None:
            progress(done + 1, len(trace.heads))
    if reader.without_beacons:
        left_out.append(f"the beacons of {reader.without_beacons} query heads with few revisits, for want of room")
    if reader.hits_missing:
        left_out.append(f"{reader.hits_missing:,} recorded hits, whose attention is not finite")
    if not trace.has_values:
        left_out.append("values, which were not recorded; nothing here needs them")
    rows = {row_name(row): row for row in findings.result["heads"]}
    about = {
        "name": "redacted" if options.redact else valid_unicode(trace.path.name),
        "trace": _trace_facts(trace, options.redact),
        "summary": {key: value for key, value in summary.items() if key != "trace"},
        "options": findings.result["options"],
        "verdict": findings.result["verdict"],
        "revisits": _without_texts(findings.result["revisits"]),
        "targets": _without_texts(findings.result["targets"]),
        "anchors": _without_texts(findings.result["anchors"]),
        "lost": _without_texts(findings.result["lost"]),
        "cache": findings.result["cache"],
        "causal": _without_listed_texts(findings.result.get("causal")),
        "clusters": _by_head(findings.result["clusters"], heads),
        "beacon_summary": _by_head(findings.result["beacons"], heads),
        "heads": [
            {"number": head.number, "name": head.name, "layer": head.layer, "kv": head.kv_head, "group": head.group}
            | _head_facts(rows.get(head.name))
            | reader.head_facts[head.number]
            for head in heads
        ],
        "kv_heads": [
            {"layer": layer, "kv": kv_head, "compressions": reader.compressions[layer, kv_head]}
            for layer, kv_head in trace.heads
        ],
        "dictionary": dictionary,
        "full_steps": reader.full_steps_name,
        "redacted": options.redact,
        "truth": truth,
        "replay": replay,
        "left_out": left_out,
    }
    full = gather(reader.full) if reader.evicts else None
    return Collected(about, pack, gather(reader.recorded), full, left_out)


def row_name(row: dict[str, Any]) -> str:
    """The name of the query head that a row of the analysis is about."""
    return f"{row['layer']}.{row['kv_head']}.{row['query_head']}"


class _HeadReader:
    """Reads KV heads one after another and keeps of each what the page needs."""

    def __init__(
        self,
        trace: Trace,
        heads: list[QueryHead],
        findings: Findings,
        options: ReportOptions,
        revisits: npt.NDArray[np.int64],
        pack: Pack,
        left_out: list[str],
    ) -> None:
        self.trace, self.options, self.pack, self.revisits = trace, options, pack, revisits
        self.recorded: list[Looks] = []
        self.full: list[Looks] = []
        self.compressions: dict[tuple[int, int], list[int]] = {}
        self.head_facts: dict[int, dict[str, Any]] = {}
        self.without_beacons = 0
        self.hits_missing = 0
        """Hits whose attention is not finite."""
        self.evicts = False
        self._heads = heads
        self._first = {(head.layer, head.kv_head): head.number for head in reversed(heads)}
        self._window = int(findings.result["summary"]["window"])
        self._sinks = [row["position"] for row in findings.result["summary"]["sinks"]]
        order = sorted(findings.result["heads"], key=lambda row: (-(row["revisits"] or 0), -(row["events"] or 0)))
        self._rank = {row_name(row): rank for rank, row in enumerate(order)}
        self._entries = 0
        cost = len(heads) * trace.length**2
        every = cost <= _FULL_COST
        self.full_steps_name = "every token" if every else "the revisits"
        self._full_steps = np.arange(trace.length) if every else np.sort(revisits[:_FULL_STEPS])
        if not every and len(revisits) > _FULL_STEPS:
            self.full_steps_name = f"the {_FULL_STEPS:,} strongest revisits"

    def read(self, layer: int, kv_head: int) -> None:
        """Read a KV head."""
        # Here, because torch takes its time to load, and options are checked before.
        from beaconscope.analyze.attention import HeadAttention, evicted_at, layer_facts, layer_rotary

        head = self.trace.head(layer, kv_head)
        first = self._first[layer, kv_head]
        self.recorded.append(recorded_looks(head, first))
        if sum(map(len, self.recorded)) > 2 * _HELD_HITS:
            self.recorded = [gather(self.recorded).strongest(_HELD_HITS, self._window, self._sinks)[0]]
        self.hits_missing += int((~np.isfinite(head.hit_mass)).sum())
        self.compressions[layer, kv_head] = [event.position for event in self.trace.evictions(layer, kv_head)]
        gone = evicted_at(self.trace, layer, kv_head)
        if gone is not None:
            self.evicts = True
            # The step after which it was gone, plus one; 0 for never.
            at = np.where(gone < self.trace.length, gone + 1, 0)
            self.pack.add(f"evicted.{layer}.{kv_head}", at.astype(smallest_unsigned(self.trace.length)))
        if self.trace.attention_over != "everything" and any(self.compressions[layer, kv_head]):
            attention = HeadAttention(head, layer_facts(self.trace, layer))
            self.full.append(full_looks(attention, first, self._full_steps, max(8, self.trace.hits_per_head)))
        rotary = layer_rotary(self.trace, layer)
        changes = self.trace.beacons(layer, kv_head)
        for group in range(head.query.shape[1]):
            self._read_query_head(first + group, head, group, rotary, changes)

    def _read_query_head(
        self, number: int, head: HeadTrace, group: int, rotary: Rotary | None, changes: pd.DataFrame
    ) -> None:
        from beaconscope.analyze.attention import pre_rope

        rank = self._rank.get(self._heads[number].name, len(self._rank))
        track = beacon_track(changes, group, head.beacon[:, group], head.beacon_similarity[:, group])
        kept = track is not None and (rank < self.options.space_heads or self._entries + len(track) <= _BEACON_ENTRIES)
        facts: dict[str, Any] = {"beacons": kept, "rank": rank}
        query = np.array(head.query[:, group], np.float32)  # [T, D]
        everywhere = np.arange(self.trace.length)
        before = None if rotary is None else pre_rope(query, rotary, everywhere)
        of_policy = str(self.trace.policy.get("params", {}).get("query_space") or "pre-rope")
        if track is not None and kept:
            self._entries += len(track)
            track.add_to(self.pack, f"beacons.{number}", self.trace.length)
            home = before if of_policy == "pre-rope" and before is not None else query
            if rank < max(self.options.space_heads, _CURVED_HEADS):
                facts["curves"] = cluster_curves(track, home)
        elif track is not None:
            self.without_beacons += 1
        self._lay_out(number, rank, {"pre-rope": before, "post-rope": query}, track if kept else None, of_policy)
        self.head_facts[number] = facts

    def _lay_out(
        self,
        number: int,
        rank: int,
        spaces: dict[str, npt.NDArray[np.float32] | None],
        track: BeaconTrack | None,
        of_policy: str,
    ) -> None:
        """Put the queries of a head on a plane, in each space that there is."""
        options = self.options
        umap = rank < options.space_heads
        sources = np.zeros(0, np.int64) if track is None else track.sources
        wanted = (self.revisits, sources)
        count = options.shown_queries if umap else min(options.shown_queries, _PCA_QUERIES)
        shown = shown_positions(self.trace.length, max(0, self.trace.prompt_length - 1), wanted, count, options.seed)
        after = spaces["post-rope"]
        assert after is not None
        # What is not finite lies nowhere.
        shown = shown[np.isfinite(after[shown]).all(axis=1)]
        if not len(shown):
            return
        must = np.isin(shown, np.concatenate(wanted))
        self.pack.add(f"space.{number}.position", shown.astype(smallest_unsigned(self.trace.length)))
        for space, queries in spaces.items():
            if queries is None:
                continue
            centroids = np.zeros((0, queries.shape[1]), np.float32)
            if track is not None and len(track.centroid) and space == of_policy:
                centroids = track.centroid
            plane = lay_out(queries[shown], must, centroids, umap=umap, fit=options.fit_queries, seed=options.seed)
            # In one piece, so that points and centroids share the steps that they are rounded to.
            for axis, letter in enumerate("xy"):
                both = np.concatenate([plane.points[:, axis], plane.centroids[:, axis]])
                self.pack.add_numbers(f"space.{number}.{space}.{letter}", both, method=plane.method)


def _add_tokens(pack: Pack, frame: pd.DataFrame, findings: Findings) -> None:
    tokens = findings.tokens
    phase = frame["phase"].astype(str)
    pack.add("phase", np.array([_PHASES.index(name) for name in phase], np.uint8))
    for name, column in (("logprob", frame["logprob"]), ("entropy", frame["entropy"])):
        pack.add_numbers(name, column.to_numpy(np.float64))
    sentence = tokens["sentence"].to_numpy(np.int64)
    pack.add("sentence", sentence.astype(np.uint32))
    for name, bits in (("distant_share", 16), ("distant_share_max", 8), ("lost_share", 8), ("q", 8)):
        pack.add_numbers(name, tokens[name].to_numpy(np.float64), bits=bits)
    if "gain" in tokens:
        pack.add_numbers("gain", tokens["gain"].to_numpy(np.float64))
    pack.add("global_heads", np.minimum(tokens["global_heads"].to_numpy(np.int64), 0xFFFF).astype(np.uint16))


def _dictionary(texts: list[str]) -> tuple[list[str], npt.NDArray[np.unsignedinteger[Any]]]:
    """Each text once, and the index of each token's."""
    number: dict[str, int] = {}
    index = [number.setdefault(text, len(number)) for text in texts]
    return list(number), np.array(index, smallest_unsigned(len(number)))


def _without_texts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in _TEXTS} for row in rows]


def _without_listed_texts(causal: dict[str, Any] | None) -> dict[str, Any] | None:
    if causal is None:
        return None
    return {
        key: _without_texts(value) if isinstance(value, list) and value and isinstance(value[0], dict) else value
        for key, value in causal.items()
    }


def _by_head(rows: list[dict[str, Any]], heads: list[QueryHead]) -> list[dict[str, Any]]:
    number = {head.name: head.number for head in heads}
    return [row | {"number": number[row_name(row)]} for row in rows if row_name(row) in number]


def _head_facts(row: dict[str, Any] | None) -> dict[str, Any]:
    """What the analysis says of a head; ``analyzed`` is false where it was not asked."""
    if row is None:
        return {"analyzed": False}
    known = {key: value for key, value in row.items() if key not in ("layer", "kv_head", "query_head")}
    return {"analyzed": True, **known}


def _trace_facts(trace: Trace, redact: bool) -> dict[str, Any]:
    metadata = trace.metadata
    model = metadata.get("model", {})
    options = trace.options
    return {
        "length": trace.length,
        "prompt_length": trace.prompt_length,
        "layers": list(trace.layers),
        "hits": trace.hits_per_head,
        "has_values": trace.has_values,
        "whole": trace.whole,
        "cut_reason": trace.cut_reason,
        "created": metadata.get("created"),
        "model": {key: model.get(key) for key in ("id", "revision", "dtype", "parameters", "attention_backend")},
        "policy": trace.policy,
        "attention_over": trace.attention_over,
        "local_window": options.get("local_window"),
        "sink_positions": options.get("sink_positions"),
        "sampling": options.get("sampling"),
        "teacher_forced": bool(options.get("teacher_forced")),
        "versions": metadata.get("versions", {}),
        "device": metadata.get("device"),
        "timings": metadata.get("timings", {}),
        "peak_memory": metadata.get("peak_memory", {}),
        "ended": metadata.get("ended"),
        "command": recording_command(trace, redact),
    }
