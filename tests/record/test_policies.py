"""A recording made with any policy says what was evicted."""

from __future__ import annotations

import string

import numpy as np
import pytest

from tests.kv.rivals import CASES, expected
from tests.kv.test_rivals import ONE_OF_EACH, rope
from tests.record.recording import evictions_of, record_tiny, token_ids
from tests.tiny import tiny_model

# Of what ASCII calls punctuation, Unicode calls these symbols.
PUNCTUATION = set(string.punctuation) - set("$+<=>^`|~")


def kind(token):
    if token >= 256:
        return "special"
    return "punctuation" if chr(token) in PUNCTUATION else "plain"


@pytest.mark.parametrize("case", [*ONE_OF_EACH, "fastgen kinds"])
def test_a_trace_tells_what_the_policy_evicted(case, tmp_path):
    # GIVEN a recording
    policy, reading = CASES[case]
    trace = record_tiny(tiny_model("llama"), tmp_path, policy=policy, max_new_tokens=32)
    heads = [trace.head(1, head) for head in range(2)]
    query, key, value = (
        np.stack([getattr(head, name) for head in heads]) for name in ("query", "key", "value")
    )  # [H, T, G, D] and [H, T, D]
    # WHEN the rule is followed with what it holds
    wanted = expected(reading(rope(16)), query, key, value, trace.prompt_length, list(map(kind, token_ids(trace))))
    # THEN just that was evicted
    assert wanted
    for head in range(2):
        for compression in wanted:
            kept = trace.kept(1, head, compression.position)
            assert kept.tolist() == compression.sets[head]
    assert trace.attention_over == "what the cache held"


def test_a_part_of_the_heads_is_recorded_as_among_all_of_them(tmp_path):
    policy = CASES["fastgen kinds"][0]
    every = record_tiny(tiny_model("gemma3_text"), tmp_path, name="every", policy=policy)
    one = record_tiny(tiny_model("gemma3_text"), tmp_path, name="one", policy=policy, heads="1")
    assert any(eviction.evicted.size for eviction in every.evictions(1, 1))
    assert evictions_of(one, (1, 1)) == evictions_of(every, (1, 1))
    ours, theirs = one.head(1, 1), every.head(1, 1)
    for name in ("mass_sink", "mass_local", "mass_distant", "hit_mass"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-5)


def test_what_works_in_replay_only_is_refused_before_a_model_is_loaded(run, here):
    result = run("record", "--model", here, "--prompt", "plan.txt", "--cache", "oracle")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: oracle works in replay only; record with --cache full and give replay --policy oracle\n"
    )
