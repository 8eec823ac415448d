"""Measure the bundled reasoner: ``python -m beaconscope.reasoner.evaluate``.

1. *Accuracy*: greedy answers to fresh problems of every size, in batches, with Wilson intervals; also how many chains
   are right in every token.
2. *Control*: the same with the definitions dropped from the cache after the prompt. The right answer is then luck, and
   how much luck the problems allow is counted by solving them with other digits.
3. *Visibility*: at the position before each recalled token, the attention that does not go to sinks: the largest share
   that one head puts on the labelled source.
4. *Causality*: the long-range gain of every token of the right chain, log p(token | everything) - log p(token | its own
   sentence may not look farther back than a window). Both runs go through the layers side by side: the blinded rows see
   their own sentence as blinded, what is before it as the full run left it, the sinks always.
5. *Equality*: single and batched generation write the same tokens; bfloat16 is as right as float32.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from scipy.stats import binomtest
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from beaconscope.reasoner.task import MODEL_FOLDER, SIZES, Kind, Problem, Recall, Size, Solution, make_problem, solve
from beaconscope.reasoner.vocabulary import EOS, encode

SINKS = 4
"""First positions that count as attention sinks."""

_KINDS: tuple[Kind, ...] = ("operation", "letter", "value")
_FULL_STOP = encode(["."])[0]
_THINK_END = encode(["</think>"])[0]


@dataclass(frozen=True)
class Share:
    """So many of so many."""

    count: int
    of: int

    @property
    def share(self) -> float:
        """The share, nan where there is nothing to count."""
        return self.count / self.of if self.of else math.nan

    def wilson(self) -> tuple[float, float]:
        """Wilson's score interval of the share at 95 %."""
        if not self.of:
            return math.nan, math.nan
        interval = binomtest(self.count, self.of).proportion_ci(0.95, "wilson")
        return float(interval.low), float(interval.high)

    def summary(self) -> dict[str, Any]:
        """The share with its interval, as plain values."""
        low, high = self.wilson()
        return {
            "count": self.count,
            "of": self.of,
            "share": round(self.share, 4),
            "low": round(low, 4),
            "high": round(high, 4),
        }


def load_model(folder: Path = MODEL_FOLDER, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Load the reasoner from a folder."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval()
    return cast(LlamaForCausalLM, model)


def fresh(size: Size, count: int, seed: int) -> list[tuple[Problem, Solution]]:
    """Draw problems with their solutions; the training seeds are small numbers, so give large ones."""
    rng = random.Random(seed)
    return [(problem, solve(problem)) for problem in (make_problem(size, rng) for _ in range(count))]


class _Buffers(DynamicCache):
    """A cache that writes into room set aside at the start, where a dynamic one copies everything at every step."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._buffers: list[tuple[Tensor, Tensor]] = []  # of each layer, keys and values [B, H, room, D]
        self._filled: list[int] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of a layer, and give all it has."""
        if layer_idx == len(self._buffers):
            batch, heads, _length, size = key_states.shape
            room = (batch, heads, self._room, size)
            self._buffers.append((key_states.new_empty(room), value_states.new_empty(room)))
            self._filled.append(0)
        begin = self._filled[layer_idx]
        end = self._filled[layer_idx] = begin + key_states.shape[2]
        keys, values = self._buffers[layer_idx]
        keys[:, :, begin:end], values[:, :, begin:end] = key_states, value_states
        return keys[:, :, :end], values[:, :, :end]

    def keep(self, positions: Tensor) -> None:
        """Drop all but the entries at ``positions`` from every layer."""
        for keys, values in self._buffers:
            keys[:, :, : len(positions)] = keys[:, :, positions]
            values[:, :, : len(positions)] = values[:, :, positions]
        self._filled = [len(positions)] * len(self._filled)


@torch.no_grad()
def generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], limit: int, drop: Sequence[int] = ()
) -> list[list[int]]:
    """Continue prompts of equal length greedily.

    Parameters
    ----------
    model
        A causal model.
    prompts
        B prompts of the same number of tokens.
    limit
        Tokens to generate at most.
    drop
        Positions of the prompt whose keys and values leave the cache once the prompt has been read.

    Returns
    -------
    list of list of int
        The generated tokens of each prompt, up to and with ``<eos>``.
    """
    tokens = torch.tensor([list(prompt) for prompt in prompts])  # [B, P]
    length = tokens.shape[1]
    cache = _Buffers(length + limit)
    # The cache goes by place: transformers renamed its keyword on the way.
    logits = model(tokens, None, None, cache, use_cache=True).logits
    if drop:
        cache.keep(torch.tensor(sorted(set(range(length)) - set(drop))))
    out: list[Tensor] = []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for step in range(limit):
        token = logits[:, -1].argmax(-1)  # [B]
        out.append(token)
        done |= token == EOS
        if bool(done.all()) or step == limit - 1:
            break
        positions = torch.full((len(prompts), 1), length + step)
        logits = model(token[:, None], None, positions, cache, use_cache=True).logits
    return [_until_end(row) for row in torch.stack(out, dim=1).tolist()]


