"""The project's central promise: a replay with the settings of a recording evicts what the recording evicted."""

from __future__ import annotations

import pytest
import torch

from beaconscope import BeaconKV, RandomEviction, StreamingLLM, UsageError
from beaconscope.kv.policies import (
    H2O,
    POLICIES,
    RKV,
    RPC,
    TOVA,
    ExpectedAttention,
    FastGen,
    Full,
    KeyDiff,
    Knorm,
    LazyEviction,
    ScissorHands,
    SnapKV,
)
from beaconscope.replay.layer import load_layer
from beaconscope.replay.simulate import drive, simulate
from tests.record.recording import record_tiny
from tests.tiny import tiny_model

B, INTERVAL = 20, 6
SMALL = {"budget": B, "interval": INTERVAL, "beacons": 4, "recent": 3, "pool_low": 6, "pool_high": 11}

LIVE = {
    "beacon": BeaconKV(**SMALL),
    "beacon:kmeans": BeaconKV(**SMALL, selector="kmeans"),
    "beacon:random": BeaconKV(**SMALL, selector="random", query_space="post-rope"),
    "beacon:own": BeaconKV(**SMALL, beacon_rotation="own", sinks=2, query_pooling="mean"),
    "full": Full(),
    "streaming-llm": StreamingLLM(budget=B),
    "h2o": H2O(budget=B),
    "scissorhands": ScissorHands(budget=B, recent=3),
    "fastgen": FastGen(interval=5),
    "snapkv": SnapKV(budget=B, interval=INTERVAL, window=4),
    "tova": TOVA(budget=B),
    "r-kv": RKV(budget=B, interval=INTERVAL),
    "rpc": RPC(period=10, recent=4),
    "lazy-eviction": LazyEviction(budget=B, interval=INTERVAL),
    "keydiff": KeyDiff(budget=B, interval=INTERVAL),
    "knorm": Knorm(budget=B, interval=INTERVAL),
    "expected-attention": ExpectedAttention(budget=B, interval=INTERVAL),
    "random": RandomEviction(budget=B, interval=INTERVAL, recent=3),
}


def evictions(trace, layer, number, head, kept):
    """What the trace says, and what the replay says, of each compression of a head."""
    recorded = [(each.position, each.evicted.tolist()) for each in trace.evictions(layer, head)]
    return recorded, [(position, dropped.tolist()) for position, dropped in kept.evicted(number)]


def check(trace, policy):
    """The policy driven alone, and beside others that share its beacons, does what was recorded; compressions seen."""
    seen = 0
    beside = BeaconKV(**{**SMALL, "beacons": 6, "budget": B + 3})
    for layer in trace.layers:
        data = load_layer(trace, layer)
        for kept in (drive(policy, data), simulate([beside, policy], data)[1]):
            for number, head in enumerate(trace.kv_heads(layer)):
                recorded, replayed = evictions(trace, layer, number, head, kept)
                assert replayed == recorded
                seen += len(recorded)
                last = trace.length - 1
                assert kept.kept(number, last).tolist() == trace.kept(layer, head, last).tolist()
    return seen


def test_every_live_policy_is_tried():
    assert {policy.name for policy in LIVE.values()} == {name for name, kind in POLICIES.items() if kind.live}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("name", LIVE)
def test_a_replay_evicts_what_the_recording_evicted(name, group, dtype, tmp_path):
    layers = 2 if (group, dtype) == (2, torch.float32) else 1
    model = tiny_model(num_key_value_heads=4 // group, num_hidden_layers=layers).to(dtype)
    trace = record_tiny(model, tmp_path, policy=LIVE[name], max_new_tokens=20)
    assert check(trace, LIVE[name]) > 0 or name == "full"


@pytest.mark.parametrize("arch", ["gpt_oss", "deepseek_v3", "qwen3"])
@pytest.mark.parametrize("name", ["beacon", "h2o", "snapkv", "expected-attention"])
def test_other_attention_is_replayed_too(arch, name, tmp_path):
    """Learned sinks, latent attention whose heads keep one set, and norms of queries and keys."""
    trace = record_tiny(tiny_model(arch), tmp_path, policy=LIVE[name], max_new_tokens=14)
    full = [layer for layer in trace.layers if trace.metadata["attention"][str(layer)]["window"] is None]
    for layer in full:
        data = load_layer(trace, layer)
        kept = drive(LIVE[name], data)
        assert kept.fired
        for number, head in enumerate(trace.kv_heads(layer)):
            recorded, replayed = evictions(trace, layer, number, head, kept)
            assert replayed == recorded


@pytest.mark.parametrize("name", ["beacon", "h2o", "streaming-llm", "rpc", "random"])
def test_a_prompt_in_chunks_is_replayed_in_chunks(name, tmp_path):
    trace = record_tiny(tiny_model(), tmp_path, "x y, z " * 9, policy=LIVE[name], max_new_tokens=14, prefill_chunk=13)
    assert check(trace, LIVE[name]) > 0


def test_a_live_cache_refuses_what_works_in_replay_only(tmp_path):
    for name, kind in POLICIES.items():
        if not kind.live:
            with pytest.raises(UsageError, match="replay only"):
                record_tiny(tiny_model(), tmp_path, policy=kind(budget=200), name=name)
