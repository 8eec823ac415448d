"""Decoding with a compressed cache: tokens a second and memory, against the full cache, the limit and the peers.

    python benchmarks/decoding.py                         # length to budget 16:1, batches of 1 and 8; some ten minutes
    python benchmarks/decoding.py --lengths 4096 --batches 8 --rounds 5
    python benchmarks/decoding.py --lengths 16384 --batches 8 --contenders "fixed buffer" --rounds 25
    python benchmarks/decoding.py --quick                 # a tiny shape, to keep the script alive

The model has random weights in a shape of Qwen3's, a ninth of Qwen3-4B's depth and a quarter of its width (4 layers,
hidden 640, 8 query heads on 2 KV heads of 128, vocabulary 1,024). What is compared:

- *full*: transformers' ``DynamicCache``. Its time for a generation of L tokens is measured at eight lengths, the
  middles of eight equal parts of L, with that many random entries put into the cache; tokens a second are those of the
  whole way.
- *beaconscope*: ``BeaconCache`` of budget B, compressed every I tokens; measured over I steps, of which one compresses.
  What it costs does not depend on how long the text is.
- *fixed buffer*: B + I slots that are overwritten in turn, all of them attended to, no policy: the limit.
- *sliding*: transformers' own sliding-window layers, with a window of B + I.
- *static*: transformers' ``StaticCache`` of L slots.
- *kvpress*: ``DecodingPress(SnapKVPress)`` with the same budget and interval, where kvpress is installed (it needs
  transformers below 5.3, so an environment of its own: ``make bench-peers``).

The contenders take turns, and each figure is the median over the rounds; ratios are those of one round. Caches whose
cost does not hang on the length are filled once and go on from turn to turn. Peak memory is that of a process of its
own per contender: its highest resident size at the end of the generation less that of the loaded model.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

from beaconscope.kv import BeaconCache
from beaconscope.models.compat import cache_argument
from benchmarks.memory import peak_bytes

SHAPES: dict[str, dict[str, int]] = {
    "scaled": {
        "hidden_size": 640, "intermediate_size": 2432, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 1024,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    },
}  # fmt: skip
PARTS = 8
"""Lengths at which the full cache is measured."""


@dataclass(frozen=True)
class Case:
    """A text of ``length`` tokens, ``batch`` times, with ``budget`` entries of each head."""

    length: int
    batch: int
    budget: int
    interval: int


class FixedBuffer(DynamicCache):
    """Slots that are overwritten in turn and all attended to."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.seen: list[int] = []
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        if layer_idx == len(self.held):
            batch, heads, _length, size = key_states.shape
            room = (batch, heads, self.slots, size)
            self.held.append((key_states.new_zeros(room), value_states.new_zeros(room)))
            self.seen.append(0)
        keys, values = self.held[layer_idx]
        count = key_states.shape[2]
        begin = self.seen[layer_idx] % self.slots
        keys[:, :, begin : begin + count], values[:, :, begin : begin + count] = key_states, value_states
        self.seen[layer_idx] += count
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.slots - 1 if self.held else 0

    def get_mask_sizes(self, query: Any, layer_idx: int) -> tuple[int, int]:
        return self.slots, 0


@functools.lru_cache
def make_model(shape: str, window: int | None = None, *, user: str = "") -> Qwen3ForCausalLM:
    """A model with random weights, the same ones each time; with ``window`` all of its layers slide.

    Who changes a model that it is used with, as BeaconCache and kvpress do, is a ``user`` with a model of its own.
    """
    torch.manual_seed(0)
    sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=65536, tie_word_embeddings=True, **sliding)
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config).eval()


