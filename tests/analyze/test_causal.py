"""The long-range gain against one whole forward pass in which one sentence is blinded."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from beaconscope import AnalyzeOptions, BeaconScopeError, analyze, load_trace
from beaconscope.analyze import add_causal
from beaconscope.analyze.causal import long_range_gain
from beaconscope.analyze.sentences import Sentences
from beaconscope.models import tap
from tests.analyze.made import Plan, plant
from tests.models.test_probe import ALTERNATING, made
from tests.tiny import tiny_model

LENGTH, PROMPT, WINDOW, SINKS = 48, 10, 12, [0, 1]


def sentences() -> Sentences:
    start = np.array([0, 7, 20, 31])
    stop = np.array([7, 20, 31, LENGTH])
    return Sentences(start, stop, np.repeat(np.arange(4), stop - start))


def logprob_with(model, token_id, blind: slice | None):
    """Log-probability of each next token in one pass over everything, the rows in ``blind`` limited."""
    if blind is None:
        with torch.inference_mode():
            logits = model(input_ids=token_id[None]).logits[0]
        return logits[:-1].log_softmax(-1).gather(-1, token_id[1:, None])[:, 0].numpy()
    position = torch.arange(LENGTH)
    visible = position[None] <= position[:, None]
    near = (position[:, None] - position[None] <= WINDOW) | (position[None] < len(SINKS))
    visible[blind] &= near[blind]
    sliding = visible & (position[None] > position[:, None] - 16)
    full, short = (
        torch.zeros(LENGTH, LENGTH).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        for seen in (visible, sliding)
    )
    mixed = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    mask = {"full_attention": full, "sliding_attention": short} if mixed else full
    with torch.inference_mode():
        logits = model(input_ids=token_id[None], attention_mask=mask).logits[0]
    return logits[:-1].log_softmax(-1).gather(-1, token_id[1:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "phi3"])
def test_gain_is_that_of_blinding_one_sentence_of_a_whole_pass(name):
    model = tiny_model(name)
    token_id = torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(0))
    told = []
    gain, logprob = long_range_gain(
        model, token_id, PROMPT, sentences(), WINDOW, SINKS, lambda done, total: told.append((done, total))
    )
    whole = logprob_with(model, token_id, None)
    assert np.isnan(gain[: PROMPT - 1]).all() and np.isnan(gain[-1])
    assert np.allclose(logprob[PROMPT - 1 : -1], whole[PROMPT - 1 :], atol=1e-4)
    for start, stop in ((20, 31), (31, LENGTH)):
        rows = slice(start, min(stop, LENGTH - 1))
        expected = (whole - logprob_with(model, token_id, slice(start, stop)))[rows]
        assert np.allclose(gain[rows], expected, atol=1e-4)
        assert np.abs(expected).max() > 0.01
    # The prompt counts, up to the sentence that the first step is in.
    assert told[:2] == [(0, LENGTH), (7, LENGTH)]
    assert told[-1] == (LENGTH, LENGTH)


def test_the_analysis_gets_gains_and_a_comparison(tmp_path):
    path = plant(tmp_path / "trace.parquet", Plan(length=150, prompt_length=40, strength=18)).path
    trace = load_trace(path)
    found = add_causal(trace, analyze(trace, AnalyzeOptions(cluster_heads=0)), tiny_model("llama"))
    assert found.tokens["gain"].notna().sum() == 150 - 40
    assert found.causal["steps"] == found.summary["steps"] - 1
    assert found.causal["both"] <= min(found.causal["revisits"], found.causal["mattering"])
    assert "gain" in found.revisits
    assert found.to_dict()["causal"]["threshold"] == 1.0


@pytest.mark.parametrize(
    "model",
    [
        lambda: tiny_model("mistral", sliding_window=16),
        lambda: tiny_model("phi3", sliding_window=16),
        lambda: made("exaone4", sliding_window=16, layer_types=ALTERNATING),
        lambda: made("cohere2", sliding_window=16, layer_types=ALTERNATING),
    ],
)
def test_sliding_layers_see_their_window_only(model):
    model = model()
    token_id = torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(0))
    _, logprob = long_range_gain(model, token_id, PROMPT, sentences(), WINDOW, SINKS)
    assert np.allclose(logprob[PROMPT - 1 : -1], logprob_with(model, token_id, None)[PROMPT - 1 :], atol=1e-4)


@pytest.mark.parametrize("position", [3, LENGTH - 2])
def test_logits_that_are_not_finite_are_no_gain(position, monkeypatch):
    def tap_and_damage(model):
        tapped = tap(model)

        def spoil(module, args, kwargs, output):
            return output.masked_fill((kwargs["position_ids"] == position)[..., None], float("nan"))

        # A model that is damaged before is refused by the tap.
        model.model.layers[1].register_forward_hook(spoil, with_kwargs=True)
        return tapped

    monkeypatch.setattr(importlib.import_module("beaconscope.analyze.causal"), "tap", tap_and_damage)
    model = tiny_model()
    token_id = torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(0))
    with pytest.raises(BeaconScopeError, match=f"not finite after {position + 1} of {LENGTH} tokens: .* of layer 1; "):
        long_range_gain(model, token_id, PROMPT, sentences(), WINDOW, SINKS)


def test_a_model_that_cannot_be_blinded_is_refused():
    with pytest.raises(BeaconScopeError, match="tokens that this model lacks"):
        long_range_gain(tiny_model(), torch.full((LENGTH,), 5000), PROMPT, sentences(), WINDOW, SINKS)
    token_id = torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(0))
    chunked = made("llama4_text", attention_chunk_size=20, intermediate_size_mlp=64, num_local_experts=2)
    with pytest.raises(BeaconScopeError, match="attends in another way past 20 tokens"):
        long_range_gain(chunked, token_id, PROMPT, sentences(), WINDOW, SINKS)
    # Its forward puts a mask of its own in the place of what it is given.
    deaf = tiny_model("gemma3_text")
    plain = deaf.model.forward
    deaf.model.forward = lambda attention_mask=None, **kwargs: plain(**kwargs)
    with pytest.raises(BeaconScopeError, match="does not take masks"):
        long_range_gain(deaf, token_id, PROMPT, sentences(), WINDOW, SINKS)
