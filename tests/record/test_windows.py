"""Recordings of models with sliding windows: the trace holds the model's own, and what can be compressed is."""

from __future__ import annotations

import numpy as np
import pytest

from beaconscope import BeaconKV, BeaconScopeError, Full
from beaconscope.analyze.attention import HeadAttention, layer_facts
from beaconscope.replay import load_layer, make_jobs
from beaconscope.replay.simulate import simulate
from tests.models.test_probe import ALTERNATING, made
from tests.record.recording import attentions_of, generate_plainly, record_tiny, token_ids
from tests.record.test_numbers import BOUNDS, check_attention
from tests.tiny import tiny_model

NEW = 24
SMALL = BeaconKV(budget=20, interval=6, beacons=4, recent=4)
CONTEXT = {"max_position_embeddings": 4096}

# Each with the windows of its layers.
MODELS = {
    "phi3, short": (lambda **attn: tiny_model("phi3", sliding_window=16, **attn), [16, 16]),
    "phi3, long": (lambda **attn: tiny_model("phi3", sliding_window=262144, **attn), [262144] * 2),
    "mistral, short": (lambda **attn: tiny_model("mistral", sliding_window=16, **attn), [16, 16]),
    "mistral, long": (lambda **attn: tiny_model("mistral", sliding_window=4096, **attn), [4096] * 2),
    "exaone4": (lambda **_: made("exaone4", sliding_window=16, layer_types=ALTERNATING, **CONTEXT), [16, None] * 2),
    "cohere2": (lambda **_: made("cohere2", sliding_window=16, layer_types=ALTERNATING, **CONTEXT), [16, None] * 2),
    "llama4, long chunks": (
        lambda **_: made("llama4_text", intermediate_size_mlp=64, num_local_experts=2, **CONTEXT),
        [None] * 4,
    ),
}


def eager(make):
    model = make(attn_implementation="eager")
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(("make", "windows"), MODELS.values(), ids=MODELS)
def test_hits_and_recomputed_attention_are_the_models(make, windows, tmp_path):
    trace = record_tiny(make(), tmp_path, policy=Full(), max_new_tokens=NEW, hits=5, **BOUNDS)
    ids = token_ids(trace)
    assert ids[32:] == generate_plainly(make(), ids[:32], NEW)
    assert [trace.metadata["attention"][str(layer)]["window"] for layer in trace.layers] == windows
    weights = attentions_of(eager(make), ids)
    check_attention(trace, weights, hits=5)
    for layer, kv_head in trace.heads:
        head = trace.head(layer, kv_head)
        attention = HeadAttention(head, layer_facts(trace, layer))
        group = head.query.shape[1]
        theirs = weights[layer][kv_head * group : (kv_head + 1) * group]
        for start, stop in attention.blocks():
            ours = attention.block(start, stop).numpy()
            np.testing.assert_allclose(ours, theirs[:, start:stop, :stop], atol=1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if "short" not in name])
def test_layers_that_see_everything_are_compressed_and_replayed(name, tmp_path):
    make, windows = MODELS[name]
    notes = []
    trace = record_tiny(make(), tmp_path, policy=SMALL, max_new_tokens=60, note=notes.append)
    open_layers = [layer for layer, window in enumerate(windows) if window is None or window >= trace.length]
    assert [layer for layer in trace.layers if trace.evictions(layer, 0)] == open_layers
    assert {job.layer for job in make_jobs(trace, [SMALL])} == set(open_layers)
    for layer in open_layers:
        kept = simulate([SMALL], load_layer(trace, layer))[0]
        for number, head in enumerate(trace.layout.of(layer).kv_heads):
            recorded = [(each.position, each.evicted.tolist()) for each in trace.evictions(layer, head)]
            assert recorded == [(position, dropped.tolist()) for position, dropped in kept.evicted(number)]
            assert recorded
    said = [text for text in notes if "sliding window" in text]
    if len(open_layers) == len(windows):
        assert said == []
    else:
        assert said == [
            "2 of 4 layers have a sliding window (16 tokens) and keep just that; the other 2 are compressed."
        ]


@pytest.mark.parametrize("arch", ["phi3", "mistral"])
def test_a_recording_with_nothing_to_compress_is_refused_with_remedies_that_work(arch, tmp_path):
    model = tiny_model(arch, sliding_window=60)
    with pytest.raises(BeaconScopeError) as refused:
        record_tiny(model, tmp_path, policy=SMALL, max_new_tokens=29)
    assert str(refused.value).endswith(
        "every layer has a sliding window, the widest of 60 tokens, and the text may reach 61, so there is nothing for "
        "beacon to compress; give --max-new-tokens at most 28, or --cache full".replace(
            "every layer has", f"every layer of {type(model).__name__} has"
        )
    )
    trace = record_tiny(model, tmp_path, policy=SMALL, max_new_tokens=28)
    assert trace.evictions(0, 0) and trace.evictions(1, 0)
    full = record_tiny(model, tmp_path, name="full", policy=Full(), max_new_tokens=40)
    ids = token_ids(full)
    assert ids[32:] == generate_plainly(tiny_model(arch, sliding_window=60), ids[:32], 40)
    with pytest.raises(BeaconScopeError, match="only layers with a sliding window"):
        make_jobs(full, [SMALL])


def test_a_recording_that_ends_early_is_replayed_as_its_cache_was(tmp_path):
    """The text could have become longer than the window, so the layers with it were not compressed."""
    model = tiny_model("gemma3_text", sliding_window=100)
    written = token_ids(record_tiny(model, tmp_path, policy=SMALL, max_new_tokens=200))[32:]
    last = max(set(written), key=written.index)  # the token that first comes latest
    model.generation_config.eos_token_id = last
    trace = record_tiny(model, tmp_path, name="early", policy=SMALL, max_new_tokens=200)
    assert trace.length < 100
    assert not trace.evictions(0, 0)
    assert trace.evictions(1, 0)
    assert {job.layer for job in make_jobs(trace, [SMALL])} == {1, 3}


def test_chunks_are_recorded_up_to_the_end_of_the_first(tmp_path):
    def model():
        return made("llama4_text", attention_chunk_size=60, intermediate_size_mlp=64, num_local_experts=2, **CONTEXT)

    with pytest.raises(BeaconScopeError, match=r"attends in chunks of 60 tokens.*--max-new-tokens at most 28"):
        record_tiny(model(), tmp_path, policy=Full(), max_new_tokens=29)
    trace = record_tiny(model(), tmp_path, policy=Full(), max_new_tokens=28)
    ids = token_ids(trace)
    assert ids[32:] == generate_plainly(model(), ids[:32], 28)
