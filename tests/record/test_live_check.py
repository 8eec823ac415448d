"""Settings run with the model, against recordings made with the same settings."""

from __future__ import annotations

import numpy as np
import pytest

from beaconscope import BeaconKV, BeaconScopeError, Full, StreamingLLM, UsageError
from beaconscope.kv.policies import H2O, RPC, FastGen, Oracle
from beaconscope.record import Sampling, check_live
from tests.record.recording import endless_tokenizer, record_tiny, token_ids
from tests.tiny import tiny_model

BEACON = BeaconKV(budget=20, interval=6, beacons=3, recent=4)
SAMPLED = Sampling(temperature=1.0, seed=3)


def perplexity(trace):
    return np.exp(-trace.tokens["logprob"].to_numpy()[trace.prompt_length :].astype(np.float64).mean())


@pytest.mark.parametrize("policy", [BEACON, StreamingLLM(budget=20), H2O(budget=20)], ids=lambda policy: policy.name)
def test_a_setting_does_what_its_recording_did(policy, tmp_path):
    # GIVEN a recording under a setting, with a seed
    trace = record_tiny(tiny_model(), tmp_path, policy=policy, sampling=SAMPLED, max_new_tokens=40)
    heard = []
    # WHEN the setting is run on it again
    full, again = check_live(
        tiny_model(), endless_tokenizer(), trace, [policy], lambda done, total: heard.append((done, total))
    )
    # THEN the recorded text is as likely as it was
    assert again.forced.tokens == 40
    assert again.forced.perplexity == pytest.approx(perplexity(trace), rel=1e-4)
    assert again.forced.kl > 0
    assert again.forced.kl_most >= again.forced.kl
    # AND left to itself it writes what it wrote, and the full cache what that wrote
    whole = record_tiny(tiny_model(), tmp_path, policy=Full(), sampling=SAMPLED, max_new_tokens=40, name="full")
    texts = [np.array(token_ids(each)[each.prompt_length :]) for each in (trace, whole)]
    other = np.flatnonzero(texts[0] != texts[1])
    assert again.free.first_divergence == (None if len(other) == 0 else other[0])
    assert again.free.agreement == pytest.approx((texts[0] == texts[1]).mean())
    assert heard[-1] == (160, 160)
    assert full.policy == Full()


def test_the_full_cache_is_its_own_measure(tmp_path):
    trace = record_tiny(tiny_model(), tmp_path, policy=Full(), max_new_tokens=30)
    (full,) = check_live(tiny_model(), endless_tokenizer(), trace, [])
    assert (full.forced.kl, full.forced.agreement) == (0, 1)
    assert full.forced.perplexity == pytest.approx(perplexity(trace), rel=1e-4)
    assert (full.free.first_divergence, full.free.agreement, full.free.same_answer) == (None, 1, True)
    assert full.free.right is None


@pytest.mark.parametrize(
    ("policy", "evicts"),
    [
        # 32 tokens of the prompt and 30 written ones: 62, of which the query at position 60 predicts the last.
        # A compression at position 59 is the last that this query notices; a cache of 60 entries fires there.
        (StreamingLLM(budget=59), True),
        (StreamingLLM(budget=60), False),
        (BeaconKV(budget=50, interval=10, beacons=3, recent=4), True),
        (BeaconKV(budget=50, interval=11, beacons=3, recent=4), False),
        # Whether it evicts anything depends on what the heads attend to: with recovery of 1 all take everything.
        (FastGen(interval=4, recovery=1.0), False),
        (FastGen(interval=4, recovery=0.0), True),
        (RPC(period=28, recent=4), True),
        (RPC(period=29, recent=4), False),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_evicted_nothing_has_no_measures(policy, evicts, tmp_path):
    trace = record_tiny(tiny_model(), tmp_path, policy=Full(), max_new_tokens=30)
    full, again = check_live(tiny_model(), endless_tokenizer(), trace, [policy])
    assert (full.forced.evicted, full.forced.kl, full.free.same_answer) == (0, 0, True)
    for part in (again.forced, again.free):
        assert part.tokens == 30
        assert (part.evicted > 0) == evicts
    measures = {
        **{name: value for name, value in again.to_dict()["forced"].items() if name not in ("tokens", "evicted")},
        **{name: again.to_dict()["free"][name] for name in ("agreement", "same_answer")},
    }
    assert {value is None for value in measures.values()} == {not evicts}
    if not evicts:
        assert again.free.first_divergence is None
        assert again.free.right is None


def test_evictions_are_counted_over_layers_and_heads(tmp_path):
    trace = record_tiny(tiny_model(), tmp_path, policy=Full(), max_new_tokens=30)
    policies = [StreamingLLM(budget=50), BeaconKV(budget=20, interval=6, beacons=3, recent=4)]
    _, streaming, beacon = check_live(tiny_model(), endless_tokenizer(), trace, policies)
    # Before the query at position 60 there were 60 tokens, of which 50 are left; in 2 layers of 2 KV heads.
    assert streaming.forced.evicted == streaming.free.evicted == 4 * 10
    # The prompt of 32 leaves 20, then every 6th token compresses: at 37, 43, 49 and 55. Four tokens came after that.
    assert beacon.forced.evicted == 4 * (60 - 20 - 4)


def test_what_was_recorded_may_evict_nothing_and_what_is_written_something(tmp_path):
    """A recording that ended early, and a cache that fills only where the model goes on."""
    tokenizer = endless_tokenizer()
    trace = record_tiny(tiny_model(), tmp_path, policy=Full(), max_new_tokens=30)
    trace.metadata["options"]["max_new_tokens"] = 60
    _, again = check_live(tiny_model(), tokenizer, trace, [StreamingLLM(budget=70)])
    assert (again.forced.evicted, again.forced.kl) == (0, None)
    assert again.free.evicted == 4 * (32 + 60 - 2 - 70)
    assert again.free.agreement is not None


def test_a_prompt_in_chunks_is_fed_in_chunks(tmp_path):
    trace = record_tiny(tiny_model(), tmp_path, "x y, z " * 9, policy=BEACON, max_new_tokens=20, prefill_chunk=13)
    again = check_live(tiny_model(), endless_tokenizer(), trace, [BEACON])[1]
    assert again.forced.perplexity == pytest.approx(perplexity(trace), rel=1e-4)


def test_what_cannot_be_run_is_refused(tmp_path):
    trace = record_tiny(tiny_model(), tmp_path, policy=Full(), max_new_tokens=4)
    with pytest.raises(BeaconScopeError, match=r"of another model .*num_hidden_layers is 2, not 1.*--model"):
        check_live(tiny_model(num_hidden_layers=1), endless_tokenizer(), trace, [])
    with pytest.raises(UsageError, match="replay only"):
        check_live(tiny_model(), endless_tokenizer(), trace, [Oracle(budget=20)])
