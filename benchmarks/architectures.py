"""Every causal architecture of the installed transformers, tiny and random: right, refused by name, or wrong.

    python benchmarks/architectures.py                                  # all of them
    python benchmarks/architectures.py --only llama,phi3 --json out.json    # those whose name has one of these parts
    python benchmarks/architectures.py --list                           # what would be tried

Each architecture is built from its config, as it is and with windows, chunks, shared keys and other rotary embeddings
switched on; ``testing/architectures`` says how, and what is checked. Ends with 1 where a number is wrong or an
exception escapes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path

# At the end, so that PYTHONPATH can name another BeaconScope to be tried.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import transformers

import beaconscope
from testing.architectures.configs import architectures
from testing.architectures.examine import TRACEBACK, WRONG
from testing.architectures.sweep import sweep
from testing.architectures.variants import variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="architectures whose name has one of these parts, with commas; =NAME is exact")
    parser.add_argument("--variant", help="variants whose name has this part")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--list", action="store_true", help="print what would be tried")
    options = parser.parse_args()
    parts = (options.only or "").split(",")
    names = [name for name in architectures() if any(_named(name, part) for part in parts)]
    if options.list:
        for name in names:
            with contextlib.suppress(Exception):
                print(name, "|", "; ".join(variants(name)))
        return
    print(f"transformers {transformers.__version__}, {beaconscope.__file__}", flush=True)
    started = time.monotonic()
    results = []
    for result in sweep(
        names, options.workers, None if options.variant is None else lambda name: options.variant in name
    ):
        results.append(result)
        print(f"{result.status:20} {result.architecture} [{result.variant}] {' | '.join(result.details)}", flush=True)
    order = {name: number for number, name in enumerate(names)}
    results.sort(key=lambda result: order[result.architecture])
    if options.json:
        rows = [dataclasses.asdict(result) for result in results]
        text = json.dumps({"transformers": transformers.__version__, "results": rows}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    counts = collections.Counter(result.status for result in results)
    print(", ".join(f"{count} {status}" for status, count in counts.items()), f"in {time.monotonic() - started:.0f} s")
    if counts[WRONG] or counts[TRACEBACK]:
        sys.exit(1)


def _named(name: str, part: str) -> bool:
    return name == part[1:] if part.startswith("=") else part in name


if __name__ == "__main__":
    main()
