"""What a replay costs: many settings against one, and one pass against the matrix product that it needs.

Run ``python benchmarks/replay.py``; ``--quick`` takes less than a minute. Figures are seconds of the processor, one
thread, so that a busy machine does not count.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from beaconscope.kv.policies import BeaconKV, ExpectedAttention, KeyDiff, Knorm, Policy, RandomEviction, SnapKV
from beaconscope.kv.rotary import Rotary
from beaconscope.replay import LayerData, MeasureOptions, measure_head, simulate

LAYERS, HEADS, GROUP, SIZE, PROMPT = 2, 4, 2, 64, 200


def made_layer(length: int, layer: int) -> LayerData:
    """Random vectors; what attention looks like makes no difference to the cost."""
    draw = torch.Generator().manual_seed(layer)

    def vectors(*shape: int) -> torch.Tensor:
        return torch.randn((1, HEADS, *shape), generator=draw)

    half = SIZE // 2
    rotary = Rotary(
        partner=torch.arange(SIZE).roll(half),
        sign=torch.cat([-torch.ones(half), torch.ones(half)]),
        frequency=torch.arange(half).repeat(2),
        inv_freq=10_000.0 ** (-torch.arange(0, SIZE, 2) / SIZE),
        scaling=1.0,
        dtype=torch.float32,
    )
    return LayerData(
        layer=layer,
        kv_heads=tuple(range(HEADS)),
        query=vectors(GROUP, length, SIZE),
        key=vectors(length, SIZE),
        value=vectors(length, SIZE),
        rotary=rotary,
        scaling=SIZE**-0.5,
        softcap=None,
        sink_logit=None,
        window=None,
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


def replay(layers: list[LayerData], settings: list[Policy]) -> tuple[float, float]:
    """Seconds to simulate the settings and to measure them."""
    simulating = measuring = 0.0
    for data in layers:
        kept: list = []
        simulating += seconds(lambda data=data, kept=kept: kept.extend(simulate(settings, data)))
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
            query = data.query[0, head, :, start:stop].reshape(-1, SIZE)
            query @ data.key[0, head, :stop].T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 K tokens in place of 8 K")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    length = 2048 if quick else 8192
    layers = [made_layer(length, layer) for layer in range(LAYERS)]
    many = settings_of(length)
    one = [next(policy for policy in many if isinstance(policy, BeaconKV) and policy.beacons == 16)]
    replay([made_layer(512, 0)], one)  # warm up
    product = sum(seconds(lambda data=data: bare_product(data)) for data in layers)
    print(f"{length} tokens, {LAYERS} layers x {HEADS} KV heads x {GROUP} query heads of {SIZE}")
    print(f"bare product q k       {product:8.2f} s")
    totals = []
    for name, settings in (("1 setting", one), (f"{len(many)} settings", many)):
        simulating, measuring = replay(layers, settings)
        totals.append(simulating + measuring)
        print(f"{name:<22} {totals[-1]:8.2f} s = simulating {simulating:.2f} + measuring {measuring:.2f}")
        if settings is one:
            print(f"measuring / product    {measuring / product:8.2f}")
    print(f"{len(many)} settings / 1         {totals[1] / totals[0]:8.2f}")


if __name__ == "__main__":
    main()