class Decoding:
    """A model that decodes one token after another with a cache."""

    def __init__(self, model: Qwen3ForCausalLM, cache: Any, case: Case) -> None:
        self.model, self.cache, self.case = model, cache, case
        self.argument = {cache_argument(model): cache}
        self.token = torch.zeros(case.batch, 1, dtype=torch.long)
        self.position = 0

    def feed(self, tokens: int) -> None:
        """A prompt of random tokens, in pieces, so that its activations take little memory."""
        ids = torch.randint(self.model.config.vocab_size, (self.case.batch, tokens))
        for piece in ids.split(64, dim=1):
            positions = torch.arange(self.position, self.position + piece.shape[1])[None]
            self.model(piece, position_ids=positions, use_cache=True, logits_to_keep=1, **self.argument)
            self.position += piece.shape[1]

    def fill(self, tokens: int) -> None:
        """Random entries, where a cache takes them as they are."""
        config = self.model.config
        shape = (self.case.batch, config.num_key_value_heads, tokens, config.head_dim)
        for layer in range(config.num_hidden_layers):
            entries = torch.randn(shape)
            self.cache.update(entries, entries.clone(), layer)
        self.position = tokens

    def steps(self, count: int) -> float:
        """Seconds of so many steps."""
        begin = time.perf_counter()
        for _ in range(count):
            positions = torch.full((1, 1), self.position)
            logits = self.model(self.token, position_ids=positions, use_cache=True, **self.argument).logits
            self.token = logits[:, -1:].argmax(-1)
            self.position += 1
        return time.perf_counter() - begin

    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        if isinstance(self.cache, BeaconCache):
            return self.cache.nbytes
        layers = [(layer.keys, layer.values) for layer in self.cache.layers] if self.cache.layers else []
        layers = self.cache.held if isinstance(self.cache, FixedBuffer) else layers
        return sum(part.numel() * part.element_size() for pair in layers for part in pair)


Contender = Callable[[Case, str], contextlib.AbstractContextManager[Decoding]]


def steady(
    make: Callable[[Qwen3ForCausalLM, Case], Any], *, sliding: bool = False, user: str = "", fills: bool = True
) -> Contender:
    """A cache whose cost does not hang on the length, filled by a prompt; it is full two steps on if it ``fills``."""

    @contextlib.contextmanager
    def contender(case: Case, shape: str) -> Iterator[Decoding]:
        model = make_model(shape, case.budget + case.interval if sliding else None, user=user)
        decoding = Decoding(model, make(model, case), case)
        decoding.feed(case.budget + case.interval - 2 if fills else case.budget)
        decoding.steps(3)  # until it is full, and once compressed
        yield decoding

    return contender


@contextlib.contextmanager
def kvpress(case: Case, shape: str) -> Iterator[Decoding]:
    from kvpress import DecodingPress, SnapKVPress

    model = make_model(shape, user="kvpress")
    press = DecodingPress(
        base_press=SnapKVPress(window_size=32),
        compression_interval=case.interval,
        target_size=case.budget,
        hidden_states_buffer_size=32,
    )
    with press(model):
        decoding = Decoding(model, DynamicCache(), case)
        decoding.feed(case.budget)
        decoding.steps(case.interval + 1)
        yield decoding


@contextlib.contextmanager
def growing(case: Case, shape: str) -> Iterator[Decoding]:
    model = make_model(shape)
    yield Decoding(model, DynamicCache(), case)


STEADY: dict[str, Contender] = {
    "beaconscope": steady(
        lambda model, case: BeaconCache(model, budget=case.budget, interval=case.interval), user="beaconscope"
    ),
    "fixed buffer": steady(lambda _, case: FixedBuffer(case.budget + case.interval)),
    "sliding": steady(lambda model, _: DynamicCache(config=model.config), sliding=True),
    # All of its slots are attended to from the start.
    "static": steady(lambda model, case: StaticCache(config=model.config, max_cache_len=case.length), fills=False),
}
if importlib.util.find_spec("kvpress"):
    STEADY["kvpress"] = kvpress


def with_beacons(count: int) -> Contender:
    """BeaconCache with another number of beacons."""
    return steady(
        lambda model, case: BeaconCache(model, budget=case.budget, interval=case.interval, beacons=count),
        user=f"beaconscope, K = {count}",
    )


