"""What is said and refused before a recording starts, and what is said after it."""

from __future__ import annotations

import re

import pytest
import torch

from beaconscope import BeaconKV, BeaconScopeError, Full, RecordOptions, StreamingLLM, UsageError, record
from beaconscope.kv.policies import H2O, ScissorHands
from beaconscope.models import tap
from beaconscope.record import Prompt, plan, record_prompts
from beaconscope.selection import select
from tests.record.recording import PROMPT, endless_tokenizer, generate_plainly, record_tiny
from tests.tiny import CHAT_TEMPLATE, EOS, tiny_model, tiny_tokenizer


@pytest.mark.parametrize(
    ("text", "count", "chosen"),
    [
        ("all", 3, (0, 1, 2)),
        ("auto", 3, (0, 1, 2)),
        ("auto", 6, (0, 1, 2, 3, 4, 5)),
        ("auto", 36, (0, 7, 14, 21, 28, 35)),
        ("0,2", 3, (0, 2)),
        ("2,0,2", 3, (0, 2)),
        (" 1 , 2 ", 3, (1, 2)),
        ("0-8:2", 9, (0, 2, 4, 6, 8)),
        ("0-7:2", 9, (0, 2, 4, 6)),
        ("0-2,8,4-6", 9, (0, 1, 2, 4, 5, 6, 8)),
        ("5-5", 9, (5,)),
    ],
)
def test_lists_of_layers(text, count, chosen):
    assert select(text, count, "layers") == chosen


@pytest.mark.parametrize(
    "text", ["", ",", "1,", "-1", "1-", "2-1", "0-4:0", "0-4:", "a", "1.5", "0x1", "²", "0--1", "1:2:3"]
)
def test_what_is_no_list_is_refused(text):
    with pytest.raises(UsageError, match="is no list"):
        select(text, 9, "layers")


def test_layers_that_are_not_there_are_refused_with_those_that_are():
    with pytest.raises(UsageError, match=re.escape("layers '0,9' goes to 9, but there are 9 (0 to 8)")):
        select("0,9", 9, "layers")


def realistic(dtype):
    """Two layers with the heads of a small Llama."""
    return tiny_model(
        "llama",
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.05,
    ).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "vector_type", "values"),
    [
        (torch.float32, "auto", True),
        (torch.float32, "auto", False),
        (torch.bfloat16, "auto", True),
        (torch.bfloat16, "float16", True),
    ],
)
def test_the_size_that_is_announced_is_about_that_of_the_file(dtype, vector_type, values, tmp_path):
    model = realistic(dtype)
    text = " ".join(f"Step {i}: {i * 37 % 101} plus {i} is {i * 37 % 101 + i}." for i in range(44))
    notes = []
    settings = RecordOptions(
        policy=Full(), raw=True, completion=text, layers="all", vector_type=vector_type, values=values
    )
    trace = record(model, endless_tokenizer(), PROMPT, settings, output=tmp_path / "t.parquet", note=notes.append)
    assert trace.length > 1000
    (note,) = (note for note in notes if note.startswith("The trace takes"))
    what = rf"2 layers, 4 KV heads in all, {len(PROMPT)} \+ {len(text)} tokens"
    announced = 1e6 * float(re.fullmatch(rf"The trace takes at most about ([\d.]+) MB: {what}\.", note)[1])
    actual = trace.path.stat().st_size
    assert 0.7 * actual < announced < 1.3 * actual


def test_a_four_billion_model_at_32k_tokens_is_about_what_the_docs_say():
    """36 layers of 8 KV heads, groups of 4, 128 dimensions, bfloat16; six of them are recorded."""
    from beaconscope.trace import LayerLayout, TraceLayout, estimate_bytes

    layers = tuple(LayerLayout(layer, tuple(range(8)), 4, 128, 128) for layer in range(6))
    size = estimate_bytes(TraceLayout(layers, "float32", 8), 32_768, model_dtype="bfloat16")
    assert 1.4e9 < size < 2.6e9


def test_what_the_disk_cannot_hold_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 100_000)
    with pytest.raises(BeaconScopeError) as caught:
        record_tiny(tiny_model(), tmp_path, max_new_tokens=4000)
    said = str(caught.value)
    assert f"{tmp_path} has 100 kB free" in said
    assert "fewer --layers or --heads" in said
    assert list(tmp_path.iterdir()) == []
    # Several traces need more than one.
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 1_500_000)
    settings = RecordOptions(raw=True, max_new_tokens=1000)
    prompts = [Prompt(str(i), PROMPT) for i in range(3)]
    with pytest.raises(BeaconScopeError, match="MB free"):
        record_prompts(tiny_model(), endless_tokenizer(), prompts, settings, folder=tmp_path / "f", batch_size=3)
    assert list(tmp_path.iterdir()) == []


