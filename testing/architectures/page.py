"""The page of models in the documentation, written from the results of a sweep."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from testing.architectures.results import NOTED, REFUSED, RIGHT, TRACEBACK, UNBUILT, WRONG, Result

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"

_LEAD = """\
# Models

Which architectures BeaconScope records, and which it refuses. The name is `model_type` in a model's `config.json`.

Every architecture that transformers {version} loads as a causal language model was built tiny, with random weights,
and recorded: with the defaults of its config and, where it has such settings, with a short window, short chunks, shared
keys, sparse attention or another rotary embedding.

{summary}

Each was recorded with a full cache, with a compressed cache, with the prompt in pieces, and with two prompts of unequal
length in a batch. The traces were compared with what transformers computes without BeaconScope: tokens,
log-probabilities, hits, attention mass, attention recomputed from queries and keys, and the tokens of `generate` with a
`BeaconCache`. What a compressed cache had dropped was hidden from transformers' own attention, which then had to give
the same numbers. A replay had to evict what the recording evicted, and `analyze` had to take the trace.

Layers with a sliding window keep their window and are not compressed; `record` says so. Where every layer has one that
is shorter than the text, only a full cache can be recorded. The tables say that the numbers are right. They do not say
how well a model works with a small cache.
"""
_SECTIONS = (
    (RIGHT, "work", "Works", "Every number is right, in every variant."),
    (NOTED, "work, with a note", "Works, with a note", "Every number is right where the note does not say otherwise."),
    (
        REFUSED,
        "are refused",
        "Refused",
        "`record` and `BeaconCache` stop before anything is written, and say why.",
    ),
    (UNBUILT, "were not tried", "Not tried", "No tiny model can be made of these."),
    (WRONG, "are wrong", "Wrong", "Faults of BeaconScope."),
    (TRACEBACK, "fail", "Fails", "Faults of BeaconScope."),
)
_SPECIFIC = (
    (r"layer \d+ of \w+", "a layer"),
    (r"layer \d+ \(\w+\)", "a layer"),
    (r"every layer of \w+", "every layer"),
    (r"layer \d+", "a layer"),
    (r"\b\w+(ForCausalLM|ForConditionalGeneration|Model|LMHeadModel|WithLMHead) ", ""),
    (r" \((off|weights differ) by up to [^)]*\)", ""),
)
_WHY_UNBUILT: Mapping[str, str] = {
    "blt": "is made of bytes, patches and several models in one",
    "dots3_note": "its image part cannot be made tiny; its text part is `dots3_note_text`",
    "gemma3n": "its image part needs the package timm; its text part is `gemma3n_text`",
    "gemma4_assistant": "drafts for another model, whose keys it reads",
    "gemma4_unified_assistant": "drafts for another model, whose keys it reads",
    "musicgen": "writes sound, and transformers cannot make it from its config",
    "musicgen_melody": "writes sound, and transformers cannot make it from its config",
}


def page(version: str, results: Iterable[Result]) -> str:
    """The page, in Markdown; one row for each architecture."""
    by_name: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_name[result.architecture].append(result)
    sections: dict[str, dict[str, list[Result]]] = defaultdict(dict)
    for name, each in by_name.items():
        sections[_status(each)][name] = each
    counts = [f"{len(sections[status])} {label}" for status, label, _, _ in _SECTIONS if sections[status]]
    summary = f"Of {len(by_name)} architectures {', '.join(counts)}."
    lines = [_LEAD.format(version=version, summary=textwrap.fill(summary, 120))]
    for status, _, title, text in _SECTIONS:
        if sections[status]:
            lines += [f"## {title}", "", text, "", *_table(status, sections[status]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _status(results: Sequence[Result]) -> str:
    """What all variants of an architecture come to; what could not be built does not count where others could."""
    found = {result.status for result in results if result.status != UNBUILT}
    if not found:
        return UNBUILT
    for fault in (TRACEBACK, WRONG):
        if fault in found:
            return fault
    return found.pop() if len(found) == 1 else NOTED


def _table(status: str, section: Mapping[str, Sequence[Result]]) -> list[str]:
    if status == RIGHT:
        return _rows(["architecture", "tried"], ([f"`{name}`", _tried(each)] for name, each in section.items()))
    if status == UNBUILT:
        return _rows(
            ["architecture", "why"],
            ([f"`{name}`", _WHY_UNBUILT.get(name, each[0].details[0])] for name, each in section.items()),
        )
    return _rows(
        ["architecture", "tried", "note" if status == NOTED else "why"],
        ([f"`{name}`", _tried(each), _notes(each)] for name, each in section.items()),
    )


def _tried(results: Sequence[Result]) -> str:
    return ", ".join(result.variant for result in results if result.status != UNBUILT)


def _notes(results: Sequence[Result]) -> str:
    """What is to be known, once where it holds for all variants."""
    built = [result for result in results if result.status != UNBUILT]
    said: dict[str, list[str]] = defaultdict(list)
    for result in built:
        for detail in result.details:
            said[_plain(f"refused: {detail}" if result.status == REFUSED else detail)].append(result.variant)
    everywhere = all(result.status == REFUSED for result in built)
    parts = []
    for text, variants in said.items():
        text = text.removeprefix("refused: ") if everywhere else text
        parts.append(text if len(variants) == len(built) else f"{', '.join(variants)}: {text}")
    return "; ".join(parts)


def _plain(text: str) -> str:
    """A message without what differs between variants: its class, the layer that it names first, how far it is off."""
    for pattern, replacement in _SPECIFIC:
        text = re.sub(pattern, replacement, text)
    return text


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
