"""A real model, recorded compressed and full."""

from __future__ import annotations

import numpy as np
import pytest

from beaconscope import BeaconKV, Full, LoadOptions, RecordOptions, load_model, record

pytestmark = [pytest.mark.smollm2, pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPT = "First write a plan of three steps for baking bread, then carry out each step in detail."
NEW = 300
POLICY = BeaconKV(budget=128, interval=32)


@pytest.fixture(scope="module")
def loaded(smollm2_gguf):
    return load_model(LoadOptions(str(smollm2_gguf)))


@pytest.fixture(scope="module")
def compressed(loaded, tmp_path_factory):
    options = RecordOptions(policy=POLICY, max_new_tokens=NEW)
    return record(loaded.model, loaded.tokenizer, PROMPT, options, output=tmp_path_factory.mktemp("c") / "t.parquet")


@pytest.fixture(scope="module")
def full(loaded, tmp_path_factory):
    options = RecordOptions(policy=Full(), shadow=POLICY, max_new_tokens=NEW)
    return record(loaded.model, loaded.tokenizer, PROMPT, options, output=tmp_path_factory.mktemp("f") / "t.parquet")


def test_the_text_is_what_the_model_writes(full):
    assert PROMPT in full.text
    assert "bread" in full.text[full.text.index(PROMPT) + len(PROMPT) :]


def test_a_compressed_cache_never_holds_more_than_budget_and_interval(compressed):
    assert compressed.length > POLICY.budget + POLICY.interval
    for layer, head in compressed.heads:
        evictions = compressed.evictions(layer, head)
        assert evictions
        for eviction in evictions:
            assert len(compressed.kept(layer, head, eviction.position)) == POLICY.budget
        assert len(compressed.kept(layer, head, compressed.length - 1)) <= POLICY.budget + POLICY.interval


def test_a_full_cache_evicts_nothing_and_follows_the_beacons(full):
    for layer, head in full.heads:
        assert full.evictions(layer, head) == []
        assert len(full.beacons(layer, head)) > 0


def test_both_write_the_same_until_the_first_compression(compressed, full):
    first = min(compressed.evictions(*head)[0].position for head in compressed.heads)
    ids = [trace.tokens["token_id"].to_numpy()[: first + 1] for trace in (compressed, full)]
    np.testing.assert_array_equal(*ids)


def test_the_masses_of_a_query_sum_to_one(full):
    layer, head = full.heads[0]
    found = full.head(layer, head)
    total = found.mass_sink + found.mass_local + found.mass_distant
    np.testing.assert_allclose(total, 1, atol=1e-4)
