"""What a replay costs.

``python benchmarks/replay.py``: many settings against one, and one pass against the matrix product that it needs, in
seconds of the processor, one thread, so that a busy machine does not count. ``--quick`` does it on 2 K tokens.

``python benchmarks/replay.py --sweep``: a trace of 16 K tokens and 48 KV heads under 40 settings, in two processes,
from file to result: seconds of the clock, and the most memory that both took together.

``python benchmarks/replay.py --curve``: how the cost grows with the length.

``python benchmarks/replay.py --cost``: what 1, 1,000 and 1,000,000 traces of 32 K tokens cost, from what a head costs
here at 2 K and 4 K tokens; ``--write docs/scale.md`` puts it there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import psutil
import torch

from beaconscope import load_trace
from beaconscope.attention.rotary import Rotary
from beaconscope.attention.spec import AttentionSpec
from beaconscope.kv.policies import BeaconKV, ExpectedAttention, KeyDiff, Knorm, Policy, RandomEviction, SnapKV
from beaconscope.replay import LayerData, MeasureOptions, make_jobs, measure_head, sweep
from beaconscope.replay.simulate import timed_simulation
from beaconscope.trace import HeadBlock, Journal, LayerLayout, TokenBlock, TraceLayout, estimate_bytes
from benchmarks.growth import exponent

LAYERS, HEADS, PROMPT = 2, 4, 200


class Shape(NamedTuple):
    """Query heads in the group of a KV head, and the size of each."""

    group: int
    size: int

    def __str__(self) -> str:
        return f"{self.group} query heads of {self.size}"


SHAPES = {"large": Shape(4, 128), "small": Shape(2, 64)}
"""Qwen3-4B, Qwen3-8B and DeepSeek-R1-Distill-Llama-8B have the large one; models for trials have small ones."""


def made_layer(length: int, layer: int, shape: Shape) -> LayerData:
    """Random vectors; what attention looks like makes no difference to the cost."""
    draw = torch.Generator().manual_seed(layer)

    def vectors(*shape: int) -> torch.Tensor:
        return torch.randn((1, HEADS, *shape), generator=draw)

    group, size = shape
    half = size // 2
    rotary = Rotary(
        partner=torch.arange(size).roll(half),
        sign=torch.cat([-torch.ones(half), torch.ones(half)]),
        frequency=torch.arange(half).repeat(2),
        inv_freq=10_000.0 ** (-torch.arange(0, size, 2) / size),
        scaling=1.0,
        dtype=torch.float32,
    )
    return LayerData(
        layer=layer,
        kv_heads=tuple(range(HEADS)),
        query=vectors(group, length, size),
        key=vectors(length, size),
        value=vectors(length, size),
        rotary=rotary,
        spec=AttentionSpec(size**-0.5),
        passes=(PROMPT,),
    )


def settings_of(length: int) -> list[Policy]:
    """A hundred settings that a person might try: half of them BeaconKV."""
    budgets = [max(64, length // part // 64 * 64) for part in (32, 16, 8, 6, 4)]
    found: list[Policy] = [
        BeaconKV(budget=budget, beacons=beacons, recent=recent)
        for budget in budgets
        for beacons in (0, 4, 8, 16, 32)
        for recent in (8, 16)
    ]
    for budget in budgets:
        found += [SnapKV(budget=budget, window=window) for window in (16, 32)]
        found += [KeyDiff(budget=budget), Knorm(budget=budget), ExpectedAttention(budget=budget)]
        found += [RandomEviction(budget=budget, seed=seed) for seed in range(5)]
    return found


def seconds(work: Callable[[], object]) -> float:
    """Seconds of the processor."""
    started = time.process_time()
    work()
    return time.process_time() - started


def replay(layers: list[LayerData], settings: list[Policy], parts: Counter[str] | None = None) -> tuple[float, float]:
    """Seconds to simulate the settings and to measure them; ``parts`` gets those to simulate each policy."""
    simulating = measuring = 0.0
    for data in layers:
        started = time.process_time()
        kept, took = timed_simulation(settings, data)
        simulating += time.process_time() - started
        for policy, each in zip(settings, took, strict=True):
            if parts is not None:
                parts[policy.name] += each
        none = np.zeros(data.length, np.bool_)
        for head in range(HEADS):
            measuring += seconds(
                lambda data=data, kept=kept, head=head, none=none: measure_head(
                    data, head, kept, MeasureOptions(), none
                )
            )
    return simulating, measuring


def bare_product(data: LayerData) -> None:
    """Queries times keys of a layer, in the blocks that a replay uses."""
    for head in range(HEADS):
        for start in range(PROMPT, data.length, 128):
            stop = min(start + 128, data.length)
            query = data.query[0, head, :, start:stop].flatten(0, 1)
            query @ data.key[0, head, :stop].T


def made_trace(path: Path, length: int, layers: int, heads: int, shape: Shape) -> None:
    """Write a trace of random vectors, with what a replay reads and little else."""
    group, width = shape
    layout = TraceLayout(
        tuple(LayerLayout(layer, tuple(range(heads)), group, width, width) for layer in range(layers)), "float32", 1
    )
    rotary = made_layer(1, 0, shape).rotary.to_dict()
    facts = {"scaling": width**-0.5, "softcap": None, "sink_logit": None, "window": None, "kv_heads": heads}
    metadata = {
        "model": {"id": "made-up", "dtype": "bfloat16"},
        "prompt": "",
        "prompt_length": PROMPT,
        "options": {},
        "rotary": {"kinds": [rotary], "layers": {str(layer): 0 for layer in range(layers)}},
        "attention": {str(layer): facts for layer in range(layers)},
    }
    draw = np.random.default_rng(0)
    with Journal.create(path, layout, metadata) as journal:
        for first in range(0, length, 512):
            size = min(512, length - first)
            number = np.zeros(size, np.float32)
            journal.append_tokens(TokenBlock(first, np.zeros(size, np.int32), [b"a"] * size, number, number))
            asked = (size, heads, group)
            none, hits = np.zeros(asked, np.float32), np.zeros((*asked, 1), np.float32)
            for layer in range(layers):
                query, key, value = (
                    draw.standard_normal(each, np.float32)
                    for each in ((*asked, width), (size, heads, width), (size, heads, width))
                )
                unassigned = np.full(asked, -1, np.int16)
                journal.append(
                    HeadBlock(
                        layer, first, query, key, value, unassigned, none, none, none, none, hits.astype(np.int32), hits
                    )
                )
        journal.finalize({})


class PeakMemory:
    """The most memory that this process and its children held together, looked at now and then."""

    def __init__(self) -> None:
        self.most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.2):
            total = 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                try:
                    # Pages that processes share are divided among them.
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.most = max(self.most, total)


def run_costs(length: int, shape: Shape) -> None:
    """One setting against the product, and a hundred against one."""
    layers = [made_layer(length, layer, shape) for layer in range(LAYERS)]
    many = settings_of(length)
    one = [next(policy for policy in many if isinstance(policy, BeaconKV) and policy.beacons == 16)]
    replay([made_layer(512, 0, shape)], one)  # warm up
    product = sum(seconds(lambda data=data: bare_product(data)) for data in layers)
    print(f"{length} tokens, {LAYERS} layers x {HEADS} KV heads x {shape}")
    print(f"bare product q k       {product:8.2f} s")
    totals = []
    for name, settings in (("1 setting", one), (f"{len(many)} settings", many)):
        parts: Counter[str] = Counter()
        simulating, measuring = replay(layers, settings, parts)
        totals.append(simulating + measuring)
        print(f"{name:<22} {totals[-1]:8.2f} s = simulating {simulating:.2f} + measuring {measuring:.2f}", flush=True)
        if settings is many:
            print(f"  simulating, by policy: {', '.join(f'{name} {took:.1f}' for name, took in parts.most_common())}")
        if settings is one:
            print(f"measuring / product    {measuring / product:8.2f}")
    print(f"{len(many)} settings / 1         {totals[1] / totals[0]:8.2f}\n", flush=True)


def run_curve(shape: Shape) -> None:
    """How the cost of one layer grows with the length, for one setting and for twenty."""
    lengths = (2048, 4096, 8192, 16384)
    print(f"1 layer x {HEADS} KV heads x {shape}, seconds of one processor\n")
    print("| tokens | 1 setting | 20 settings, a budget of a thirty-second to a quarter of the tokens |\n|---|---|---|")
    took: list[tuple[float, float]] = []
    for length in lengths:
        layers, many = [made_layer(length, 0, shape)], settings_of(length)
        took.append((sum(replay(layers, many[6:7])), sum(replay(layers, many[::5]))))
        print(f"| {length} | {took[-1][0]:.1f} | {took[-1][1]:.1f} |", flush=True)
    one, twenty = (exponent(lengths, costs) for costs in zip(*took, strict=True))
    print(f"| grows with the length to the power of | {one:.2f} | {twenty:.2f} |\n")


def run_sweep(quick: bool, shape: Shape) -> None:
    length, layers, heads = (2048, 2, 4) if quick else (16384, 6, 8)
    settings = settings_of(length)
    settings = [*settings[:50:2], *settings[50::3][:15]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.parquet"
        made_trace(path, length, layers, heads, shape)
        print(f"{length} tokens, {layers * heads} KV heads x {shape}, {len(settings)} settings")
        print(f"trace on disk          {path.stat().st_size / 1e9:8.2f} GB")
        started = time.perf_counter()
        with PeakMemory() as memory:
            found = sweep(make_jobs(load_trace(path), settings), workers=2)
        print(f"seconds, two processes {time.perf_counter() - started:8.1f}")
        print(f"memory, all together   {memory.most / 1e9:8.2f} GB")
        assert len(found.settings) == len(settings) * layers * heads


def run_cost() -> str:
    """A table of what many traces cost, from what a head costs.

    Attention and the measures of a setting grow with the square of the length, a simulation with the length and with
    the entries that a compression looks at.
    """
    shape = SHAPES["large"]
    width = HEADS * shape.group * shape.size
    cost: dict[str, list[float]] = {"attention": [], "measure": [], "simulate": []}
    for length in (2048, 4096):
        layer = made_layer(length, 0, shape)
        one = [next(policy for policy in settings_of(length) if isinstance(policy, BeaconKV) and policy.beacons == 16)]
        many = [*one, *settings_of(length)[::5]]
        _, alone = replay([layer], one)
        simulating, together = replay([layer], many)
        pairs = length**2 / 2 * width
        cost["attention"].append(alone / pairs)
        cost["measure"].append((together - alone) / (len(many) - 1) / pairs)
        looked_at = sum(policy.budget + policy.interval for policy in many)
        cost["simulate"].append(simulating / (length * looked_at * width))
    for name, values in cost.items():
        print(f"{name:<10} {values[0]:.2e} at 2 K tokens, {values[1]:.2e} at 4 K; the latter is scaled")
    length, layers, heads, settings, budget = 32768, 6, 8, 40, 1024
    group, size = shape
    width = layers * heads * group * size
    attention, measure, simulate_ = (values[-1] for values in cost.values())
    per_trace = width * (
        length**2 / 2 * (attention + settings * measure) + length * settings * (budget + 128) * simulate_
    )
    layout = TraceLayout(
        tuple(LayerLayout(layer, tuple(range(heads)), group, size, size) for layer in range(layers)), "float32", 8
    )
    on_disk = estimate_bytes(layout, length, model_dtype="torch.bfloat16")
    results = 200 * settings * layers * heads
    worker = 2 * 4 * heads * length * size * (group + 2)
    lines = [
        f"{length} tokens, {layers} layers x {heads} KV heads x {group} query heads of {size}, {settings} settings "
        f"with a budget of {budget}. A worker needs {_short(worker)}B.",
        "",
        "| traces | core time | 2 processes | 1000 processes | traces on disk | result |",
        "|---|---|---|---|---|---|",
    ]
    for traces in (1, 1_000, 1_000_000):
        seconds_ = traces * per_trace
        # One layer is a job, so that more processes than layers do not help a single trace.
        times = (seconds_, seconds_ / min(2, layers * traces), seconds_ / min(1000, layers * traces))
        cells = [f"{traces:,}", *map(_time, times), f"{_short(traces * on_disk)}B", f"{_short(traces * results)}B"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _short(count: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} P"


def _time(count: float) -> str:
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if count >= 2 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} s"


def write_between(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the comments ``name`` and ``end of name`` of a document."""
    before, opening, rest = path.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, closing, after = rest.partition(f"<!-- end of {name} -->")
    assert opening and closing, f"{path} has no place for it"
    path.write_text(f"{before}{opening}{text}\n{closing}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 K tokens in place of 8 K")
    parser.add_argument("--sweep", action="store_true", help="16 K tokens, 48 KV heads, 40 settings, two processes")
    parser.add_argument("--curve", action="store_true", help="how one setting and twenty grow, 2 K to 16 K tokens")
    parser.add_argument("--cost", action="store_true", help="what many traces of 32 K tokens cost")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put that table into a document (docs/scale.md)")
    parser.add_argument("--shape", choices=list(SHAPES), help="of the heads; both if left out")
    arguments = parser.parse_args()
    quick = arguments.quick
    torch.set_num_threads(1)
    shapes = [SHAPES[name] for name in ([arguments.shape] if arguments.shape else SHAPES)]
    if arguments.curve:
        for shape in shapes:
            run_curve(shape)
        return
    if arguments.sweep:
        for shape in shapes:
            run_sweep(quick, shape)
        return
    if arguments.cost:
        table = run_cost()
        print(f"\n{table}")
        if arguments.write is not None:
            write_between(arguments.write, "cost", table)
        return
    for shape in shapes:
        run_costs(2048 if quick else 8192, shape)


if __name__ == "__main__":
    main()