def _until_end(row: list[int]) -> list[int]:
    return row[: row.index(EOS) + 1] if EOS in row else row


def answer(token_ids: Sequence[int]) -> int | None:
    """The digit that a chain of thought gives as its answer, or None where there is none."""
    found = list(token_ids)
    if _THINK_END not in found:
        return None
    tail = found[found.index(_THINK_END) :]  # </think> the answer is D . <eos>
    digits = encode("0123456789")
    return digits.index(tail[4]) if len(tail) > 4 and tail[4] in digits else None


@dataclass(frozen=True)
class Accuracy:
    """How many problems got the right answer, and how many a chain right in every token."""

    answers: Share
    chains: Share


def accuracy(
    model: PreTrainedModel,
    examples: Sequence[tuple[Problem, Solution]],
    *,
    batch: int = 50,
    without_definitions: bool = False,
) -> Accuracy:
    """Greedy accuracy on problems of one size."""
    answers = chains = 0
    for begin in range(0, len(examples), batch):
        part = examples[begin : begin + batch]
        limit = len(part[0][1].token_ids) + 30
        drop = range(2, 2 + 4 * len(part[0][0].definitions)) if without_definitions else ()
        written = generate(model, [problem.prompt_ids for problem, _ in part], limit, drop)
        for tokens, (_, solution) in zip(written, part, strict=True):
            answers += answer(tokens) == solution.answer
            chains += tuple(tokens) == solution.token_ids
    return Accuracy(Share(answers, len(examples)), Share(chains, len(examples)))


def luck(examples: Sequence[tuple[Problem, Solution]], draws: int = 50, seed: int = 0) -> float:
    """How often the answer is right when the digits of the problem are not known, in [0, 1].

    It is more than one in ten: where a kept total is subtracted, what was wrong before may cancel. Counted by solving
    each problem right, but with ``draws`` random choices of digits.
    """
    rng = random.Random(seed)
    hits = 0
    for problem, solution in examples:
        for _ in range(draws):
            digits = tuple((letter, rng.randrange(10)) for letter, _ in problem.definitions)
            hits += solve(replace(problem, definitions=digits)).answer == solution.answer
    return hits / (draws * len(examples))


