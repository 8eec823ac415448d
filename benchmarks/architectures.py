"""Every causal architecture of the installed transformers, tiny and random: right, refused by name, or wrong.

    python benchmarks/architectures.py                                      # all of them
    python benchmarks/architectures.py --quick                              # six, to keep the script alive
    python benchmarks/architectures.py --only llama,=phi3 --variant window  # names with a part, or one exactly
    python benchmarks/architectures.py --json FILE                          # keep the results
    python benchmarks/architectures.py --docs                               # keep them in benchmarks/, write the page
    python benchmarks/architectures.py --check                              # compare with what is kept
    python benchmarks/architectures.py --list                               # what would be tried

Each architecture is built from its config, as it is and with windows, chunks, shared keys and other rotary embeddings
switched on, and every number of its traces is compared with what transformers alone computes; testing/architectures
says how. Ends with 1 where a number is wrong, an exception escapes, or a result is not the one that is kept. Another
BeaconScope is tried with PYTHONPATH=FOLDER.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from pathlib import Path

# At the end, so that PYTHONPATH can name another BeaconScope to be tried.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import transformers

import beaconscope
from testing.architectures.configs import architectures
from testing.architectures.page import PAGE, page
from testing.architectures.results import FILE, TRACEBACK, WRONG, Result, load, save
from testing.architectures.sweep import sweep, tried
from testing.architectures.variants import AS_IT_IS

QUICK = ("=llama", "=gemma3_text", "=mistral", "=gpt2", "=bert", "=mamba")


def main() -> None:
    options = parse()
    names = [name for name in architectures() if any(fits(name, part) for part in options.only.split(","))]
    if options.list:
        for name in names:
            print(f"{name}: {', '.join(tried(name))}")
        return
    print(f"transformers {transformers.__version__}, {beaconscope.__file__}", flush=True)
    started = time.monotonic()
    results = []
    for result in sweep(names, options.workers, lambda name, variant: options.variant in variant):
        results.append(result)
        print(f"{result.status:20} {result.architecture} [{result.variant}] {' | '.join(result.details)}", flush=True)
    order = {name: number for number, name in enumerate(names)}
    results.sort(key=lambda result: order[result.architecture])
    counts = collections.Counter(result.status for result in results)
    print(", ".join(f"{count} {status}" for status, count in counts.items()), f"in {time.monotonic() - started:.0f} s")
    for path in [options.json] * bool(options.json) + [FILE] * options.docs:
        save(path, transformers.__version__, results)
    if options.docs:
        PAGE.write_text(page(*load()), encoding="utf-8")
    changed = differences(results) if options.check else []
    for line in changed:
        print(line)
    if counts[WRONG] or counts[TRACEBACK] or changed:
        sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="architectures with one of these parts in their name; =NAME is exact"
    )
    parser.add_argument("--variant", default="", help="variants with this part in their name")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--docs", action="store_true", help=f"write {FILE.name} and docs/{PAGE.name}")
    parser.add_argument("--check", action="store_true", help=f"compare with {FILE.name}")
    parser.add_argument("--list", action="store_true", help="print what would be tried")
    parser.add_argument("--quick", action="store_true", help="six architectures, as their configs have them")
    options = parser.parse_args()
    if options.docs and (options.only or options.variant or options.quick):
        parser.error("the page is of all architectures; leave out --only, --variant and --quick")
    if options.quick:
        options.only, options.variant = ",".join(QUICK), AS_IT_IS
    return options


def fits(name: str, part: str) -> bool:
    """Whether an architecture is meant by a part of its name, or by all of it after an equals sign."""
    return name == part[1:] if part.startswith("=") else part in name


def differences(results: list[Result]) -> list[str]:
    """Results that are not the ones that are kept, a line each."""
    version, kept = load()
    known = {(each.architecture, each.variant): each for each in kept}
    lines = [] if version == transformers.__version__ else [f"{FILE.name} is of transformers {version}"]
    for each in results:
        before = known.get((each.architecture, each.variant))
        if each != before:
            lines.append(f"{each.architecture} [{each.variant}] was {before and (before.status, before.details)}")
    return lines


if __name__ == "__main__":
    main()