def test_a_large_trace_is_announced_with_what_makes_it_smaller(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "_WORTH_A_HINT", 1000)
    notes = []
    record(
        tiny_model(),
        endless_tokenizer(),
        PROMPT,
        RecordOptions(max_new_tokens=2),
        output=tmp_path / "t",
        note=notes.append,
    )
    assert "--no-values" in notes[0]


def test_the_budget_that_is_named_would_have_compressed_and_one_more_not(tmp_path):
    def run(budget):
        notes = []
        trace = record(
            tiny_model(),
            endless_tokenizer(),
            PROMPT,
            RecordOptions(policy=BeaconKV(budget=budget, interval=10), raw=True, max_new_tokens=20, layers="all"),
            output=tmp_path / f"{budget}.parquet",
            note=notes.append,
        )
        fired = {bool(trace.evictions(*at)) for at in trace.heads}
        said = [note for note in notes if "Nothing was compressed" in note]
        assert len(fired) == 1
        assert fired == {not said}
        return fired.pop(), said

    fired, said = run(1024)
    assert not fired
    assert said == [
        "The cache never filled: 52 tokens, 1034 slots. Nothing was compressed; a --budget of at most 42 would have."
    ]
    assert run(42)[0]
    assert not run(43)[0]


def test_no_budget_is_named_where_none_would_do(tmp_path):
    notes = []
    settings = RecordOptions(policy=BeaconKV(interval=128), raw=True, max_new_tokens=4)
    record(tiny_model(), endless_tokenizer(), PROMPT, settings, output=tmp_path / "t", note=notes.append)
    assert notes[-1] == "The cache never filled: 36 tokens, 1152 slots. Nothing was compressed."


