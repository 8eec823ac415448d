"""A given chain of thought is fed, not generated, and everything else is as if it had been generated."""

from __future__ import annotations

import numpy as np
import pytest

from beaconscope import BeaconKV, BeaconScopeError, Full, RecordOptions, StreamingLLM, UsageError
from beaconscope.record import Prompt, generate, record_prompts
from tests.record.recording import endless_tokenizer, evictions_of, record_tiny, token_ids
from tests.tiny import EOS, THINK_CLOSE, THINK_OPEN, tiny_model

SMALL = {"budget": 20, "interval": 6, "beacons": 4, "recent": 3, "pool_low": 6, "pool_high": 12}
POLICIES = {
    "beacon": BeaconKV(**SMALL),
    "random": BeaconKV(**SMALL, selector="random"),
    "streaming-llm": StreamingLLM(budget=20, sinks=2),
    "full": Full(),
}
NEW = 45


@pytest.mark.parametrize(("name", "at_once"), [*((name, 256) for name in POLICIES), ("beacon", 4), ("full", 4)])
def test_forcing_what_was_generated_gives_the_same_trace(name, at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "_FORCED_AT_ONCE", at_once)
    options = {"policy": POLICIES[name], "shadow": BeaconKV(**SMALL), "max_new_tokens": NEW}
    # GIVEN a text that the model wrote, of tokens that can be written down
    model = tiny_model("llama", seed=1)
    first = record_tiny(model, tmp_path, name="first", **options)
    text = first.text[len(first.prompt) :].encode("ascii", "ignore").decode()
    # WHEN it is forced, once and then again in whatever pieces
    one_by_one = _generated(model, tmp_path, text, options)
    forced = record_tiny(model, tmp_path, name="forced", completion=text, **options)
    # THEN both speak of the same tokens, and did the same with them
    assert token_ids(forced) == token_ids(one_by_one)
    assert forced.text == first.prompt + text
    assert forced.options["teacher_forced"]
    assert forced.heads == one_by_one.heads
    np.testing.assert_allclose(forced.tokens["logprob"], one_by_one.tokens["logprob"], atol=1e-4)
    np.testing.assert_allclose(forced.tokens["entropy"], one_by_one.tokens["entropy"], atol=1e-4)
    for at in forced.heads:
        assert evictions_of(forced, at) == evictions_of(one_by_one, at)
        assert bool(forced.evictions(*at)) == (name != "full")
        frames = [trace.beacons(*at)[["position", "query_head", "source", "members"]] for trace in (forced, one_by_one)]
        assert frames[0].equals(frames[1])
        ours, theirs = forced.head(*at), one_by_one.head(*at)
        np.testing.assert_array_equal(ours.beacon, theirs.beacon)
        for field in (
            "query",
            "key",
            "value",
            "beacon_similarity",
            "mass_sink",
            "mass_local",
            "mass_distant",
            "hit_mass",
        ):
            np.testing.assert_allclose(getattr(ours, field), getattr(theirs, field), atol=1e-4)


def _generated(model, folder, text, options):
    """Record ``text`` token by token, through the way that generated tokens go."""
    from beaconscope.record.draw import Draw

    ids = endless_tokenizer()(text).input_ids
    queue = list(ids)
    drawn = Draw.__call__
    Draw.__call__ = lambda self, logits: logits.argmax(-1) * 0 + queue.pop(0)
    try:
        return record_tiny(model, folder, name="generated", **{**options, "max_new_tokens": len(ids)})
    finally:
        Draw.__call__ = drawn


def test_thinking_is_told_from_the_answer(tmp_path):
    trace = record_tiny(tiny_model(), tmp_path, completion="<think>3+4=7, twice</think>14", policy=Full())
    tokens = trace.tokens
    phases = {phase: b"".join(part["token_bytes"]).decode() for phase, part in tokens.groupby("phase", observed=True)}
    assert phases == {"prompt": trace.prompt, "think": "<think>3+4=7, twice</think>", "answer": "14"}
    assert [i for i in tokens["token_id"] if i >= 256] == [THINK_OPEN, THINK_CLOSE]


def test_think_markers_may_be_others_and_need_not_be_tokens(tmp_path):
    trace = record_tiny(
        tiny_model(),
        tmp_path,
        completion="[reason]7[/reason]14",
        policy=Full(),
        think_open="[reason]",
        think_close="[/reason]",
    )
    phases = trace.tokens.groupby("phase", observed=True)["token_bytes"].sum()
    assert phases["think"] == b"[reason]7[/reason]"
    assert phases["answer"] == b"14"


def test_an_end_token_within_a_given_text_ends_nothing(tmp_path):
    model = tiny_model(eos_token_id=EOS)
    trace = record_tiny(model, tmp_path, completion="one<eos>two", policy=Full())
    assert trace.text.endswith("one<eos>two")
    assert trace.whole


def test_a_given_text_is_not_cut_by_max_new_tokens_and_refused_over_the_context(tmp_path):
    trace = record_tiny(tiny_model(), tmp_path, completion="seven", max_new_tokens=2, policy=Full())
    assert trace.text.endswith("seven")
    with pytest.raises(BeaconScopeError, match=r"prompt and completion have 41 tokens.*context is 40"):
        record_tiny(tiny_model(max_position_embeddings=40), tmp_path, "x" * 20, name="n", completion="y" * 21)
    assert not (tmp_path / "n.parquet").exists()


def test_a_completion_of_many_prompts_is_refused(tmp_path):
    with pytest.raises(UsageError, match="give each prompt its own"):
        record_prompts(
            tiny_model(), endless_tokenizer(), [Prompt("a", "b")], RecordOptions(completion="c"), folder=tmp_path / "f"
        )
    assert not (tmp_path / "f").exists()
