"""What a trace says of attention, tokens and vectors, against the model run without this package."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from beaconscope import BeaconKV, Full, Sampling
from beaconscope.models import hooks
from beaconscope.record import recorder
from tests.record.recording import (
    PROMPT,
    attentions_of,
    endless_tokenizer,
    generate_plainly,
    ranges,
    record_tiny,
    token_ids,
)
from tests.tiny import ARCHITECTURES, PAD, tiny_model

NEW = 24
BOUNDS = {"sink_positions": 2, "local_window": 8}


def check_attention(trace, attentions, hits):
    """Hold hits and masses of every head against attention [Hq, T, T] of each layer."""
    for layer, kv_head in trace.heads:
        head = trace.head(layer, kv_head)
        group = head.query.shape[1]
        weights = attentions[layer][kv_head * group : (kv_head + 1) * group]  # [G, T, T]
        masses = ranges(weights, **{"sinks": BOUNDS["sink_positions"], "window": BOUNDS["local_window"]})
        for ours, theirs in zip((head.mass_sink, head.mass_local, head.mass_distant), masses, strict=True):
            np.testing.assert_allclose(ours, theirs.T, atol=1e-5)
        for position in range(trace.length):
            for g in range(group):
                row = weights[g, position]
                count = min(hits, np.count_nonzero(row))
                named = head.hit_position[position, g]
                assert (named[count:] == -1).all()
                assert (named[:count] >= 0).all()
                assert len(set(named[:count].tolist())) == count
                # Entries of equal weight may be named in any order, so it is the masses that must be the largest.
                np.testing.assert_allclose(head.hit_mass[position, g, :count], np.sort(row)[::-1][:count], atol=1e-5)
                np.testing.assert_allclose(row[named[:count]], head.hit_mass[position, g, :count], atol=1e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_with_a_full_cache_tokens_hits_and_masses_are_those_of_the_model(arch, tmp_path):
    plain = tiny_model(arch, attn_implementation="eager")
    trace = record_tiny(tiny_model(arch), tmp_path, policy=Full(), max_new_tokens=NEW, hits=5, **BOUNDS)
    ids = token_ids(trace)
    assert ids[: len(PROMPT)] == list(PROMPT.encode())
    assert ids[len(PROMPT) :] == generate_plainly(tiny_model(arch), ids[: len(PROMPT)], NEW)
    check_attention(trace, attentions_of(plain, ids), hits=5)


def gemma2(attn_implementation="eager"):
    """A model whose logits are squashed by a soft cap, in layers with and without a window."""
    config = AutoConfig.for_model(
        "gemma2",
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        attn_logit_softcapping=2.0,
        initializer_range=0.2,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "make", [partial(tiny_model, "llama"), partial(tiny_model, "gemma3_text"), partial(tiny_model, "gpt_oss"), gemma2]
)
def test_a_long_prompt_is_attended_in_pieces_that_make_no_difference(make, tmp_path, monkeypatch):
    # GIVEN pieces of a few queries each
    pieces = []
    summary = recorder.Recorder._summary

    def counted(self, weight, *rest):
        pieces.append(weight.shape[3])
        return summary(self, weight, *rest)

    monkeypatch.setattr(recorder.Recorder, "_summary", counted)
    monkeypatch.setattr(recorder, "_BLOCK_BYTES", 4 * 4 * 90 * 7)
    # WHEN a prompt of many pieces is recorded
    trace = record_tiny(make(), tmp_path, "x" + PROMPT * 2 + "abcdefghi", policy=Full(), hits=5, **BOUNDS)
    # THEN it was cut, and nothing else is different
    assert max(pieces) < 12
    assert len([piece for piece in pieces if piece > 1]) >= 10
    check_attention(trace, attentions_of(make(attn_implementation="eager"), token_ids(trace)), hits=5)


def vectors_of(model, ids):
    """Queries [Hq, T, D], keys and values [H, T, D] of every layer, from transformers' own attention interface."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.models.llama.modeling_llama import eager_attention_forward

    seen = []

    def spy(module, query, key, value, mask, **options):
        seen.append([part[0].float().numpy().copy() for part in (query, key, value)])
        return eager_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.set_attn_implementation("spy")
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    return seen


@pytest.mark.parametrize(
    ("dtype", "vector_type"), [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "float16")]
)
def test_vectors_of_a_prompt_are_exactly_what_the_model_attended_with(dtype, vector_type, tmp_path):
    """One pass over the same tokens, so that there is no room for rounding."""
    model = tiny_model("llama").to(dtype)
    trace = record_tiny(model, tmp_path, policy=Full(), max_new_tokens=1, vector_type=vector_type)
    assert trace.layout.vector_type == vector_type.replace("auto", "float32")
    length = trace.prompt_length
    seen = vectors_of(tiny_model("llama", attn_implementation="eager").to(dtype), token_ids(trace)[:length])
    for layer, kv_head in trace.heads:
        if dtype == torch.bfloat16 and layer > 0:
            continue  # what comes after the first attention depends on the backend
        head = trace.head(layer, kv_head)
        group = head.query.shape[1]
        query, key, value = seen[layer]
        exact = dtype == torch.bfloat16 or layer == 0
        same = np.testing.assert_array_equal if exact else partial(np.testing.assert_allclose, atol=1e-5)
        same(head.query[:length], query[kv_head * group : (kv_head + 1) * group].swapaxes(0, 1))
        same(head.key[:length], key[kv_head])
        same(head.value[:length], value[kv_head])


