"""Settings run with the model, against recordings made with the same settings."""

from __future__ import annotations

import numpy as np
import pytest

from beaconscope import BeaconKV, BeaconScopeError, Full, StreamingLLM, UsageError
from beaconscope.kv.policies import H2O, Oracle
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
