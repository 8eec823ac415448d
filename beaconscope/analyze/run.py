"""Analyze a trace: one head at a time, then the trace as a whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from beaconscope.analyze.analysis import Analysis
from beaconscope.analyze.attention import HeadAttention, evicted_at, layer_facts
from beaconscope.analyze.beacons import beacon_rows
from beaconscope.analyze.cache import cache_consequences
from beaconscope.analyze.clusters import cluster_rows
from beaconscope.analyze.events import Events, find_events, join
from beaconscope.analyze.heads import RETRIEVES, head_name, head_row
from beaconscope.analyze.options import AnalyzeOptions
from beaconscope.analyze.parallel import workers
from beaconscope.analyze.places import Text, anchors, merged, span_rows, spans
from beaconscope.analyze.revisits import Revisits, find_revisits
from beaconscope.analyze.scan import find_sinks, scan
from beaconscope.analyze.sentences import sentences_of
from beaconscope.analyze.verdict import judge
from beaconscope.errors import UsageError
from beaconscope.files import valid_unicode
from beaconscope.progress import Progress
from beaconscope.selection import select
from beaconscope.trace import Trace

RECEIVERS = 20
"""Heads with the highest kurtosis that are called receiver heads (Thought Anchors)."""


@dataclass
class _Sums:
    """What is gathered over heads. T positions."""

    share_sum: npt.NDArray[np.float64]  # [T], of the heads that are not missing there
    share_count: npt.NDArray[np.int64]  # [T]
    share_max: npt.NDArray[np.float32]  # [T]
    distant: npt.NDArray[np.float64]  # [T], distant attention of all heads
    lost: npt.NDArray[np.float64]  # [T], of that, on evicted positions
    heads: list[dict[str, Any]] = field(default_factory=list)
    events: list[Events] = field(default_factory=list)
    head_of: list[npt.NDArray[np.int64]] = field(default_factory=list)  # index into heads of each event
    evicted: dict[tuple[int, int], npt.NDArray[np.int64]] = field(default_factory=dict)
    missing: list[dict[str, int]] = field(default_factory=list)
    """KV heads with queries or keys that are not finite, and how many."""
    known_heads: int = 0
    """Query heads of which at least one step is known."""
    assumed: bool = False


def analyze(
    trace: Trace,
    options: AnalyzeOptions | None = None,
    progress: Progress | None = None,
    *,
    jobs: int | None = None,
) -> Analysis:
    """Find the thought-revisiting tokens of a trace, what and who revisits, and whether their queries cluster.

    Attention is computed anew from the recorded queries and keys, one KV head at a time.

    Parameters
    ----------
    trace
        From `load_trace`.
    options
        Settings; the defaults if left out.
    progress
        Called after each KV head.
    jobs
        Heads computed side by side; None is one for each core, at most eight. Makes no difference to what is found.

    Returns
    -------
    Analysis
        The same for the same trace, options and library versions.

    Raises
    ------
    UsageError
        Where layers or heads are chosen that the trace lacks, or fewer than one job.
    BeaconScopeError
        Where the file is damaged.
    """
    options = options or AnalyzeOptions()
    chosen = _chosen_heads(trace, options)
    frame = trace.tokens
    sentences = sentences_of(frame)
    text = Text(frame, sentences, trace.prompt_length)
    window = options.window_of(trace.length)
    # The query of the prompt's last token writes the first generated one. What is distant must have grown as long as
    # what is near before a look back can stand out.
    first = max(0, trace.prompt_length - 1)
    steps = range(min(trace.length, max(first, 2 * window)), trace.length)
    if trace.length == trace.prompt_length:
        steps = range(trace.length, trace.length)

    with workers(jobs) as pool:
        sums = _gather(pool, trace, options, chosen, text, window, steps, progress)
        events = join(sums.events)
        head_of = np.concatenate(sums.head_of) if sums.head_of else np.zeros(0, np.int64)
        strong = (events.share >= options.lone_share) & (events.mass >= options.lone_share / 2)
        strong &= events.width <= options.lone_focus
        # Heads that are not known at a step would count as heads that do not look back.
        known = (sums.share_count[steps.start : steps.stop] == sums.known_heads) & (sums.known_heads > 0)
        revisits = find_revisits(head_of, events.step, events.center, strong, steps, options, known)
        heads = _head_frame(sums, events, head_of, revisits, options)
        clusters, sweep = cluster_rows(pool, trace, heads, events, head_of, revisits, first, options)
    tokens = _token_frame(frame, text, sums, revisits)
    found, targets = _revisit_frames(sums, events, head_of, revisits, text, options)
    cache, lost = cache_consequences(
        sums.evicted, sums.distant, sums.lost, steps, sums.heads, events, head_of, found, text
    )
    beacons = beacon_rows(trace, heads, events, head_of, options)
    summary = {
        "trace": valid_unicode(trace.path),
        "model": trace.model_id,
        "length": trace.length,
        "prompt_length": trace.prompt_length,
        "whole": trace.whole,
        "heads": len(sums.heads),
        "layers": sorted({layer for layer, _ in chosen}),
        "sentences": len(sentences),
        "window": window,
        "steps": int(known.sum()),
        "missing_steps": int((~known).sum()),
        "attention": "computed from the recorded queries and keys over "
        + (
            "everything recorded, as a full cache would attend"
            if options.over == "everything"
            else "what the cache held"
        ),
        "recorded_attention": trace.attention_over,
        "attention_assumed": sums.assumed,
        "missing_vectors": sum(head["queries"] + head["keys"] for head in sums.missing),
        "missing": sums.missing,
        "global_queries": len(events),
        "revisits": int(revisits.flagged.sum()),
        "revisit_rate": float(revisits.flagged.sum() / known.sum()) if known.any() else None,
        "reasons": {
            name: int((revisits.reason[revisits.flagged] == name).sum()) for name in ("together", "agree", "alone")
        },
        "lone_rate": revisits.lone_rate,
        "lone_counted": bool(known.any()) and revisits.lone_rate <= options.lone_rate,
        "sinks": _common_sinks(sums.heads),
        "periods": {
            period: int(targets.loc[targets["period"] == period, "position"].nunique())
            for period in ("prompt", "early", "later", "answer")
        },
    }
    return Analysis(
        options=options,
        summary=summary,
        verdict=judge(summary, clusters, asked=options.cluster_heads > 0),
        tokens=tokens,
        revisits=found,
        targets=targets,
        anchors=anchors(targets, text),
        heads=heads,
        clusters=clusters,
        sweep=sweep,
        beacons=beacons,
        cache=cache,
        lost=lost,
    )


def _chosen_heads(trace: Trace, options: AnalyzeOptions) -> list[tuple[int, int]]:
    """Layer and number of each KV head to analyze.

    Raises
    ------
    UsageError
        Where the trace lacks what is chosen.
    """
    layers = select(options.layers, max(trace.layers) + 1, "layers")
    heads = select(options.heads, max(head for _, head in trace.heads) + 1, "heads")
    if options.layers not in ("all", "auto") and (absent := sorted(set(layers) - set(trace.layers))):
        raise UsageError(f"layer {absent[0]} is not in the trace; it has {', '.join(map(str, trace.layers))}")
    chosen = [(layer, head) for layer, head in trace.heads if layer in layers and head in heads]
    if not chosen:
        raise UsageError("no recorded head is chosen; see `beaconscope info` for what the trace has")
    return chosen


@dataclass(frozen=True)
class _OfHead:
    """What one KV head gives. T positions, G query heads."""

    share_sum: npt.NDArray[np.float64]  # [T], over its query heads
    share_count: npt.NDArray[np.int64]  # [T]
    share_max: npt.NDArray[np.float32]  # [T]
    distant: npt.NDArray[np.float64]  # [T]
    lost: npt.NDArray[np.float64] | None  # [T]
    rows: list[dict[str, Any]]  # [G]
    events: Events
    evicted: npt.NDArray[np.int64] | None  # [T]
    missing: tuple[int, int]
    known_heads: int
    assumed: bool


def _gather(
    pool: ThreadPoolExecutor,
    trace: Trace,
    options: AnalyzeOptions,
    chosen: list[tuple[int, int]],
    text: Text,
    window: int,
    steps: range,
    progress: Progress | None,
) -> _Sums:
    """Pass over every chosen head, and sum up in their order."""
    length = trace.length
    sums = _Sums(
        np.zeros(length), np.zeros(length, np.int64), np.zeros(length, np.float32), np.zeros(length), np.zeros(length)
    )
    each = partial(_of_head, trace, options, text, window, steps)
    for done, (head, found) in enumerate(zip(chosen, pool.map(each, chosen), strict=True)):
        if any(found.missing):
            layer, kv_head = head
            sums.missing.append(
                {"layer": layer, "kv_head": kv_head, "queries": found.missing[0], "keys": found.missing[1]}
            )
        sums.known_heads += found.known_heads
        sums.assumed |= found.assumed
        if found.evicted is not None:
            sums.evicted[head] = found.evicted
        sums.share_sum += found.share_sum
        sums.share_count += found.share_count
        sums.share_max = np.fmax(sums.share_max, found.share_max)
        sums.distant += found.distant
        if found.lost is not None:
            sums.lost += found.lost
        sums.head_of.append(len(sums.heads) + found.events.group)
        sums.events.append(found.events)
        sums.heads += found.rows
        if progress is not None:
            progress(done + 1, len(chosen))
    return sums


@torch.inference_mode()
def _of_head(
    trace: Trace, options: AnalyzeOptions, text: Text, window: int, steps: range, head: tuple[int, int]
) -> _OfHead:
    """Read one KV head, pass over its attention, and find its global queries."""
    layer, kv_head = head
    facts = layer_facts(trace, layer)
    gone = evicted_at(trace, layer, kv_head)
    attention = HeadAttention(trace.head(layer, kv_head), facts, gone if options.over == "held" else None)
    if options.sinks is None:
        sinks = find_sinks(attention, window, options.sink_share)
    else:
        sinks = [list(range(min(options.sinks, trace.length)))] * attention.groups
    scanned = scan(attention, text.sentences, window, sinks, gone)
    events = find_events(attention, scanned, steps.start, window, options)
    share = scanned.share
    known = ~np.isnan(share)
    fired = np.bincount(events.group, minlength=attention.groups)
    return _OfHead(
        share_sum=np.where(known, share, 0).sum(axis=0, dtype=np.float64),
        share_count=known.sum(axis=0),
        share_max=np.where(known, share, 0).max(axis=0),
        distant=np.nan_to_num(scanned.distant).sum(axis=0, dtype=np.float64),
        lost=None if scanned.lost is None else np.nan_to_num(scanned.lost).sum(axis=0, dtype=np.float64),
        rows=[
            head_row(layer, kv_head, group, scanned, int(fired[group]), steps, text.token_id, window)
            for group in range(attention.groups)
        ],
        events=events,
        evicted=gone,
        missing=attention.missing,
        known_heads=int(known[:, steps.start : steps.stop].any(axis=1).sum()),
        assumed=facts.assumed,
    )


def _token_frame(frame: pd.DataFrame, text: Text, sums: _Sums, revisits: Revisits) -> pd.DataFrame:
    """One row per position: the trace's own columns, and what was found."""
    tokens = frame[["position", "token_id", "token", "phase", "logprob", "entropy"]].copy()
    tokens["token"] = tokens["token"].astype(str)
    tokens["phase"] = tokens["phase"].astype(str)
    tokens["sentence"] = text.sentences.of
    with np.errstate(invalid="ignore", divide="ignore"):
        tokens["distant_share"] = sums.share_sum / sums.share_count
    there = sums.share_count > 0
    tokens["distant_share_max"] = np.where(there, sums.share_max, np.nan)
    steps = slice(revisits.first_step, revisits.first_step + len(revisits.flagged))
    for name, value, empty in (
        ("global_heads", revisits.heads, 0),
        ("agreeing_heads", revisits.agree, 0),
        ("p", revisits.p, np.nan),
        ("q", revisits.q, np.nan),
        ("revisit", revisits.flagged, False),
        ("reason", revisits.reason, ""),
    ):
        column = np.full(text.length, empty, dtype=object if isinstance(empty, str) else np.asarray(value).dtype)
        column[steps] = value
        tokens[name] = column
    lost = np.where(sums.distant > 0, sums.lost / np.maximum(sums.distant, 1e-30), 0.0)
    tokens["lost_share"] = np.where(there, lost, np.nan) if sums.evicted else np.nan
    return tokens