@pytest.mark.parametrize(
    ("arch", "dtype", "vector_type"),
    [
        ("llama", torch.float32, "auto"),
        ("llama", torch.bfloat16, "auto"),
        ("llama", torch.bfloat16, "float16"),
        ("gemma3_text", torch.bfloat16, "float16"),
        ("glm4", torch.float32, "auto"),
        ("deepseek_v3", torch.bfloat16, "float16"),
    ],
)
def test_vectors_of_every_step_are_exactly_what_the_model_attended_with(
    arch, dtype, vector_type, tmp_path, monkeypatch
):
    # GIVEN somebody who looks over the shoulder of the model's attention
    seen = {}

    def spy(backend, module):
        run = tap_function(backend, module)

        def attention(module, query, key, value, mask, **options):
            count = query.shape[2]
            seen.setdefault(module.layer_idx, []).append(
                [part[0, :, -count:].float().numpy().copy() for part in (query, key, value)]
            )
            return run(module, query, key, value, mask, **options)

        return attention

    tap_function = hooks._backend_function
    monkeypatch.setattr(hooks, "_backend_function", spy)
    # WHEN a recording is compressed again and again
    policy = BeaconKV(budget=20, interval=6, beacons=4, recent=3)
    model = tiny_model(arch).to(dtype)
    trace = record_tiny(model, tmp_path, policy=policy, max_new_tokens=40, vector_type=vector_type)
    # THEN every vector in the trace is one that the model used
    for layer, kv_head in trace.heads:
        head = trace.head(layer, kv_head)
        group = head.query.shape[1]
        passes = seen[layer][-(1 + trace.length - len(PROMPT)) :]  # those before are the probe's
        query, key, value = (np.concatenate(part, axis=1) for part in zip(*passes, strict=True))
        np.testing.assert_array_equal(head.query, query[kv_head * group : (kv_head + 1) * group].swapaxes(0, 1))
        np.testing.assert_array_equal(head.key, key[kv_head])
        np.testing.assert_array_equal(head.value, value[kv_head])


def test_logprob_and_entropy_are_those_of_the_models_distribution(tmp_path):
    trace = record_tiny(tiny_model("qwen3"), tmp_path, policy=Full(), max_new_tokens=40)
    ids = token_ids(trace)
    with torch.no_grad():
        logits = tiny_model("qwen3")(torch.tensor([ids])).logits[0].double().numpy()
    shifted = logits - logits.max(-1, keepdims=True)
    probability = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    tokens = trace.tokens
    assert tokens["logprob"][: trace.prompt_length].isna().all()
    assert tokens["entropy"][: trace.prompt_length].isna().all()
    for position in range(trace.prompt_length, trace.length):
        before = probability[position - 1]
        assert tokens["logprob"][position] == pytest.approx(np.log(before[ids[position]]), abs=1e-4)
        assert tokens["entropy"][position] == pytest.approx(-(before * np.log(before)).sum(), abs=1e-4)


def test_logprob_is_the_models_own_whatever_the_sampling(tmp_path):
    sampling = Sampling(temperature=1.5, top_k=20, seed=1)
    trace = record_tiny(tiny_model("llama"), tmp_path, policy=Full(), max_new_tokens=20, sampling=sampling)
    ids = token_ids(trace)
    with torch.no_grad():
        expected = tiny_model("llama")(torch.tensor([ids])).logits[0].log_softmax(-1)
    for position in range(trace.prompt_length, trace.length):
        assert trace.tokens["logprob"][position] == pytest.approx(
            float(expected[position - 1, ids[position]]), abs=1e-4
        )


def test_the_bytes_of_the_tokens_are_the_text(tmp_path):
    # Random weights write bytes that split characters and are no UTF-8 at all.
    prompt = "naïve 思考 🙂"
    trace = record_tiny(tiny_model("llama"), tmp_path, prompt, policy=Full(), max_new_tokens=60)
    joined = b"".join(trace.tokens["token_bytes"])
    assert joined[: len(prompt.encode())] == prompt.encode()
    assert trace.text == joined.decode("utf-8", "replace")
    assert trace.text == endless_tokenizer().decode(token_ids(trace))
    ids = token_ids(trace)
    assert all(bytes([i]) == part for i, part in zip(ids, trace.tokens["token_bytes"], strict=True) if i < 256)


def test_the_trace_says_what_replay_needs(tmp_path):
    trace = record_tiny(tiny_model("gpt_oss"), tmp_path, policy=Full())
    assert trace.whole
    assert trace.metadata["prefill_passes"] == [len(PROMPT)]
    assert trace.attention_over == "everything"
    attention = trace.metadata["attention"]
    assert attention["0"]["window"] == 16
    assert attention["1"]["window"] is None
    sinks = tiny_model("gpt_oss").model.layers[1].self_attn.sinks.detach().numpy()
    np.testing.assert_array_equal(np.array(attention["1"]["sink_logit"], np.float32).reshape(-1), sinks)
    assert attention["1"]["scaling"] == pytest.approx(16**-0.5)
    kinds = trace.metadata["rotary"]
    assert len(kinds["kinds"]) == 1
    assert kinds["layers"] == {"0": 0, "1": 0}
