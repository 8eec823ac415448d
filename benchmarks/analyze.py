"""What an analysis costs: seconds of processor time per token squared, and peak memory.

    python benchmarks/analyze.py              # one layer of 2 KV heads x 4 query heads of size 128, 2 K to 16 K tokens
    python benchmarks/analyze.py --quick      # 512 tokens, to keep the script alive
    python benchmarks/analyze.py --whole      # 6 layers x 8 KV heads at 8 K tokens, the size that must take two minutes

Clusters cost the same at every length and are measured apart.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import beaconscope
from beaconscope import AnalyzeOptions
from tests.analyze.made import Plan, plant


def measure(length: int, layers: int, kv_heads: int, folder: Path, clusters: int) -> dict[str, Any]:
    plan = Plan(length=length, layers=layers, kv_heads=kv_heads, group=4, size=128, revisiting=3)
    trace = beaconscope.load_trace(plant(folder / f"{length}.parquet", plan).path)
    wall, processor = time.perf_counter(), time.process_time()
    analysis = beaconscope.analyze(trace, AnalyzeOptions(cluster_heads=clusters))
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    trace.path.unlink()
    pairs = layers * kv_heads * plan.group * length * length
    return {
        "tokens": length,
        "query_heads": layers * kv_heads * plan.group,
        "clustered_heads": clusters,
        "seconds": wall,
        "processor_seconds": processor,
        "nanoseconds_per_head_and_token_squared": 1e9 * processor / pairs,
        "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "revisits": analysis.summary["revisits"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    if args.whole:
        runs = [(8192, 6, 8, 8)]
    elif args.quick:
        runs = [(512, 1, 1, 1)]
    else:
        # Short ones first, since the peak of memory is that of the process so far.
        runs = [(length, 1, 2, 0) for length in (2048, 4096, 8192, 16384)] + [(2048, 1, 2, 8)]
    figures = []
    with tempfile.TemporaryDirectory() as name:
        for length, layers, kv_heads, clusters in runs:
            figures.append(measure(length, layers, kv_heads, Path(name), clusters))
            row = figures[-1]
            print(
                f"{row['tokens']:>6} tokens, {row['query_heads']:>3} query heads, {clusters} clustered: "
                f"{row['seconds']:.1f} s, {row['processor_seconds']:.1f} s of processor time, "
                f"{row['nanoseconds_per_head_and_token_squared']:.2f} ns per query head and token^2, "
                f"peak {row['peak_gigabytes']:.2f} GB",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
