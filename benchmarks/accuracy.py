"""Right answers against cache size: the bundled reasoner decodes with every policy's live cache.

    python benchmarks/accuracy.py                 # 200 problems for each policy and budget; goes on where it stopped
    python benchmarks/accuracy.py --quick         # 4 small problems and 3 caches, to keep the script alive
    python benchmarks/accuracy.py --plot          # nothing but the plots and tables of what the JSON holds

Every cell decodes the same problems greedily, in batches (a sequence in a batch keeps what it keeps alone). Written are
the right answers, the chains right in every token, both with Wilson's interval at 95 %, where the first wrong token
stands and what it is, and how many entries a head held at the end, on average. All policies compress every 32 tokens,
those too that their papers run at every step, so that they hold as much: B to B + 32 entries (ScissorHands, which drops
more at once, half of B and up).
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import PreTrainedModel

from beaconscope import parse_policy
from beaconscope.kv.cache import CompressedCache
from beaconscope.kv.kinds import token_kinds
from beaconscope.models.compat import cache_argument
from beaconscope.reasoner import MODEL_FOLDER, SIZES, Problem, Solution
from beaconscope.reasoner.evaluate import Share, answer, fresh, load_model, luck
from beaconscope.reasoner.vocabulary import EOS, SPECIAL, WORDS, encode

ROOT = Path(__file__).resolve().parents[1]
INTERVAL = 32
BUDGETS = (128, 256, 384, 448)
SWEEP_BUDGETS = (256, 384)
RESULT = ROOT / "benchmarks" / "accuracy.json"
IMAGES = ROOT / "docs" / "images"

POLICIES: dict[str, str] = {
    "BeaconKV": "beacon",
    "recent queries only": "beacon:selector=none",
    "random eviction": "random",
    "StreamingLLM": "streaming-llm",
    "SnapKV": "snapkv",
    "TOVA": "tova",
    "H2O": "h2o",
    "ScissorHands": "scissorhands",
    "R-KV": "r-kv",
    "LazyEviction": "lazy-eviction",
    "KeyDiff": "keydiff",
    "Knorm": "knorm",
    "Expected Attention": "expected-attention",
}
# They have no budget: how much they hold follows from the attention, or from the length.
WITHOUT_BUDGET = {"FastGen": "fastgen:interval=32", "RPC": "rpc:period=64"}
BEACONS: dict[str, str] = {
    **{f"fps, K = {count}": f"beacon:beacons={count}" for count in (0, 2, 4, 8, 16, 32, 64)},
    **{f"{name}, K = 16": f"beacon:selector={name}" for name in ("kmeans", "random", "none")},
    "fps, K = 16, mean over queries": "beacon:query_pooling=mean",
    "fps, K = 16, mean over the group": "beacon:group_pooling=mean",
    "fps, K = 16, post-RoPE": "beacon:query_space=post-rope",
    "fps, K = 16, 32 recent": "beacon:recent=32",
}


@dataclass(frozen=True)
class Cell:
    """A policy at a budget; 0 where it has none."""

    table: str
    label: str
    spec: str
    budget: int

    @property
    def policy(self) -> str:
        """The whole setting, as ``--cache`` takes it."""
        if not self.budget:
            return self.spec
        parameters = f"budget={self.budget},interval={INTERVAL}"
        return f"{self.spec}{',' if ':' in self.spec else ':'}{parameters}"


def cells(budgets: Sequence[int], sweep: Sequence[int]) -> Iterator[Cell]:
    """All cells, the most telling first."""
    yield Cell("policies", "full cache", "full", 0)
    for label in ("BeaconKV", "random eviction", "StreamingLLM", "SnapKV", "recent queries only"):
        for budget in budgets:
            yield Cell("policies", label, POLICIES[label], budget)
    for budget in sweep:
        for label, spec in BEACONS.items():
            yield Cell("beacons", label, spec, budget)
    for label, spec in POLICIES.items():
        for budget in budgets:
            yield Cell("policies", label, spec, budget)
    for label, spec in WITHOUT_BUDGET.items():
        yield Cell("policies", label, spec, 0)


@torch.no_grad()
def decode(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], limit: int, cache: CompressedCache
) -> list[list[int]]:
    """Continue prompts of equal length greedily, until every one has ended or has ``limit`` tokens."""
    argument: dict[str, Any] = {cache_argument(model): cache}
    tokens = torch.tensor([list(prompt) for prompt in prompts])
    out: list[torch.Tensor] = []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    while len(out) < limit and not bool(done.all()):
        tokens = model(tokens, use_cache=True, **argument).logits[:, -1:].argmax(-1)  # [B, 1]
        out.append(tokens)
        done |= tokens[:, 0] == EOS
    rows = torch.cat(out, dim=1).tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def entries(cache: CompressedCache, rows: int) -> float:
    """Entries that a head holds, mean over layers, heads and sequences."""
    held = [
        (cache.kept_positions(layer.layer, row) >= 0).float().sum(1).mean().item()
        for layer in cache.compressed_layers
        for row in range(rows)
    ]
    return statistics.fmean(held)


def measure(
    model: PreTrainedModel, examples: Sequence[tuple[Problem, Solution]], policy: str, batch: int
) -> dict[str, Any]:
    """Solve all problems with one policy."""
    begin = time.perf_counter()
    chosen = parse_policy(policy)
    # As in the tokenizer, the thinking marks are text.
    special = [word for word in SPECIAL if "think" not in word]
    kinds_of = token_kinds([word.encode() for word in WORDS], encode(special))
    answers = chains = 0
    held: list[float] = []
    wrong_at: list[int] = []
    wrong_kind: collections.Counter[str] = collections.Counter()
    for start in range(0, len(examples), batch):
        part = examples[start : start + batch]
        cache = CompressedCache(model, chosen, token_kinds=kinds_of)
        written = decode(model, [problem.prompt_ids for problem, _ in part], len(part[0][1].token_ids) + 10, cache)
        held.append(entries(cache, len(part)))
        for tokens, (problem, solution) in zip(written, part, strict=True):
            answers += answer(tokens) == solution.answer
            if tuple(tokens) == solution.token_ids:
                chains += 1
                continue
            at = next(i for i, token in enumerate(solution.token_ids) if i >= len(tokens) or tokens[i] != token)
            kinds = {recall.position - len(problem.prompt_ids): recall.kind for recall in solution.recalls}
            wrong_at.append(at)
            wrong_kind[kinds.get(at, "other")] += 1
    quartiles = statistics.quantiles(wrong_at, n=4) if len(wrong_at) > 1 else wrong_at * 3
    return {
        "answers": Share(answers, len(examples)).summary(),
        "chains": Share(chains, len(examples)).summary(),
        "first_wrong": {"quartiles": quartiles, "kinds": dict(wrong_kind.most_common())},
        "entries": round(statistics.fmean(held), 1),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def load_result(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What is there already, where it was measured on the same model, problems and interval."""
    if path.exists():
        result: dict[str, Any] = json.loads(path.read_text())
        if all(result.get(name) == value for name, value in facts.items()):
            return result
        print(f"{path} is of another model or other problems; starting anew")
    return {**facts, "cells": []}


