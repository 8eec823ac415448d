"""The same code on a CUDA device: kept sets as on the CPU, no waiting for the device in a step, a whole recording."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import beaconscope
from beaconscope.kv import BeaconCache, CompressedCache
from beaconscope.kv.policies import POLICIES, BeaconKV, parse_policy
from beaconscope.models import cache_argument, tap
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.gpu

PROMPT = "Plan first, then work through the plan, and look back at it."


def jaccard(a: set[int], b: set[int]) -> float:
    return len(a & b) / max(1, len(a | b))


@pytest.mark.parametrize("selector", ["fps", "kmeans", "random", "none"])
def test_kept_sets_are_those_of_the_cpu(selector: str) -> None:
    # GIVEN one text, fed token by token to the same weights on both devices
    ids = torch.randint(3, 200, (1, 300), generator=torch.Generator().manual_seed(0))
    kept = {}
    for device in ("cpu", "cuda"):
        model = tiny_model("llama").to(device)
        cache = BeaconCache(model, budget=48, interval=16, beacons=8, recent=8, selector=selector)
        with torch.inference_mode():
            for start, stop in [(0, 100), *((at, at + 1) for at in range(100, 300))]:
                model(ids[:, start:stop].to(device), use_cache=True, **{cache_argument(model): cache})
        kept[device] = [cache.kept_positions(layer).cpu() for layer in range(len(cache.layers))]
    # THEN every head kept the same
    for on_cpu, on_gpu in zip(kept["cpu"], kept["cuda"], strict=True):
        for a, b in zip(on_cpu, on_gpu, strict=True):
            assert jaccard(set(a.tolist()), set(b.tolist())) >= 0.999


@pytest.mark.parametrize("policy", ["beacon", "streaming-llm", "random", "full"])
def test_a_step_waits_for_nothing(policy: str) -> None:
    # GIVEN a prompt that is in, and a step behind us in which everything was allocated
    model = tiny_model("llama").cuda()
    settings = {} if policy == "full" else {"budget": 64}
    if "interval" in POLICIES[policy].parameters() and policy != "streaming-llm":
        settings["interval"] = 64
    cache = CompressedCache(tap(model), parse_policy(policy, **settings))
    ids = torch.randint(3, 200, (2, 40), generator=torch.Generator().manual_seed(0)).cuda()
    token = ids[:, :1].contiguous()
    positions = torch.arange(200, device="cuda")
    with torch.inference_mode():
        model(ids, use_cache=True, **{cache_argument(model): cache})
        model(token, position_ids=positions[None, 40:41], use_cache=True, **{cache_argument(model): cache})
        torch.cuda.synchronize()
        # WHEN more steps are taken, THEN none of them makes the host wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            for at in range(41, 60):
                step = positions[None, at : at + 1]
                model(token, position_ids=step, use_cache=True, **{cache_argument(model): cache})
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_recording_is_that_of_the_cpu(tmp_path: Path) -> None:
    options = beaconscope.RecordOptions(
        policy=BeaconKV(budget=48, interval=16, beacons=8, recent=8), max_new_tokens=120
    )
    traces = {}
    for device in ("cpu", "cuda"):
        model = tiny_model("llama").to(device)
        traces[device] = beaconscope.record(
            model, tiny_tokenizer(), PROMPT, options, output=tmp_path / f"{device}.parquet"
        )
    cpu, gpu = traces["cpu"], traces["cuda"]
    assert gpu.whole
    assert gpu.tokens.token_id.tolist() == cpu.tokens.token_id.tolist()
    for layer, head in cpu.heads:
        on_cpu, on_gpu = cpu.head(layer, head), gpu.head(layer, head)
        np.testing.assert_allclose(on_gpu.query, on_cpu.query, atol=1e-4)
        np.testing.assert_allclose(on_gpu.mass_local, on_cpu.mass_local, atol=1e-4)
        for a, b in zip(cpu.evictions(layer, head), gpu.evictions(layer, head), strict=True):
            assert jaccard(set(a.evicted.tolist()), set(b.evicted.tolist())) >= 0.999