def full_seconds_a_step(case: Case, shape: str, steps: int) -> float:
    """Mean seconds of a step of the full cache over a whole generation."""
    means = []
    for part in range(PARTS):
        with growing(case, shape) as decoding:
            decoding.fill(case.length * (2 * part + 1) // (2 * PARTS))
            decoding.steps(2)
            means.append(decoding.steps(steps) / steps)
    return statistics.fmean(means)


def full_bytes(case: Case, shape: str) -> int:
    """Bytes of the full cache's keys and values at the end."""
    config = SHAPES[shape]
    entry = 2 * config["num_key_value_heads"] * config["head_dim"] * 4 * config["num_hidden_layers"]
    return case.length * case.batch * entry


@torch.inference_mode()
def peak_memory(name: str, case: Case, shape: str) -> int:
    """Bytes by which the process grew at most, in this process."""
    make_model(shape)(torch.zeros(case.batch, 2, dtype=torch.long))
    before = peak_bytes()
    if name == "full":
        with growing(case, shape) as decoding:
            decoding.fill(case.length - 4)
            decoding.steps(4)
    else:
        with STEADY[name](case, shape) as decoding:
            decoding.steps(4 if name == "static" else case.interval)
    return peak_bytes() - before


def peak_memory_apart(name: str, case: Case, shape: str) -> int:
    """The same, measured in a process of its own."""
    sizes = f"{case.length},{case.batch},{case.budget},{case.interval}"
    command = [sys.executable, __file__, "--shape", shape, "--peak-memory-of", name, sizes]
    if " K = " in name:
        command += ["--beacons", name.split()[-1]]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


@torch.inference_mode()
def measure(
    case: Case, shape: str, names: Sequence[str], rounds: int, full_steps: int, memory_of: Sequence[str]
) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in names}
    held = {"full": full_bytes(case, shape)}
    with contextlib.ExitStack() as stack:
        torch.manual_seed(1)
        steadies = {name: stack.enter_context(STEADY[name](case, shape)) for name in names if name != "full"}
        for turn in range(rounds):
            start = turn % len(names)
            for name in [*names[start:], *names[:start]]:
                if name == "full":
                    seconds[name].append(full_seconds_a_step(case, shape, full_steps))
                    continue
                # A static cache is as slow at every step, and has an end.
                steps = full_steps if name == "static" else case.interval
                seconds[name].append(steadies[name].steps(steps) / steps)
        held |= {name: decoding.nbytes() for name, decoding in steadies.items()}
    rows = []
    for name in names:
        took = statistics.median(seconds[name])
        ours = [other / own for other, own in zip(seconds[name], seconds["beaconscope"], strict=True)]
        rows.append(
            {
                "contender": name,
                **vars(case),
                "tokens_per_second": case.batch / took,
                "seconds_a_step": seconds[name],
                "beaconscope_is_faster": statistics.median(ours),
                "kv_bytes": held[name],
                "peak_bytes": peak_memory_apart(name, case, shape) if name in memory_of else math.nan,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    case = rows[0]
    print(f"\n{case['length']} tokens, batch {case['batch']}, budget {case['budget']}, interval {case['interval']}\n")
    print("| cache | tokens/s | BeaconScope is faster by | keys and values, MB | peak memory over the model, MB |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['contender']} | {row['tokens_per_second']:.1f} | {row['beaconscope_is_faster']:.2f} | "
            f"{row['kv_bytes'] / 1e6:.1f} | {row['peak_bytes'] / 1e6:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--shape", choices=list(SHAPES), default="scaled")
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--ratio", type=int, default=16, help="of length to budget")
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contenders", default="", help="compare with these alone, such as 'full,fixed buffer'")
    parser.add_argument("--beacons", default="", help="compare these numbers of beacons too, such as 0,64,256")
    parser.add_argument("--full-steps", type=int, default=8, help="steps of the full cache at each of its lengths")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--peak-memory-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    counts = [int(count) for count in args.beacons.split(",") if count]
    other_beacons = {f"beaconscope, K = {count}": with_beacons(count) for count in counts}
    STEADY.update(other_beacons)
    if args.peak_memory_of:
        name, sizes = args.peak_memory_of
        print(peak_memory(name, Case(*map(int, sizes.split(","))), args.shape))
        return
    if args.quick:
        args.shape, args.lengths, args.batches, args.interval, args.rounds, args.full_steps = (
            "tiny",
            "512",
            "2",
            16,
            1,
            2,
        )
    # Each takes a process that has to import everything anew.
    memory_of = ["beaconscope"] if args.quick else ["full", *STEADY]
    known = ["full", *STEADY]
    chosen = ["beaconscope", *args.contenders.split(","), *other_beacons] if args.contenders else known
    if unknown := set(chosen) - set(known):
        parser.error(f"{min(unknown)} is none of {', '.join(known)}")
    figures: dict[str, Any] = {
        "shape": args.shape,
        "threads": args.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_before": os.getloadavg()[0],
        "rows": [],
    }
    for length in map(int, args.lengths.split(",")):
        for batch in map(int, args.batches.split(",")):
            case = Case(length, batch, length // args.ratio, args.interval)
            rows = measure(case, args.shape, chosen, args.rounds, args.full_steps, memory_of)
            figures["rows"] += rows
            show(rows)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