def table(result: dict[str, Any], name: str) -> str:
    """The answers of a table in Markdown: a row for each policy, a column for each budget."""
    found = [cell for cell in result["cells"] if cell["table"] == name]
    budgets = sorted({cell["budget"] for cell in found if cell["budget"]})
    labels = list(dict.fromkeys(cell["label"] for cell in found))
    lines = [
        "| | " + " | ".join(f"{budget} entries" for budget in budgets) + " | no budget (entries) |",
        "|---" * (len(budgets) + 2) + "|",
    ]
    by_place = {(cell["label"], cell["budget"]): cell for cell in found}

    def shown(cell: dict[str, Any] | None) -> str:
        if cell is None:
            return ""
        low, high = cell["answers"]["low"], cell["answers"]["high"]
        return f"{cell['answers']['share']:.3f} ({low:.2f} to {high:.2f}) / {cell['chains']['share']:.3f}"

    for label in labels:
        free = by_place.get((label, 0))
        last = f"{shown(free)} ({free['entries']:.0f})" if free else ""
        row = " | ".join(shown(by_place.get((label, budget))) for budget in budgets)
        lines.append(f"| {label} | {row} | {last} |")
    return "\n".join(lines)


def plot(result: dict[str, Any], folder: Path) -> None:
    """Draw ``accuracy.svg``, policies against budget, and ``accuracy-beacons.svg``, K and selectors."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "beaconscope", "font.size": 9, "axes.spines.top": False})
    matplotlib.rcParams.update({"axes.spines.right": False, "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    colours = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
    marks = "osD^vPX"

    figure, axes = plt.subplots(figsize=(7.4, 4.4), layout="constrained")
    labels = [label for label in dict.fromkeys(c["label"] for c in result["cells"] if c["table"] == "policies")]
    for index, label in enumerate(labels):
        line = sorted(
            (c for c in result["cells"] if c["table"] == "policies" and c["label"] == label), key=lambda c: c["budget"]
        )
        x = [cell["budget"] or cell["entries"] for cell in line]
        y = [cell["answers"]["share"] for cell in line]
        low = [cell["answers"]["share"] - cell["answers"]["low"] for cell in line]
        high = [cell["answers"]["high"] - cell["answers"]["share"] for cell in line]
        style = {"color": colours[index % 7], "marker": marks[(index + index // 7) % 7]}
        axes.errorbar(
            x, y, [low, high], label=label, markersize=4.5, linewidth=1.3, elinewidth=0.7,
            linestyle=("-", "--", ":")[index // 7], **style,
        )  # fmt: skip
    axes.axhline(result["luck"], color="#888888", linewidth=0.8, linestyle=(0, (1, 2)))
    axes.annotate("luck", (axes.get_xlim()[0], result["luck"]), fontsize=8, color="#666666", va="bottom")
    axes.set_xlabel(f"entries of each head (budget); problem and chain have {result['tokens']} tokens")
    axes.set_ylabel("right answers")
    axes.set_ylim(-0.02, 1.04)
    axes.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(folder / "accuracy.svg", metadata={"Date": None})
    plt.close(figure)

    found = [cell for cell in result["cells"] if cell["table"] == "beacons"]
    if not found:
        return
    names = list(dict.fromkeys(cell["label"] for cell in found))
    figure, axes = plt.subplots(figsize=(7.4, 0.34 * len(names) + 1.1), layout="constrained")
    for index, budget in enumerate(sorted({cell["budget"] for cell in found})):
        for cell in found:
            if cell["budget"] == budget:
                share = cell["answers"]
                row = names.index(cell["label"]) + 0.16 * (2 * index - 1)
                span = [[share["share"] - share["low"]], [share["high"] - share["share"]]]
                first = cell["label"] == next(c["label"] for c in found if c["budget"] == budget)
                axes.errorbar(
                    share["share"], row, xerr=span, color=colours[index], marker=marks[index], markersize=4.5,
                    linestyle="", elinewidth=0.9, label=f"budget {budget}" if first else None,
                )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("right answers")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(folder / "accuracy-beacons.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="4 small problems and 3 caches")
    parser.add_argument("--plot", action="store_true", help="measure nothing; tables and plots of what is there")
    parser.add_argument("--size", choices=list(SIZES), default="500")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--sweep", default=",".join(map(str, SWEEP_BUDGETS)), help="budgets of the beacons' table")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--seed", type=int, default=3_000_000)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("-o", "--output", type=Path, default=RESULT, help="the JSON, written after every cell")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    budgets = [int(budget) for budget in options.budgets.split(",")]
    sweep = [int(budget) for budget in options.sweep.split(",") if budget]
    todo = list(cells(budgets, sweep))
    if options.quick:
        options.size, options.problems = "250", 4
        todo = [cell for cell in todo if cell.budget in (0, 128)]
        todo = [cell for cell in todo if cell.label in ("full cache", "BeaconKV", "H2O", "FastGen")]
    size = SIZES[options.size]
    examples = fresh(size, options.problems, options.seed)
    facts = {
        "model": hashlib.sha256((options.model / "model.safetensors").read_bytes()).hexdigest(),
        "size": options.size,
        "tokens": size.prompt_length + size.trace_length,
        "problems": options.problems,
        "seed": options.seed,
        "interval": INTERVAL,
    }
    result = {**facts, "cells": []} if options.quick else load_result(options.output, facts)
    result["luck"] = round(luck(examples, draws=20), 4)
    if not options.plot:
        model = load_model(options.model)
        done = {(cell["table"], cell["policy"]) for cell in result["cells"]}
        for cell in todo:
            if (cell.table, cell.policy) in done:
                continue
            done.add((cell.table, cell.policy))
            found = measure(model, examples, cell.policy, options.batch)
            result["cells"].append(
                {"table": cell.table, "label": cell.label, "policy": cell.policy, "budget": cell.budget, **found}
            )
            print(
                f"{cell.policy:60} answers {found['answers']['share']:.3f}  chains {found['chains']['share']:.3f}  "
                f"entries {found['entries']:.0f}  {found['seconds']:.0f} s",
                flush=True,
            )
            if not options.quick:
                options.output.write_text(json.dumps(result, indent=1) + "\n")
    if not options.quick:
        plot(result, IMAGES)
    for name in ("policies", "beacons"):
        print(f"\n{name}: answers (interval) / chains\n\n{table(result, name)}")


if __name__ == "__main__":
    main()