@torch.no_grad()
def visibility(model: PreTrainedModel, token_ids: Sequence[int], recalls: Sequence[Recall]) -> Tensor:
    """Share of the non-sink attention that each head puts on the source of each recall.

    Returns
    -------
    Tensor
        [recalls, layers, query heads], in [0, 1]; the best of the sources where there are several.
    """
    model.set_attn_implementation("eager")
    maps = model(input_ids=torch.tensor([list(token_ids)]), output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation("sdpa")
    shares = torch.zeros(len(recalls), len(maps), maps[0].shape[1])
    for depth, layer in enumerate(maps):  # [1, H, L, L]
        for index, recall in enumerate(recalls):
            row = layer[0, :, recall.position - 1].float()  # [H, L]
            rest = row[:, SINKS:].sum(-1).clamp_min(1e-9)
            on = [row[:, max(begin, SINKS) : stop].sum(-1) / rest for begin, stop in recall.sources]
            shares[index, depth] = torch.stack(on).amax(0)
    return shares


def sentences(token_ids: Sequence[int]) -> list[int]:
    """For each position the first position of its sentence; a sentence ends with a full stop."""
    starts, start = [], 0
    for position, token in enumerate(token_ids):
        starts.append(start)
        if token == _FULL_STOP:
            start = position + 1
    return starts


@torch.no_grad()
def long_range_gain(model: LlamaForCausalLM, token_ids: Sequence[int], window: int = 64) -> Tensor:
    """Long-range gain of every token of a sequence.

    The loss of log-probability of a token when the sentence in which it stands, up to the position before it, may not
    look farther back than ``window`` positions. A sentence begins with the row that predicts its first token.

    Returns
    -------
    Tensor
        [L] in nats; 0 for the first token.
    """
    length = len(token_ids)
    starts = torch.tensor(sentences(token_ids))
    # The row of position i predicts token i + 1 and so belongs to that token's sentence.
    owner = torch.cat([starts[1:] - 1, torch.tensor([length])]).clamp_min(0)  # [L], first row of the row's sentence
    row, column = torch.arange(length)[:, None], torch.arange(length)[None]
    causal = column <= row
    own = causal & (column >= owner[:, None])
    past = causal & ~own & ((row - column <= window) | (column < SINKS))
    mask = torch.cat([past, own & (row - column <= window)], dim=1)  # [L, 2L]: keys of the full run, then blinded ones

    inner = model.model
    full = blind = inner.embed_tokens(torch.tensor([list(token_ids)]))  # [1, L, d]
    rotary = inner.rotary_emb(full, torch.arange(length)[None])

    def project(attention: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = (1, length, -1, attention.head_dim)
        query, key, value = (
            layer(hidden).view(split).transpose(1, 2)
            for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
        )  # [1, H, L, D]
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        return query, key, value

    def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(1, length, -1)

    for layer in inner.layers:
        attention = layer.self_attn
        query, key, value = project(attention, layer.input_layernorm(full))
        query_b, key_b, value_b = project(attention, layer.input_layernorm(blind))
        mixed = attend(query, key, value, causal)
        mixed_b = attend(query_b, torch.cat([key, key_b], 2), torch.cat([value, value_b], 2), mask)
        full = full + attention.o_proj(mixed)
        blind = blind + attention.o_proj(mixed_b)
        full = full + layer.mlp(layer.post_attention_layernorm(full))
        blind = blind + layer.mlp(layer.post_attention_layernorm(blind))
    target = torch.tensor(list(token_ids[1:]))[:, None]
    logs = [
        model.lm_head(inner.norm(hidden))[0, :-1].float().log_softmax(-1).gather(1, target) for hidden in (full, blind)
    ]
    return torch.cat([torch.zeros(1), (logs[0] - logs[1])[:, 0]])


@dataclass(frozen=True)
class Labels:
    """How well the labels agree with what the model does."""

    visible: Share
    """Recalls of which some head puts at least 0.8 of its non-sink attention on the source."""
    kinds: dict[str, dict[str, Any]]
    """For each kind of recall the single head that sees most of them, and how many."""
    far_recalls: Share
    """Recalls whose source is out of the window of their whole sentence, with a gain over 1 nat."""
    others: Share
    """Tokens without a label, with a gain over 1 nat."""


def check_labels(
    model: LlamaForCausalLM, examples: Sequence[tuple[Problem, Solution]], *, window: int = 64, gain: float = 1.0
) -> Labels:
    """Compare the labels of right chains with attention and with the long-range gain."""
    shares: list[Tensor] = []
    kinds: list[str] = []
    far_hit = far = other_hit = other = 0
    for problem, solution in examples:
        tokens = [*problem.prompt_ids, *solution.token_ids]
        shares.append(visibility(model, tokens, solution.recalls))
        kinds += [recall.kind for recall in solution.recalls]
        gains = long_range_gain(model, tokens, window)
        starts = sentences(tokens)
        labelled = {recall.position for recall in solution.recalls}
        for recall in solution.recalls:
            if all(stop - 1 < starts[recall.position] - 1 - window for _, stop in recall.sources):
                far += 1
                far_hit += bool(gains[recall.position] > gain)
        for position in range(len(problem.prompt_ids), len(tokens)):
            if position not in labelled:
                other += 1
                other_hit += bool(gains[position] > gain)
    table = torch.cat(shares)  # [recalls, layers, heads]
    best = table.flatten(1).amax(1)
    by_kind: dict[str, dict[str, Any]] = {}
    for kind in _KINDS:
        chosen = table[torch.tensor([found == kind for found in kinds])]
        seen = (chosen >= 0.8).float().mean(0)  # [layers, heads]
        top = int(seen.argmax())
        by_kind[kind] = {
            "layer": top // seen.shape[1],
            "head": top % seen.shape[1],
            "share": round(float(seen.max()), 4),
            "median_mass": round(float(chosen.flatten(1)[:, top].median()), 4),
        }
    return Labels(Share(int((best >= 0.8).sum()), len(best)), by_kind, Share(far_hit, far), Share(other_hit, other))


def evaluate(folder: Path, sizes: Sequence[str], count: int, control: int, traces: int, seed: int) -> dict[str, Any]:
    """Measure everything at the named sizes and give it back as plain values."""
    model = load_model(folder)
    result: dict[str, Any] = {"seed": seed, "sizes": {}}
    for index, name in enumerate(sizes):
        size = SIZES[name]
        examples = fresh(size, count, seed + index)
        greedy = accuracy(model, examples)
        dropped = accuracy(model, examples[:control], without_definitions=True)
        half = accuracy(load_model(folder, torch.bfloat16), examples[: control // 2])
        few = examples[: min(4, count)]
        limit = size.trace_length + 30
        batched = generate(model, [problem.prompt_ids for problem, _ in few], limit)
        single = [generate(model, [problem.prompt_ids], limit)[0] for problem, _ in few]
        labels = check_labels(model, examples[:traces])
        result["sizes"][name] = {
            "prompt_tokens": size.prompt_length,
            "trace_tokens": size.trace_length,
            "answers_right": greedy.answers.summary(),
            "chains_right": greedy.chains.summary(),
            "answers_right_without_definitions": dropped.answers.summary(),
            "luck_without_definitions": round(luck(examples[:control]), 4),
            "answers_right_in_bfloat16": half.answers.summary(),
            "single_equals_batch": Share(sum(a == b for a, b in zip(batched, single, strict=True)), len(few)).summary(),
            "recalls_visible_in_some_head": labels.visible.summary(),
            "best_head_by_kind": labels.kinds,
            "far_recalls_with_gain": labels.far_recalls.summary(),
            "other_tokens_with_gain": labels.others.summary(),
        }
    return result


def main() -> None:
    """Read the options, measure, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="folder of the model")
    parser.add_argument("--sizes", default=",".join(SIZES), help="comma-separated names of sizes")
    parser.add_argument("--problems", type=int, default=500, help="problems per size")
    parser.add_argument("--control", type=int, default=200, help="of these, for the control; half as many for bfloat16")
    parser.add_argument("--traces", type=int, default=20, help="of these, for visibility and causality")
    parser.add_argument("--seed", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="write the JSON to a file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = options.sizes.split(",")
    result = evaluate(options.model, sizes, options.problems, options.control, options.traces, options.seed)
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
