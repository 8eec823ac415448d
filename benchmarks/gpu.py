"""The paper's headline on a GPU: Qwen3-4B's shape, batch 16, 32 K generated tokens, a budget of 2 K.

    python benchmarks/gpu.py             # needs a CUDA device of 96 GB or more; some five minutes, no network
    python benchmarks/gpu.py --batch 4   # for a smaller one
    python benchmarks/gpu.py --quick     # a tiny shape on the CPU, to keep the script alive

Weights are random, in bfloat16. The length is reached by filling, not by generating: the full cache is filled with
random entries at eight lengths, the middles of eight equal parts of the way, and once at its end for its peak memory;
BeaconCache reads a prompt of B tokens, and is measured over 2 I steps with both compressions, as what it costs does not
depend on the length. Printed, and written as JSON:

1. peak memory of the device and tokens a second of both, and their ratios, beside the paper's 77.0 -> 13.3 GB and
   82.3 -> 356.4 tokens/s;
2. a profile of a step and of a step with a compression: kernels, time of the device and of the host;
3. how often a step makes the host wait for the device (must be 0 where nothing is compressed);
4. correctness: kept sets of a small float32 model on this device against the CPU's, as the smallest Jaccard index over
   layers, heads and compressions (must be at least 0.999).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from beaconscope.kv import BeaconCache
from beaconscope.models.compat import cache_argument

PAPER = {"full_gb": 77.0, "beacon_gb": 13.3, "full_tokens_per_second": 82.3, "beacon_tokens_per_second": 356.4}
QWEN3_4B = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
}  # fmt: skip
PARTS = 8


class Bench:
    """A model on a device, and the clock and memory of that device."""

    def __init__(self, shape: dict[str, int], device: torch.device, dtype: torch.dtype, batch: int) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(**shape, max_position_embeddings=65536, tie_word_embeddings=True)
        config._attn_implementation = "sdpa"
        with torch.device(device):
            self.model = Qwen3ForCausalLM(config).to(dtype).eval()
        self.device, self.batch = device, batch
        self.cuda = device.type == "cuda"
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = 0

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gb(self) -> float:
        return torch.cuda.max_memory_allocated() / 1e9 if self.cuda else 0.0

    def filled(self, length: int) -> DynamicCache:
        """A full cache with random entries."""
        config = self.model.config
        cache = DynamicCache()
        shape = (self.batch, config.num_key_value_heads, length, config.head_dim)
        for layer in range(config.num_hidden_layers):
            entries = torch.randn(shape, dtype=self.model.dtype, device=self.device)
            cache.update(entries, entries.clone(), layer)
        self.position = length
        return cache

    def read(self, cache: Any, tokens: int) -> None:
        """A prompt of random tokens."""
        ids = torch.randint(self.model.config.vocab_size, (self.batch, tokens), device=self.device)
        self.model(ids, use_cache=True, logits_to_keep=1, **{cache_argument(self.model): cache})
        self.position = tokens

    def step(self, cache: Any) -> None:
        positions = torch.full((1, 1), self.position, device=self.device)
        given = {cache_argument(self.model): cache}
        logits = self.model(self.token, position_ids=positions, use_cache=True, **given).logits
        self.token = logits[:, -1:].argmax(-1)
        self.position += 1

    def seconds(self, cache: Any, count: int) -> float:
        """Mean seconds of a step."""
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            self.step(cache)
        self.synchronize()
        return (time.perf_counter() - begin) / count

    def profile(self, run: Callable[[], None]) -> dict[str, float]:
        """Kernels and milliseconds of a piece of work."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            begin = time.perf_counter()
            run()
            self.synchronize()
            took = time.perf_counter() - begin
        on_device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return {
            "kernels": len(on_device),
            "device_ms": sum(event.time_range.elapsed_us() for event in on_device) / 1e3,
            "wall_ms": 1e3 * took,
        }

    def waits(self, run: Callable[[], None]) -> int:
        """How often a piece of work makes the host wait for the device."""
        if not self.cuda:
            return 0
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in said)


