"""The sweep finds faults, survives what an architecture does to it, and gives what the page of models says."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest
import torch
import transformers

from beaconscope import BeaconKV, Full
from testing.architectures import checks, examine, sweep
from testing.architectures.configs import architectures, tiny_config
from testing.architectures.models import tiny_model
from testing.architectures.page import PAGE, page
from testing.architectures.results import NOTED, REFUSED, RIGHT, TRACEBACK, UNBUILT, Result, load
from testing.architectures.twin import Twin
from testing.architectures.variants import AS_IT_IS, variants
from tests.record.recording import attentions_of, record_tiny

# One of each kind: windows, chunks, sinks, latent attention, shared keys, no rotary embedding, several rotary
# embeddings, scaled by position, not causal, not softmax, and one whose text would cross a switch.
SAMPLE = [
    ("llama", "longrope past its switch"),
    ("mistral", AS_IT_IS),
    ("mistral", "short window"),
    ("gemma3_text", "short window in every other layer"),
    ("gemma3n_text", "shared keys and values"),
    ("llama4_text", "short chunks"),
    ("gpt_oss", "short window in every other layer"),
    ("deepseek_v3", "yarn"),
    ("exaone4", "short window"),
    ("gpt2", AS_IT_IS),
    ("gpt_neox", AS_IT_IS),
    ("ministral3", "temperature by position"),
    ("bert", AS_IT_IS),
    ("mamba", AS_IT_IS),
]
KEPT_VERSION, KEPT = load()


def kept_at(architecture: str) -> set[str]:
    return {each.variant for each in KEPT if each.architecture == architecture}


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "variant"), SAMPLE, ids=lambda name: name.replace(" ", "-"))
def test_an_architecture_is_right_or_refused_as_the_page_says(architecture: str, variant: str) -> None:
    if architecture not in architectures() or variant not in variants(architecture):
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    result = sweep.examine_variant(architecture, variant)
    assert result.status in (RIGHT, NOTED, REFUSED), result.details
    if transformers.__version__ == KEPT_VERSION:
        assert result in KEPT, "run `make models` and commit what it writes"


def test_the_page_is_written_from_the_kept_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(KEPT_VERSION, KEPT), "run `make models` and commit what it writes"


def test_no_kept_result_is_a_fault() -> None:
    assert [each for each in KEPT if each.status not in (RIGHT, NOTED, REFUSED, UNBUILT)] == []


@pytest.mark.skipif(transformers.__version__ != KEPT_VERSION, reason="the results are of another transformers")
def test_every_causal_architecture_has_its_row() -> None:
    assert list(dict.fromkeys(each.architecture for each in KEPT)) == architectures()
    for architecture in ("llama", "mistral", "gemma3_text", "gpt2"):
        assert kept_at(architecture) == set(sweep.tried(architecture))


def test_the_twin_gives_the_weights_that_transformers_hands_out() -> None:
    config = tiny_config("gemma3_text", **variants("gemma3_text")["short window in every other layer"])
    tokens = list(b"the quick brown fox jumps over it")
    given = attentions_of(tiny_model(config, "eager"), tokens)
    for attn in ("eager", "sdpa"):
        weights = Twin(config, attn).run(tokens).weights
        assert sorted(weights) == [0, 1, 2, 3]
        for layer, each in weights.items():
            torch.testing.assert_close(each, torch.from_numpy(given[layer]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_what_is_hidden_from_the_twin_gets_no_weight(attn: str) -> None:
    twin = Twin(tiny_config("llama"), attn)
    tokens = list(range(40, 60))
    hidden = torch.zeros(4, 20, 20, dtype=torch.bool)
    hidden[1, 10:, 3] = True
    plain, masked = twin.run(tokens), twin.run(tokens, {0: hidden})
    assert (masked.weights[0][1, 10:, 3] == 0).all()
    assert (masked.weights[0][1, :10, 3] == plain.weights[0][1, :10, 3]).all()
    torch.testing.assert_close(masked.weights[0].sum(-1), torch.ones(4, 20))
    assert (masked.weights[0][0] == plain.weights[0][0]).all()
    assert not torch.allclose(masked.logits[12], plain.logits[12])


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_padding_changes_nothing_for_the_twin(attn: str) -> None:
    overrides = variants("gemma3_text")["short window in every other layer"]
    twin = Twin(tiny_config("gemma3_text", **overrides), attn)
    tokens = list(range(40, 70))
    hidden = {1: torch.zeros(4, 30, 30, dtype=torch.bool)}
    hidden[1][2, 9:, 4] = True
    alone, padded = twin.run(tokens, hidden), twin.run(tokens, hidden, padding=5)
    torch.testing.assert_close(padded.logits, alone.logits, atol=1e-4, rtol=0)
    for layer, weights in alone.weights.items():
        torch.testing.assert_close(padded.weights[layer], weights, atol=1e-5, rtol=0)


def test_numbers_of_another_window_are_found(tmp_path) -> None:
    overrides = variants("gemma3_text")["short window in every other layer"]
    trace = record_tiny(tiny_model(tiny_config("gemma3_text", **overrides)), tmp_path, policy=Full())
    ids = checks.token_ids(trace)
    right = Twin(tiny_config("gemma3_text", **overrides)).run(ids)
    other = Twin(tiny_config("gemma3_text", **{**overrides, "sliding_window": 13})).run(ids)
    assert checks.check_attention(trace, right) + checks.check_logprobs(trace, right) == []
    found = " ".join(checks.check_attention(trace, other) + checks.check_logprobs(trace, other))
    for what in ("hits", "masses", "recomputed attention", "logprob"):
        assert what in found


def test_a_compressed_recording_is_not_that_of_a_full_cache(tmp_path) -> None:
    config = tiny_config("llama")
    policy = BeaconKV(budget=16, interval=4, recent=4, beacons=2)
    trace = record_tiny(tiny_model(config), tmp_path, policy=policy)
    twin = Twin(config)
    full, masked = (twin.run(checks.token_ids(trace), hidden) for hidden in (None, checks.hidden_entries(trace)))
    assert checks.check_attention(trace, masked) + checks.check_logprobs(trace, masked) == []
    assert len(checks.check_attention(trace, full)) == 3
    assert checks.check_evictions(trace, policy, full, silent=True) == []
    other = dataclasses.replace(policy, budget=12)
    found = " ".join(checks.check_evictions(trace, other, full, silent=True))
    assert "more than 16" in found
    assert "replay evicts otherwise" in found


def test_a_cache_that_silently_keeps_all_is_found(tmp_path) -> None:
    config = tiny_config("llama")
    trace = record_tiny(tiny_model(config), tmp_path, policy=Full())
    truth = Twin(config).run(checks.token_ids(trace))
    found = checks.check_evictions(trace, BeaconKV(budget=16, interval=4, recent=4, beacons=2), truth, silent=True)
    assert found == ["nothing was evicted from layers [0, 1, 2, 3], which see everything, and nothing says so"]


def test_an_exception_of_the_tool_is_a_traceback(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("broken\nin two lines")

    monkeypatch.setattr(examine.beaconscope, "record", fail)
    result = examine.examine("llama", AS_IT_IS, tiny_config("llama"), tmp_path)
    assert result.status == TRACEBACK
    assert result.details[0].startswith("full cache: RuntimeError: broken in two lines (")


def test_no_architecture_ends_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(architecture: str, variant: str) -> Result:
        if architecture == "dies":
            os._exit(3)
        if architecture == "hangs":
            time.sleep(60)
        return Result(architecture, variant, RIGHT)

    monkeypatch.setattr(sweep, "examine_variant", act)
    monkeypatch.setattr(sweep, "SECONDS", 3)
    results = {each.architecture: each for each in sweep.sweep(["dies", "hangs", "works", "works too"])}
    assert {name: each.status for name, each in results.items()} == {
        "dies": TRACEBACK,
        "hangs": TRACEBACK,
        "works": RIGHT,
        "works too": RIGHT,
    }
    assert results["dies"].details == ["the process died with 3"]
    assert results["hangs"].details == ["it took longer than 3 s"]