@pytest.mark.parametrize(
    ("policy", "remedy"),
    [
        # H2O's recent entries are half of whatever its budget is.
        (H2O(budget=200), "; a --budget of at most 35 would have."),
        # ScissorHands drops half of a budget of 35 at once, and keeps 19 of 36: less than the 20 that it protects.
        (ScissorHands(budget=200, recent=20), "."),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_budget_that_is_named_is_one_that_the_policy_allows(policy, remedy, tmp_path):
    notes = []
    settings = RecordOptions(policy=policy, raw=True, max_new_tokens=4)
    record(tiny_model(), endless_tokenizer(), PROMPT, settings, output=tmp_path / "t", note=notes.append)
    assert notes[-1] == f"The cache never filled: 36 tokens, 201 slots. Nothing was compressed{remedy}"


def test_a_full_cache_is_not_said_to_have_been_too_large(tmp_path):
    notes = []
    settings = RecordOptions(policy=Full(), raw=True, max_new_tokens=4)
    record(tiny_model(), endless_tokenizer(), PROMPT, settings, output=tmp_path / "t", note=notes.append)
    assert len(notes) == 1


def test_the_context_bounds_what_is_written(tmp_path):
    notes = []
    settings = RecordOptions(raw=True, max_new_tokens=40)
    model = tiny_model(max_position_embeddings=40)
    trace = record(model, endless_tokenizer(), PROMPT, settings, output=tmp_path / "t", note=notes.append)
    assert trace.length == 40
    assert trace.whole
    assert notes[0] == "The model's context of 40 tokens leaves room for 8 new ones, not 40."


@pytest.mark.parametrize("context", [12, len(PROMPT)])
def test_a_prompt_without_room_is_refused_with_both_numbers(context, tmp_path):
    with pytest.raises(
        BeaconScopeError, match=f"prompt has {len(PROMPT)} tokens, but the model's context is {context}"
    ):
        record_tiny(tiny_model(max_position_embeddings=context), tmp_path)
    assert list(tmp_path.iterdir()) == []


def dynamic(context):
    """A model that turns slower once its text is longer than its context."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    return tiny_model("llama", rope_parameters=rope, max_position_embeddings=context)


def test_dynamic_frequencies_change_past_the_context_only(tmp_path):
    model = dynamic(context=100)
    assert tap(model).layers[0].rotary.limit == 100
    trace = record_tiny(model, tmp_path, max_new_tokens=500, policy=BeaconKV(budget=512))
    assert trace.length == 100
    ids = trace.tokens["token_id"].tolist()
    assert ids[32:] == generate_plainly(dynamic(context=100), ids[:32], 68)


LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
        "factor": 64.0,
    },
}


@pytest.mark.parametrize("arch", ["phi3", "llama"])
@pytest.mark.parametrize("policy", [BeaconKV(), BeaconKV(query_space="post-rope"), StreamingLLM(), Full()])
def test_a_text_past_a_switch_of_frequencies_is_refused_with_a_remedy_that_works(arch, policy, tmp_path):
    model = tiny_model(arch, **LONGROPE)
    with pytest.raises(BeaconScopeError) as refused:
        record_tiny(model, tmp_path, max_new_tokens=33, policy=policy)
    message = str(refused.value)
    assert message.startswith("past 64 tokens this model changes its rotary frequencies and starts again without its")
    assert message.endswith("and the text may reach 65; give --max-new-tokens at most 32")
    trace = record_tiny(model, tmp_path, max_new_tokens=32, policy=policy)
    ids = trace.tokens["token_id"].tolist()
    assert ids[32:] == generate_plainly(tiny_model(arch, **LONGROPE), ids[:32], 32)


def test_a_prompt_past_a_switch_of_frequencies_is_refused(tmp_path):
    with pytest.raises(BeaconScopeError, match=r"past 64 tokens .* the text may reach 94; shorten it"):
        record_tiny(tiny_model("phi3", **LONGROPE), tmp_path, "x" * 70, max_new_tokens=24)
    with pytest.raises(BeaconScopeError, match=r"past 64 tokens .* the text may reach 72; shorten it"):
        record_tiny(tiny_model("phi3", **LONGROPE), tmp_path, completion="x" * 40)


def test_a_batch_does_not_change_the_frequencies_of_its_sequences(tmp_path):
    """Alone each of these is short enough; together the shorter one takes the longer one past the limit."""
    prompts = [Prompt("a", "x" * 40), Prompt("b", "x" * 8)]
    settings = RecordOptions(raw=True, max_new_tokens=20)
    arguments = (dynamic(context=48), endless_tokenizer(), prompts, settings)
    with pytest.raises(BeaconScopeError, match=r"together these prompts go past the 48 tokens.*--batch-size 1"):
        record_prompts(*arguments, folder=tmp_path / "f", batch_size=2)
    assert len(record_prompts(*arguments, folder=tmp_path / "f")) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": "7"}, "goes to 7"),
        ({"heads": "0-2"}, "goes to 2"),
    ],
)
def test_what_cannot_hold_together_is_refused(options, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        record_tiny(tiny_model(), tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_new_tokens": 0}, "max-new-tokens is 0"),
        ({"hits": 0}, "hits is 0"),
        ({"hits": 129}, "hits is 129"),
        ({"layers": "first"}, "layers 'first' is no list"),
        ({"heads": "1-0"}, "heads '1-0' is no list"),
        ({"sink_positions": -1}, "sink-positions is -1"),
        ({"local_window": 0}, "local-window is 0"),
        ({"prefill_chunk": 0}, "prefill-chunk is 0"),
        ({"think_open": ""}, "must not be empty"),
        ({"raw": True, "system": "Be brief."}, "needs the chat template"),
    ],
)
def test_options_are_checked_where_they_are_made(options, says):
    with pytest.raises(UsageError, match=says):
        RecordOptions(**options)


def test_the_chat_template_is_applied_unless_told_not_to(tmp_path):
    settings = {"max_new_tokens": 1, "policy": Full(), "raw": False}
    trace = record_tiny(tiny_model(), tmp_path, "Hi.", system="Be brief.", **settings)
    assert trace.text.startswith("<bos><|system|>Be brief.\n<|user|>Hi.\n<|assistant|>")
    assert trace.prompt == "Hi."
    assert trace.prompt_length == len("Be brief.\nHi.\n") + 4
    assert {*trace.tokens["phase"][: trace.prompt_length]} == {"prompt"}


@pytest.mark.parametrize(
    ("template", "says"),
    [(None, "no chat template; give --raw"), ("{{ raise_exception('no system here') }}", "no system here")],
)
def test_a_missing_or_unwilling_chat_template(template, says, tmp_path):
    tokenizer = tiny_tokenizer()
    assert tokenizer.chat_template == CHAT_TEMPLATE
    tokenizer.chat_template = template
    with pytest.raises(BeaconScopeError, match=says):
        record(tiny_model(), tokenizer, PROMPT, output=tmp_path / "t.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_or_completion_without_tokens_is_refused(tmp_path):
    with pytest.raises(BeaconScopeError, match="the prompt has no tokens"):
        record_tiny(tiny_model(), tmp_path, "")
    with pytest.raises(BeaconScopeError, match="the completion has no tokens"):
        record_tiny(tiny_model(), tmp_path, completion="")
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_kept_unless_forced(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_bytes(b"precious")
    with pytest.raises(BeaconScopeError, match="exists; give --force"):
        record_tiny(tiny_model(), tmp_path)
    assert path.read_bytes() == b"precious"
    settings = RecordOptions(raw=True, max_new_tokens=2)
    assert record(tiny_model(), endless_tokenizer(), PROMPT, settings, output=path, force=True).whole


def test_a_model_with_end_tokens_in_a_list(tmp_path):
    model = tiny_model()
    free = record_tiny(model, tmp_path, name="free", max_new_tokens=12, policy=Full())
    end = int(free.tokens["token_id"][free.prompt_length + 4])
    model.generation_config.eos_token_id = [EOS, end]
    trace = record_tiny(model, tmp_path, max_new_tokens=12, policy=Full())
    assert int(trace.tokens["token_id"].iloc[-1]) == end
    assert trace.length <= free.prompt_length + 5