def full_cache(bench: Bench, length: int, steps: int) -> dict[str, Any]:
    means = []
    for part in range(PARTS):
        at = length * (2 * part + 1) // (2 * PARTS)
        cache = bench.filled(at)
        bench.seconds(cache, 2)
        means.append(bench.seconds(cache, steps))
        del cache
    bench.reset_peak()
    cache = bench.filled(length - 2)
    bench.seconds(cache, 2)
    return {
        "tokens_per_second": bench.batch / statistics.fmean(means),
        "peak_gb": bench.peak_gb(),
        "step": bench.profile(lambda: bench.step(cache)),
    }


def beacon_cache(bench: Bench, budget: int, interval: int) -> dict[str, Any]:
    bench.reset_peak()
    cache = BeaconCache(bench.model, budget=budget, interval=interval)
    bench.read(cache, budget)
    bench.seconds(cache, interval + 1)
    mean = bench.seconds(cache, 2 * interval)
    # A step without a compression, and the one in which the next comes.
    bench.seconds(cache, cache.room() % interval)
    step = bench.profile(lambda: bench.step(cache))
    waits = bench.waits(lambda: bench.step(cache))
    bench.seconds(cache, cache.room() - 1)
    return {
        "tokens_per_second": bench.batch / mean,
        "peak_gb": bench.peak_gb(),
        "kv_gb": cache.nbytes / 1e9,
        "step": step,
        "waits_a_step": waits,
        "two_steps_with_a_compression": bench.profile(lambda: bench.seconds(cache, 2)),
    }


def smallest_jaccard(device: torch.device, steps: int = 300) -> float:
    """Kept sets of a small model on this device against the CPU's."""
    ids = torch.randint(TINY["vocab_size"], (1, steps), generator=torch.Generator().manual_seed(0))
    kept: list[list[set[int]]] = []
    weights: Any = None
    for place in (torch.device("cpu"), device):
        bench = Bench(TINY, place, torch.float32, 1)
        weights = weights or bench.model.state_dict()
        bench.model.load_state_dict(weights)
        cache = BeaconCache(bench.model, budget=48, interval=16, beacons=8, recent=8)
        sets = []
        for begin, stop in [(0, 100), *((at, at + 1) for at in range(100, steps))]:
            bench.model(ids[:, begin:stop].to(place), use_cache=True, **{cache_argument(bench.model): cache})
            for layer in range(TINY["num_hidden_layers"]):
                sets += [set(row) for row in cache.kept_positions(layer).tolist()]
        kept.append(sets)
    return min(len(a & b) / len(a | b) for a, b in zip(*kept, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16, help="of the full cache at each of its lengths")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    device = torch.device(args.device)
    shape, dtype = QWEN3_4B, torch.bfloat16
    if args.quick:
        shape, dtype = TINY, torch.float32
        args.batch, args.length, args.budget, args.interval, args.steps = 2, 256, 32, 8, 2
    elif device.type == "cpu":
        parser.error("Qwen3-4B's shape needs a CUDA device; there is none. --quick runs a tiny shape on the CPU")
    with torch.inference_mode():
        figures: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            **{name: getattr(args, name) for name in ("batch", "length", "budget", "interval")},
            "smallest_jaccard": smallest_jaccard(device),
        }
        bench = Bench(shape, device, dtype, args.batch)
        figures["beacon"] = beacon_cache(bench, args.budget, args.interval)
        del bench  # BeaconCache taps its model; the full cache gets a plain one.
        bench = Bench(shape, device, dtype, args.batch)
        figures["full"] = full_cache(bench, args.length, args.steps)
    full, beacon = figures["full"], figures["beacon"]
    figures["faster_by"] = beacon["tokens_per_second"] / full["tokens_per_second"]
    figures["smaller_by"] = full["peak_gb"] / beacon["peak_gb"] if beacon["peak_gb"] else None
    figures["paper"] = PAPER
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if figures["smallest_jaccard"] < 0.999 or beacon["waits_a_step"]:
        raise SystemExit("the kept sets differ from the CPU's, or a step waits for the device")


if __name__ == "__main__":
    main()
