"""What an analysis costs: seconds of processor time per token squared, and peak memory.

    python benchmarks/analyze.py              # one layer of 2 KV heads x 4 query heads of size 128, 2 K to 16 K tokens
    python benchmarks/analyze.py --whole      # 6 layers x 8 KV heads at 8 K tokens: may take two minutes and 4 GB
    python benchmarks/analyze.py --shipped    # traces/smollm2-balcony.parquet at the default options
    python benchmarks/analyze.py --quick      # 512 and 1024 tokens, to keep the script alive

Clusters cost about the same at every length, so the first measures without them. Every analysis is made in a process
of its own, so that its peak of memory is its own; a trace is made in another.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.growth import exponent
from benchmarks.memory import peak_bytes
from tests.analyze.made import Plan, plant

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Run:
    """A trace to make and how to analyze it."""

    length: int
    layers: int = 1
    kv_heads: int = 2
    clusters: int = 0
    """Query heads whose queries are clustered."""

    @property
    def plan(self) -> Plan:
        return Plan(
            length=self.length, layers=self.layers, kv_heads=self.kv_heads, group=4, size=128, revisiting=3, strength=16
        )


def analyzed(path: Path, clusters: int, jobs: int | None) -> dict[str, Any]:
    """Analyze a trace in this process."""
    import beaconscope
    from beaconscope import AnalyzeOptions
    from beaconscope.analyze import analyze

    trace = beaconscope.load_trace(path)
    wall, processor = time.perf_counter(), time.process_time()
    analysis = analyze(trace, AnalyzeOptions(cluster_heads=clusters), jobs=jobs)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    query_heads = analysis.summary["heads"]
    return {
        "tokens": trace.length,
        "query_heads": query_heads,
        "clustered_heads": clusters,
        "revisits": analysis.summary["revisits"],
        "seconds": wall,
        "processor_seconds": processor,
        "nanoseconds_per_head_and_token_squared": 1e9 * processor / (query_heads * trace.length**2),
        "peak_gigabytes": peak_bytes() / 1e9,
    }


def alone(function: Any, *arguments: Any) -> Any:
    """Call a function in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def make(path: Path, plan: Plan) -> None:
    plant(path, plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--quick", action="store_true")
    kinds.add_argument("--whole", action="store_true")
    kinds.add_argument("--shipped", action="store_true")
    parser.add_argument("--jobs", type=int, help="heads side by side; one for each core by default")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    default_clusters = 6
    if args.whole:
        runs = [Run(8192, 6, 8, default_clusters)]
    elif args.quick:
        runs = [Run(512), Run(1024)]
    else:
        runs = [Run(length) for length in (2048, 4096, 8192, 16384)]
    figures = []

    def show(row: dict[str, Any]) -> None:
        figures.append(row)
        print(
            f"{row['tokens']:>6} tokens, {row['query_heads']:>3} query heads, {row['clustered_heads']} clustered: "
            f"{row['seconds']:.1f} s, {row['processor_seconds']:.1f} s of processor time, "
            f"{row['nanoseconds_per_head_and_token_squared']:.2f} ns per query head and token^2, "
            f"peak {row['peak_gigabytes']:.2f} GB, {row['revisits']} revisits",
            flush=True,
        )

    if args.shipped:
        show(alone(analyzed, ROOT / "traces" / "smollm2-balcony.parquet", default_clusters, args.jobs))
    else:
        with tempfile.TemporaryDirectory() as name:
            for run in runs:
                path = Path(name) / f"{run.length}.parquet"
                alone(make, path, run.plan)
                show(alone(analyzed, path, run.clusters, args.jobs))
                path.unlink()
    if len(figures) > 1:
        growth = exponent([row["tokens"] for row in figures], [row["processor_seconds"] for row in figures])
        print(f"processor time grows with the length to the power of {growth:.2f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
