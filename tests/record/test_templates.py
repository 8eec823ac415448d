"""Chat templates: what a prompt becomes, what is refused, and which part of a generation is a thought."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from beaconscope import BeaconScopeError, RecordOptions, Trace, load_trace, record, record_prompts, recover
from beaconscope.errors import UsageError
from beaconscope.record import Prompt, check_live
from beaconscope.record.encode import check_prompts, encode_prompt, template_variables
from beaconscope.trace.finalize import Refused
from tests.record.recording import endless_tokenizer
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

# As those of the models, shortened: how they end the prompt is theirs.
QWEN3 = (
    "{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
DEEPSEEK_R1 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{%- for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{%- endfor -%}{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
GRANITE = (
    "{%- if thinking is not defined %}{%- set thinking = true %}{%- endif %}"
    "{%- for message in messages %}{{- message.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- if thinking %}<think>{%- endif %}{%- endif %}"
)
ALL_OF_JINJA = (
    "{%- set space = namespace(budget=thinking_budget if thinking_budget is defined else 3) %}"
    "{%- macro say(text) %}{{ text }}{{ tone }}{%- endmacro %}{{ strftime_now('%Y') }}"
    "{%- for message in messages %}{%- if loop.index > 9 %}{% break %}{% endif %}"
    "{% generation %}{{ say(message.content) }}{{ style | default('') }}{% endgeneration %}{%- endfor %}"
    "{%- if tools %}{{ tools | tojson }}{% endif %}{{ eos_token }}{{ space.budget }}{{ raise_exception is defined }}"
)


def tokenizer_with(template: str | dict[str, str] | None) -> PreTrainedTokenizerFast:
    tokenizer = endless_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def encoded(template: str, prompt: str = "hi", **options) -> str:
    """The prompt in a template, as text."""
    tokenizer = tokenizer_with(template)
    return tokenizer.decode(encode_prompt(tokenizer, prompt, RecordOptions(**options)))


# --- options of the template ---


@pytest.mark.parametrize(
    ("template", "options", "end"),
    [
        (QWEN3, {}, "hi\n<|assistant|>\n"),
        (QWEN3, {"enable_thinking": True}, "hi\n<|assistant|>\n"),
        (QWEN3, {"enable_thinking": False}, "hi\n<|assistant|>\n<think>\n\n</think>\n\n"),
        (GRANITE, {}, "hi<|assistant|><think>"),
        (GRANITE, {"thinking": False}, "hi<|assistant|>"),
        (GRANITE, {"thinking": None}, "hi<|assistant|>"),
        ("{{ messages[0].content }} {{ effort }}", {"effort": "high"}, "hi high"),
        ("{{ messages[0].content }} {{ n + 1 }}", {"n": 2}, "hi 3"),
        ("{{ messages[0].content }} {{ a.b[0] }}", {"a": {"b": ["c"]}}, "hi c"),
        ("{{ messages[0].content }}{% if tools %} {{ tools[0].name }}{% endif %}", {"tools": [{"name": "f"}]}, "hi f"),
    ],
)
def test_options_reach_the_template(template, options, end):
    assert encoded(template, template_options=options).endswith(end)


def test_options_are_those_of_apply_chat_template():
    tokenizer = tokenizer_with(QWEN3)
    expected = tokenizer.apply_chat_template(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        return_dict=False,
        enable_thinking=False,
    )
    options = RecordOptions(system="be brief", template_options={"enable_thinking": False})
    assert encode_prompt(tokenizer, "hi", options) == expected


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (CHAT_TEMPLATE, []),
        (QWEN3, ["enable_thinking"]),
        (DEEPSEEK_R1, []),
        (GRANITE, ["thinking"]),
        (ALL_OF_JINJA, ["style", "thinking_budget", "tone", "tools"]),
    ],
)
def test_the_variables_of_a_template(template, variables):
    assert template_variables(tokenizer_with(template)) == variables


def test_of_several_templates_the_one_that_is_used_counts():
    tokenizer = tokenizer_with({"default": QWEN3, "tool_use": "{{ messages }}{{ tools }}{{ strict }}"})
    assert template_variables(tokenizer) == ["enable_thinking"]
    assert template_variables(tokenizer, tools=True) == ["strict", "tools"]
    encode_prompt(tokenizer, "hi", RecordOptions(template_options={"tools": [{"name": "f"}], "strict": True}))


@pytest.mark.parametrize(
    ("template", "option", "says"),
    [
        (QWEN3, "enable_thinkin", "does not use the option enable_thinkin; give one of its own: enable_thinking"),
        (ALL_OF_JINJA, "x", "give one of its own: style, thinking_budget, tone, tools"),
        (CHAT_TEMPLATE, "enable_thinking", "does not use the option enable_thinking; it has none"),
        # What transformers sets, or takes for itself.
        (QWEN3, "messages", "does not use the option messages"),
        (QWEN3, "add_generation_prompt", "does not use the option add_generation_prompt"),
        (ALL_OF_JINJA, "eos_token", "does not use the option eos_token"),
        (QWEN3, "tokenize", "does not use the option tokenize"),
        (QWEN3, "chat_template", "does not use the option chat_template"),
    ],
)
def test_an_option_that_the_template_does_not_use_is_refused_by_name(template, option, says):
    with pytest.raises(UsageError) as caught:
        encoded(template, template_options={option: True})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"raw": True, "template_options": {"enable_thinking": False}}, "leave out --template-option or --raw"),
        ({"template_options": {"a b": 1}}, "'a b' cannot be an option of a chat template"),
        ({"template_options": {3: 1}}, "3 cannot be an option of a chat template"),
        ({"template_options": {"a": {1, 2}}}, "the template option a is {1, 2}; give a value that JSON can express"),
        ({"template_options": {"a": float("nan")}}, "the template option a is nan"),
        ({"template_options": {"a": "\udcff"}}, "half of a surrogate pair is in the template option a"),
        ({"template_options": [("a", 1)]}, "give a mapping of names to values"),
        ({"system": "\ud800"}, "half of a surrogate pair is in the system message"),
        ({"think_open": "\ud800"}, "half of a surrogate pair is in the think markers"),
    ],
)
def test_options_that_cannot_be(options, says):
    with pytest.raises(UsageError) as caught:
        RecordOptions(**options)
    assert says in str(caught.value)


def test_template_options_are_a_copy():
    given = {"enable_thinking": False}
    options = RecordOptions(template_options=given)
    given["enable_thinking"] = True
    assert options.template_options == {"enable_thinking": False}
    assert hash(options) == hash(RecordOptions())


# --- templates that cannot be used ---


@pytest.mark.parametrize(
    ("template", "options", "says"),
    [
        (None, {}, "no chat template; give --raw"),
        ("{{ raise_exception('only the\nuser') }}", {}, "refuses the prompt (only the user); give --raw"),
        ("{{ messages[3].content }}", {"system": "x"}, "give --raw, or leave out --system"),
        ("{{ messages[0].content }}{% if", {}, "refuses the prompt"),
        ("{{ messages[0].content }}{% if", {"template_options": {"a": 1}}, "cannot be read"),
        ("{{ messages[-1].content }}", {"system": "x"}, "ignores the system message; leave out --system"),
        # As of models that also read images: content is a list of parts.
        ("{% for part in messages[0].content %}{{ part['text'] }}{% endfor %}.", {}, "leaves out the prompt"),
        ({"tool_use": QWEN3}, {}, "refuses the prompt"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(template, options, says):
    with pytest.raises(BeaconScopeError) as caught:
        encoded(template, **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prompts_are_checked_by_name_before_any_is_run(tmp_path):
    """GIVEN many prompts of which the last cannot be used WHEN they are recorded THEN none is."""
    template = "{% if 'bad' in messages[0].content %}{{ raise_exception('bad') }}{% endif %}{{ messages[0].content }}"
    prompts = [Prompt("a", "good"), Prompt("b", "bad")]
    with pytest.raises(BeaconScopeError, match=r"^prompt b: the model's chat template refuses the prompt \(bad\)"):
        check_prompts(tokenizer_with(template), prompts, RecordOptions())
    with pytest.raises(BeaconScopeError, match=r"^prompt b: "):
        record_prompts(tiny_model(), tokenizer_with(template), prompts, folder=tmp_path / "traces")
    assert not (tmp_path / "traces").exists()
    with pytest.raises(BeaconScopeError, match=r"^prompt a: half of a surrogate pair is in the prompt"):
        check_prompts(tiny_tokenizer(), [Prompt("a", "\udcff")], RecordOptions())
    with pytest.raises(BeaconScopeError, match=r"^the model's chat template refuses"):
        record(tiny_model(), tokenizer_with(template), "bad", output=tmp_path / "t.parquet")


# --- thoughts ---


def recorded(folder: Path, template: str | None, prompt: str, completion: str, *, name: str = "t", **options) -> Trace:
    settings = RecordOptions(completion=completion, layers="0", raw=template is None, **options)
    return record(tiny_model(), tokenizer_with(template), prompt, settings, output=folder / f"{name}.parquet")


def spans(trace: Trace) -> str:
    """The generation, with its thoughts in brackets."""
    text, former = b"", "answer"
    for token, phase in zip(trace.tokens["token_bytes"], trace.tokens["phase"], strict=True):
        if phase == "prompt":
            continue
        text += b"[" * (phase == "think" != former) + b"]" * (former == "think" != phase) + token
        former = phase
    return text.decode() + "]" * (former == "think")


ASKED = "What do <think> and </think> mean? Example: <think>two"
OFF = {"template_options": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("template", "prompt", "options", "completion", "expected"),
    [
        # Mentioned by the user, the system message or both.
        (QWEN3, ASKED, {}, "They mark it.", "They mark it."),
        (QWEN3, ASKED, {}, "<think>hm</think>This.", "[<think>hm</think>]This."),
        (QWEN3, "hi", {"system": f"{ASKED} <think>"}, "Yes.", "Yes."),
        (QWEN3, "end with <think>", {}, "Yes. </think> No.", "Yes. </think> No."),
        # Switched off: the template opens a thought and closes it.
        (QWEN3, "hi", OFF, "Yes.", "Yes."),
        (QWEN3, ASKED, OFF, "Yes.", "Yes."),
        (QWEN3, "hi", OFF, "<think>hm</think>Yes.", "[<think>hm</think>]Yes."),
        # Opened by the template.
        (DEEPSEEK_R1, "hi", {}, "hm</think>Yes.", "[hm</think>]Yes."),
        (DEEPSEEK_R1, ASKED, {}, "hm</think>Yes.", "[hm</think>]Yes."),
        (DEEPSEEK_R1, "hi", {}, "never closed", "[never closed]"),
        (GRANITE, "hi", {}, "hm</think>Yes.", "[hm</think>]Yes."),
        (GRANITE, "hi", {"template_options": {"thinking": False}}, "Yes.", "Yes."),
        # Without a template the end of the prompt counts.
        (None, "Solve it. <think>\n", {}, "hm</think>Yes.", "[hm</think>]Yes."),
        (None, "Say <think> now", {}, "hm</think>Yes.", "hm</think>Yes."),
        # Markers of one's own, which the tokenizer has no tokens for.
        (QWEN3, "[T] x", {"think_open": "[T]", "think_close": "[/T]"}, "a[T]b[/T]c", "a[[T]b[/T]]c"),
    ],
)
def test_thoughts_by_templates(tmp_path, template, prompt, options, completion, expected):
    trace = recorded(tmp_path, template, prompt, completion, **options)
    assert spans(trace) == expected
    assert set(trace.tokens["phase"][: trace.prompt_length]) == {"prompt"}
    # AND the trace says how its prompt was made
    assert trace.options["template_options"] == options.get("template_options", {})


@pytest.mark.parametrize(("template", "prompt", "thinks"), [(QWEN3, ASKED, False), (DEEPSEEK_R1, ASKED, True)])
def test_the_live_check_takes_the_answer_by_the_same_rule(tmp_path, template, prompt, thinks):
    """GIVEN a recording WHEN its text is run again live THEN what the model answers is what has that phase."""
    model, tokenizer = tiny_model(), tokenizer_with(template)
    options = RecordOptions(layers="0", max_new_tokens=8)
    trace = record(model, tokenizer, prompt, options, output=tmp_path / "t.parquet")
    written = trace.tokens["token_id"][trace.prompt_length :].tolist()
    all_of_it = " ".join(tokenizer.decode(written, skip_special_tokens=True).split())
    assert set(trace.tokens["phase"][trace.prompt_length :]) == {"think" if thinks else "answer"}
    assert check_live(model, tokenizer, trace, [])[0].free.answer == ("" if thinks else all_of_it)


@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK_R1])
def test_a_recovered_trace_has_the_same_thoughts(tmp_path, template, monkeypatch):
    """GIVEN a recording whose file was not written WHEN it is recovered THEN its phases are those of a whole one."""

    def refuse(*_):
        raise Refused("no room", "make room")

    whole = recorded(tmp_path, template, ASKED, "a</think>b<think>c</think>d")
    with monkeypatch.context() as patch:
        patch.setattr("beaconscope.trace.journal.write_trace", refuse)
        with pytest.raises(BeaconScopeError, match="beaconscope recover"):
            recorded(tmp_path, template, ASKED, "a</think>b<think>c</think>d", name="cut")
    again = load_trace(recover(tmp_path / "cut.parquet"))
    assert spans(again) == spans(whole)
    assert spans(whole) == ("a</think>b[<think>c</think>]d" if template is QWEN3 else "[a</think>]b[<think>c</think>]d")


def test_a_thought_that_nothing_opened_is_spoken_of(tmp_path):
    notes: list[str] = []
    options = RecordOptions(completion="hm</think>Yes.", layers="0")
    record(tiny_model(), tokenizer_with(QWEN3), "hi", options, output=tmp_path / "t.parquet", note=notes.append)
    assert any("closes a thought (</think>) that nothing opened" in note for note in notes)
    notes.clear()
    record(tiny_model(), tokenizer_with(DEEPSEEK_R1), "hi", options, output=tmp_path / "u.parquet", note=notes.append)
    assert not any("closes a thought" in note for note in notes)
