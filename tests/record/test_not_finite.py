"""Models whose numbers are not finite: recording stops, says where and why, and keeps what came before."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch

from beaconscope import BeaconKV, BeaconScopeError, Full, RecordOptions, StreamingLLM, load_trace, record
from beaconscope.models import tap
from beaconscope.record import Prompt, Sampling, check_live, record_prompts, recorder
from beaconscope.trace import journal_path
from tests.record.recording import PROMPT, at_position, endless_tokenizer, record_tiny, token_ids
from tests.tiny import tiny_model

POLICIES = [Full(), BeaconKV(budget=20, interval=6, beacons=3, recent=4), StreamingLLM(budget=20)]
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def once_tapped(monkeypatch):
    """Damage a model once it is tapped, because a model that is damaged before is refused by the tap."""

    def damage_by(damage):
        def tap_and_damage(model):
            tapped = tap(model)
            damage(model)
            return tapped

        for name in ("record", "live_check"):
            monkeypatch.setattr(importlib.import_module(f"beaconscope.record.{name}"), "tap", tap_and_damage)

    return damage_by


@pytest.fixture(params=[False, True], ids=["settled one by one", "settled in groups"])
def queues(request, monkeypatch):
    """As on a CPU, and as on an accelerator, where results are looked at once in a while."""
    generate = importlib.import_module("beaconscope.record.generate")
    monkeypatch.setattr(generate, "_queues_work", lambda device: request.param)
    # On a slow machine results are looked at sooner.
    monkeypatch.setattr(generate, "_SETTLE_SECONDS", math.inf)
    return request.param


def break_at(layer, *positions, row=0):
    """Damage: a layer puts out nan for the tokens of a sequence of the batch at some positions."""

    def damage(model):
        def spoil(module, args, kwargs, output):
            hit = torch.isin(kwargs["position_ids"], torch.tensor(positions)).expand(output.shape[0], -1).clone()
            hit[torch.arange(len(hit)) != row] = False
            return output.masked_fill(hit[..., None], float("nan"))

        model.model.layers[layer].register_forward_hook(spoil, with_kwargs=True)

    return damage


def put(value, name=DOWN, at=(0, 0)):
    """Damage: one number of a weight."""
    return lambda model: model.get_parameter(name).data.__setitem__(at, value)


def scaled(by):
    """Damage: a weight of layer 1 is so many times as large."""
    return lambda model: model.get_parameter(DOWN).data.mul_(by)


@pytest.mark.parametrize(
    ("sampling", "completion"),
    [
        (Sampling(), None),
        (Sampling(temperature=0.7), None),
        (Sampling(temperature=0.7, top_p=0.9), None),
        (Sampling(), "so 3 + 4 = 7"),
    ],
    ids=["greedy", "sampled", "top-p", "given"],
)
def test_a_damaged_weight_is_named_and_nothing_is_left(sampling, completion, tmp_path, once_tapped):
    once_tapped(put(float("nan")))
    with pytest.raises(BeaconScopeError) as raised:
        record_tiny(tiny_model(), tmp_path, sampling=sampling, completion=completion)
    assert str(raised.value) == (
        "the model's logits are not finite after the prompt: the first output that is not finite is that of layer 1; "
        f"the weight {DOWN} holds nan, so the checkpoint is damaged: load another"
    )
    assert list(tmp_path.iterdir()) == []


HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
DAMAGED = f"the weight {DOWN} is infinite, so the checkpoint is damaged: load another"


@pytest.mark.parametrize(
    ("dtype", "damage", "remedy"),
    [
        (FULL, put(float("inf")), DAMAGED),
        (BRAIN, put(float("inf")), DAMAGED),
        (FULL, scaled(1e38), "its weights are finite, so its numbers outgrow float32: check the checkpoint and its"),
        (BRAIN, scaled(1e38), "its weights are finite, so its numbers outgrow bfloat16: check the checkpoint and its"),
        (HALF, put(float("nan")), f"the weight {DOWN} holds nan, so the checkpoint is damaged: load another"),
        (HALF, scaled(1e6), f"the weight {DOWN} does not fit in float16: give --dtype bfloat16"),
        (HALF, scaled(3e4), "numbers over 65504 do not fit in float16: give --dtype bfloat16"),
    ],
    ids=["inf", "inf in bfloat16", "overflow", "overflow in bfloat16", "nan in float16", "large", "float16 overflow"],
)
def test_the_remedy_is_that_of_the_cause(dtype, damage, remedy, tmp_path, once_tapped):
    once_tapped(damage)
    with pytest.raises(BeaconScopeError, match=r"that of layer 1; ") as raised:
        record_tiny(tiny_model(num_hidden_layers=3).to(dtype), tmp_path, policy=StreamingLLM(budget=20))
    assert remedy in str(raised.value)
    if dtype is HALF and "nan" not in remedy:
        # THEN the remedy helps
        assert record_tiny(tiny_model(num_hidden_layers=3).to(BRAIN), tmp_path, policy=StreamingLLM(budget=20)).whole


def test_the_embeddings_and_the_head_are_named_too(tmp_path, once_tapped):
    once_tapped(put(float("nan"), "model.embed_tokens.weight", ord("P")))
    with pytest.raises(
        BeaconScopeError, match=r"that of the embeddings; the weight model.embed_tokens.weight holds nan"
    ):
        record_tiny(tiny_model(tie_word_embeddings=False), tmp_path)
    once_tapped(put(float("nan"), "lm_head.weight", 3))
    with pytest.raises(BeaconScopeError, match=r"that of the language-model head; the weight lm_head.weight holds nan"):
        record_tiny(tiny_model(tie_word_embeddings=False), tmp_path)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_what_came_before_is_kept_and_marked_as_cut(policy, sampling, queues, tmp_path, once_tapped):
    whole = record_tiny(tiny_model(), tmp_path, policy=policy, sampling=sampling, name="whole")
    # GIVEN a model that breaks down at the tenth token that it wrote, which is at position 41
    once_tapped(break_at(1, 41))
    with pytest.raises(BeaconScopeError) as raised:
        record_tiny(tiny_model(), tmp_path, policy=policy, sampling=sampling)
    path = tmp_path / "t.parquet"
    assert str(raised.value) == (
        "the model's logits are not finite after 10 new tokens: the first output that is not finite is that of layer "
        "1; its weights are finite, so its numbers outgrow float32: check the checkpoint and its config; what was "
        f"recorded before is in {path}, marked as cut"
    )
    # THEN the nine before it are in a trace that says that it is cut, and no journal is left
    assert not journal_path(path).exists()
    trace = load_trace(path)
    assert (trace.whole, trace.cut_reason) == (False, "the model's logits are not finite after 10 new tokens")
    assert trace.length == 32 + 9
    assert token_ids(trace) == token_ids(whole)[: 32 + 9]
    for at in trace.heads:
        ours, theirs = trace.head(*at), whole.head(*at)
        for name in ("query", "key", "value", "hit_mass", "mass_local"):
            assert np.isfinite(getattr(ours, name)).all()
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name)[:41], atol=1e-5)


def test_the_last_token_has_to_be_finite_too(queues, tmp_path, once_tapped):
    """Its logits are not asked for a token any more, but its queries and keys would be in the trace."""
    once_tapped(break_at(0, 32 + 23))
    with pytest.raises(BeaconScopeError, match=r"after 24 new tokens: .* that of layer 0"):
        record_tiny(tiny_model(), tmp_path)
    assert load_trace(tmp_path / "t.parquet").length == 32 + 23


def test_a_given_completion_stops_where_it_breaks(tmp_path, once_tapped):
    once_tapped(break_at(1, 40))
    with pytest.raises(BeaconScopeError, match="not finite after 9 new tokens"):
        record_tiny(tiny_model(), tmp_path, completion="so 3 + 4 = 7, doubled 14.", policy=POLICIES[1])
    trace = load_trace(tmp_path / "t.parquet")
    assert (trace.length, trace.whole) == (32 + 8, False)


def test_the_first_new_token_breaks(tmp_path, once_tapped):
    once_tapped(break_at(1, 32))
    with pytest.raises(BeaconScopeError, match="not finite after 1 new token:"):
        record_tiny(tiny_model(), tmp_path)
    trace = load_trace(tmp_path / "t.parquet")
    assert (trace.length, trace.whole) == (32, False)


def test_a_batch_names_the_prompt_and_keeps_the_others(queues, tmp_path, once_tapped):
    prompts = [Prompt("a", PROMPT), Prompt("b", PROMPT[:20])]
    options = RecordOptions(raw=True, layers="all", max_new_tokens=24)
    alone = record_tiny(tiny_model(), tmp_path)
    # The second has 20 tokens, so that position 30 is its 11th new one.
    once_tapped(break_at(1, 30, row=1))
    with pytest.raises(BeaconScopeError) as raised:
        record_prompts(tiny_model(), endless_tokenizer(), prompts, options, folder=tmp_path / "f", batch_size=2)
    assert str(raised.value).startswith(
        "prompt a, b: the model's logits of prompt b are not finite after 11 new tokens: "
    )
    first, second = (load_trace(tmp_path / "f" / f"{name}.parquet") for name in "ab")
    # Looked at once in a while, the first has come to its end when that is seen.
    reason = "the model's logits are not finite in prompt b, which ran in the same batch"
    assert (first.whole, first.cut_reason) == ((True, None) if queues else (False, reason))
    assert str(raised.value).endswith(f"; what was recorded before is in {second.path}, marked as cut") == queues
    assert second.length == 20 + 10
    assert token_ids(first) == token_ids(alone)[: first.length]
    # The same command records them again.
    once_tapped(lambda model: None)
    again = record_prompts(tiny_model(), endless_tokenizer(), prompts, options, folder=tmp_path / "f", batch_size=2)
    assert all(load_trace(path).whole for path in again)


def after_head(change):
    """Damage: the logits are changed."""

    def damage(model):
        def spoil(module, args, output):
            change(output)
            return output

        model.lm_head.register_forward_hook(spoil)

    return damage


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_logits_of_minus_infinity_are_legal(sampling, tmp_path, once_tapped):
    once_tapped(after_head(lambda logits: logits[..., 200:].fill_(float("-inf"))))
    trace = record_tiny(tiny_model(), tmp_path, sampling=sampling)
    new = trace.tokens.iloc[trace.prompt_length :]
    assert (new["token_id"] < 200).all()
    assert np.isfinite(new[["logprob", "entropy"]]).all(axis=None)
    # Given tokens may be such; the first byte of this one is 240.
    forced = record_tiny(tiny_model(), tmp_path, name="forced", completion="😀")
    assert forced.tokens["logprob"].iloc[forced.prompt_length] == -math.inf


@pytest.mark.parametrize("change", ["one is infinite", "all are minus infinity", "one is nan"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_rows_that_are_no_distribution_are_not_drawn_from(change, sampling, queues, tmp_path, once_tapped):
    places = {
        "one is infinite": (5, math.inf),
        "all are minus infinity": (slice(None), -math.inf),
        "one is nan": (5, math.nan),
    }
    place, value = places[change]
    count = 0

    def spoil(logits):
        nonlocal count
        count += 1
        if count > 6:  # the prompt, and five tokens
            logits[..., place] = value

    once_tapped(after_head(spoil))
    with pytest.raises(BeaconScopeError, match=r"not finite after 6 new tokens: .* that of the language-model head"):
        record_tiny(tiny_model(), tmp_path, sampling=sampling)


def test_what_only_a_cache_makes_infinite_is_not_blamed_on_a_layer(tmp_path, once_tapped):
    def damage(model):
        def spoil(module, args, kwargs, output):
            return output * float("nan") if output.shape[1] == 1 else output

        model.model.layers[0].register_forward_hook(spoil, with_kwargs=True)

    once_tapped(damage)
    with pytest.raises(BeaconScopeError, match="one pass over the same text without a cache is finite throughout"):
        record_tiny(tiny_model(), tmp_path)


def test_a_pass_that_fails_does_not_hide_why_it_stopped(tmp_path, once_tapped):
    def damage(model):
        def refuse(module, args, kwargs):
            if not kwargs.get("use_cache"):
                raise RuntimeError("this needs a cache")

        break_at(1, 41)(model)
        model.register_forward_pre_hook(refuse, with_kwargs=True)

    once_tapped(damage)
    with pytest.raises(BeaconScopeError, match=r"10 new tokens: the pass .* fails \(this needs a cache\);"):
        record_tiny(tiny_model(), tmp_path)


def test_a_head_that_is_not_finite_though_the_logits_are_is_said(tmp_path, monkeypatch):
    notes = []
    spoils = [
        at_position("key", float("inf"), 0, 3, 1, 0),
        at_position("query", float("nan"), 0, 35, 0, 1, 2),
        at_position("value", float("nan"), 0, 36, 0, 1),
    ]
    block = recorder._HeadCopy.block

    def spoiled_block(self, row, length):
        found = block(self, row, length)
        for spoil in spoils if found is not None else ():
            spoil(found)
        return found

    monkeypatch.setattr(recorder._HeadCopy, "block", spoiled_block)
    options = RecordOptions(raw=True, layers="all", max_new_tokens=8)
    model = tiny_model(num_hidden_layers=1)
    trace = record(model, endless_tokenizer(), PROMPT, options, output=tmp_path / "t.parquet", note=notes.append)
    assert trace.whole
    assert (
        "Queries, keys or values are not finite in layer 0 head 0 (2 positions) and layer 0 head 1 (1 position), "
        "though the logits are; analyze and replay leave them out."
    ) in notes


def test_a_live_check_stops_too(tmp_path, once_tapped):
    trace = record_tiny(tiny_model(), tmp_path, policy=Full())
    once_tapped(break_at(1, 40))
    with pytest.raises(BeaconScopeError, match=r"under full .* not finite after 9 new tokens: .* that of layer 1"):
        check_live(tiny_model(), endless_tokenizer(), trace, [POLICIES[1]])
    once_tapped(break_at(1, 31))
    with pytest.raises(BeaconScopeError, match=r"under full .* not finite after the prompt: .* that of layer 1"):
        check_live(tiny_model(), endless_tokenizer(), trace, [POLICIES[1]])
    # Where the recorded text is well, and what a setting writes is not.
    trace.metadata["options"]["max_new_tokens"] = 40
    once_tapped(break_at(1, 32 + 30))
    with pytest.raises(BeaconScopeError, match=r"under full .* not finite after 31 new tokens: .* that of layer 1"):
        check_live(tiny_model(), endless_tokenizer(), trace, [POLICIES[1]])


def test_numbers_too_large_for_the_trace_are_refused_with_a_remedy(tmp_path):
    def large():
        model = tiny_model(num_hidden_layers=1)
        model.model.layers[0].self_attn.v_proj.weight.data.mul_(1e6)
        return model

    with pytest.raises(BeaconScopeError, match=r"does not fit in float16 .*--dtype-trace float32; nothing is recorded"):
        record_tiny(large(), tmp_path, vector_type="float16")
    assert list(tmp_path.iterdir()) == []
    assert record_tiny(large(), tmp_path, vector_type="float32").whole