def _revisit_frames(
    sums: _Sums, events: Events, head_of: npt.NDArray[np.int64], revisits: Revisits, text: Text, options: AnalyzeOptions
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One row per revisit, by falling score, and one row per revisit and target span."""
    by_step: dict[int, list[int]] = {}
    for index, step in enumerate(events.step.tolist()):
        by_step.setdefault(step, []).append(index)
    rows, targets = [], []
    for step in revisits.steps.tolist():
        chosen = np.array(by_step[step])
        at = step - revisits.first_step
        found = span_rows(step, spans(*merged(events, chosen), options.target_mass), text)
        targets += found
        best = found[0]
        looking = [sums.heads[number] for number in sorted(set(head_of[chosen].tolist()))]
        rows.append(
            {
                "position": step,
                "token": text.text(step, step + 1),
                "writes": text.text(step + 1, step + 2) if step + 1 < text.length else "",
                "phase": text.phase[step],
                "sentence": int(text.sentences.of[step]),
                "score": float(events.share[chosen].sum()),
                "p": float(revisits.p[at]),
                "q": float(revisits.q[at]),
                "reason": str(revisits.reason[at]),
                "heads": [head_name(head["layer"], head["kv_head"], head["query_head"]) for head in looking],
                "target_start": best["start"],
                "target_stop": best["stop"],
                "target_share": best["share"],
                "target_period": best["period"],
                "distance": best["distance"],
                "target_text": best["text"],
            }
        )
    columns = ["position", "token", "writes", "phase", "sentence", "score", "p", "q", "reason", "heads"]
    columns += ["target_start", "target_stop", "target_share", "target_period", "distance", "target_text"]
    frame = pd.DataFrame(rows, columns=columns)
    frame = frame.sort_values(["score", "position"], ascending=[False, True], ignore_index=True)
    target_columns = ["position", "start", "stop", "share", "distance", "sentence", "phase", "period", "text"]
    return frame, pd.DataFrame(targets, columns=target_columns)


def _head_frame(
    sums: _Sums, events: Events, head_of: npt.NDArray[np.int64], revisits: Revisits, options: AnalyzeOptions
) -> pd.DataFrame:
    """All heads, with what they have to do with the trace's revisits."""
    heads = pd.DataFrame(sums.heads)
    flagged = np.isin(events.step, revisits.steps)
    part = np.bincount(head_of[flagged], minlength=len(heads))
    count = int(revisits.flagged.sum())
    heads["revisits"] = part
    heads["revisit_share"] = part / count if count else np.nan
    # A head has a part in revisits if it fires in a twentieth of them, and twice at least.
    revisiting = part >= np.maximum(2, 0.05 * count)
    long_range = heads["distant_share"].to_numpy() >= options.min_share
    kind = np.where(revisiting, "revisiting", np.where(long_range, "long-range", "local"))
    missing = (heads["steps"] == 0) & (len(revisits.flagged) > 0)
    heads["kind"] = np.where(missing, "unknown", kind)
    order = heads["kurtosis"].rank(ascending=False, method="first")
    heads["receiver"] = (order <= RECEIVERS) & heads["kurtosis"].notna()
    heads["retrieves"] = heads["retrieval"].fillna(0) > RETRIEVES
    return heads


def _common_sinks(heads: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Sink positions with the number of query heads that have them, most first."""
    count: dict[int, int] = {}
    for head in heads:
        for position in head["sinks"]:
            count[position] = count.get(position, 0) + 1
    order = sorted(count, key=lambda position: (-count[position], position))
    return [{"position": position, "heads": count[position]} for position in order[:16]]
