"""``beaconscope record``, as a person runs it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import signal
from pathlib import Path
from typing import get_args

import pytest

from beaconscope import BeaconKV, LoadOptions, RecordOptions, Sampling, load_trace, recover
from beaconscope.cli.record import _policies, _template_options, record
from beaconscope.errors import BeaconScopeError, UsageError
from beaconscope.record import Prompt
from beaconscope.record.many import _Batch
from beaconscope.trace import Journal
from tests.record.recording import save_tiny
from tests.tiny import tiny_model, tiny_tokenizer
from tests.trace.made import METADATA, interrupted
from tests.trace.made import SMALL as SMALL_LAYOUT
from tests.waiting import wait_for

SMALL = ("--max-new-tokens", "24", "--budget", "16", "--interval", "8", "--recent", "4", "--beacons", "4")


def test_a_prompt_becomes_a_trace_and_the_last_lines_say_so(run, here, model_folder):
    # WHEN a prompt is recorded with a budget that it does not fit
    result = run("record", "--model", model_folder, "--prompt", "plan.txt", *SMALL)
    # THEN the trace is named after it and says what was asked for
    assert result.exit_code == 0, result.output
    assert result.stdout == "Wrote plan.parquet\nNext: beaconscope info plan.parquet\n"
    trace = load_trace("plan.parquet")
    assert trace.prompt == "Plan: add, then double. 3 and 4?"
    assert trace.policy["name"] == "beacon"
    assert {name: trace.policy["params"][name] for name in ("budget", "interval", "recent", "beacons")} == {
        "budget": 16,
        "interval": 8,
        "recent": 4,
        "beacons": 4,
    }
    assert trace.evictions(0, 0)
    # AND nothing else is left
    assert {path.name for path in here.iterdir()} == {"plan.txt", "plan.parquet"}


def test_the_prompt_may_come_from_stdin_and_the_result_be_json(run, here, model_folder):
    result = run(
        "record", "--model", model_folder, "--prompt", "-", "--raw", "--json", "-q", *SMALL, stdin=b"one two three\n"
    )
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["path"] == "trace.parquet"
    assert summary["phases"]["prompt"] == len("one two three")


def test_a_quiet_recording_says_nothing_at_all(start, here, model_folder):
    out, err = start("record", "-q", "--model", model_folder, "--prompt", "plan.txt", *SMALL, cwd=here).communicate()
    assert (out, err) == ("", "")
    assert load_trace(here / "plan.parquet").whole


def test_a_given_completion_is_forced(run, here, model_folder):
    thought = "one \u00e9 " * 60 + "\x1b[31m<think>add:\n7</think>14"
    Path("thought.txt").write_text(thought, encoding="utf-8")
    result = run("record", "--model", model_folder, "--prompt", "plan.txt", "--completion", "thought.txt", *SMALL)
    assert result.exit_code == 0, result.output
    assert load_trace("plan.parquet").text.endswith(thought)
    # What was written is shown, its end where it is long, and steers no terminal.
    plain = "one \u00e9 " * 60 + "[31m<think>add: 7</think>14"
    assert result.stderr.endswith(f"\nThe text ends with:\n... {plain[-200:]}\n")
    assert f"ends with     ... {plain[-200:]}\n" in run("info", "plan.parquet").stdout


def test_with_a_full_cache_the_beacons_are_a_shadow(run, here, model_folder):
    result = run("record", "--model", model_folder, "--prompt", "plan.txt", "--cache", "full", *SMALL)
    assert result.exit_code == 0, result.output
    trace = load_trace("plan.parquet")
    assert trace.policy["name"] == "full"
    assert trace.evictions(0, 0) == []
    assert len(trace.beacons(0, 0)) > 0


def test_many_prompts_become_a_folder_and_a_second_run_skips_them(run, here, model_folder):
    Path("many.jsonl").write_text('{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two, three"}\n', "utf-8")
    arguments = ("record", "--model", model_folder, "--prompts", "many.jsonl", "--batch-size", "2", *SMALL)
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Wrote many-traces\n")
    paths = [Path("many-traces/a.parquet"), Path("many-traces/b.parquet")]
    assert [load_trace(path).prompt for path in paths] == ["one", "two, three"]
    # WHEN one is lost and the same command is run again
    kept = paths[1].stat().st_mtime_ns
    paths[0].unlink()
    again = run(*arguments)
    # THEN only that one is made
    assert again.exit_code == 0, again.output
    assert paths[0].exists()
    assert paths[1].stat().st_mtime_ns == kept
    # AND where nothing is left to record, no model is loaded
    nothing = run("record", "--model", "no/such-model", *arguments[3:])
    assert nothing.exit_code == 0, nothing.output
    assert "2 of 2 prompts are recorded already" in nothing.stderr
    assert nothing.stdout.startswith("Wrote many-traces\n")


def test_a_foreign_file_among_the_traces_is_refused_before_the_model_loads_and_kept(run, here):
    Path("many.jsonl").write_text('{"id": "a", "prompt": "one"}\n', "utf-8")
    Path("many-traces").mkdir()
    Path("many-traces/a.parquet").write_bytes(b"precious")
    result = run("record", "--model", "no/such-model", "--prompts", "many.jsonl")
    assert result.exit_code == 1
    assert "give --force to replace what is there" in result.stderr
    assert Path("many-traces/a.parquet").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "there is no prompt"),
        (("--prompt", "plan.txt", "--prompts", "many.jsonl"), "exclude each other"),
        (("--prompts", "many.jsonl", "--completion", "plan.txt"), "--completion goes with --prompt"),
        (("--prompt", "plan.txt", "--batch-size", "2"), "--batch-size goes with --prompts"),
        (("--prompt", "-", "--completion", "-"), "cannot both be stdin"),
        (("--prompt", "plan.txt", "--max-new-tokens", "0"), "max-new-tokens is 0"),
        (("--prompt", "plan.txt", "--beacons", "-1"), "beacons is -1"),
        (("--prompt", "plan.txt", "--beacons", "257"), "beacons is 257"),
        (("--prompt", "plan.txt", "--budget", "16", "--recent", "16"), "budget of at least 17"),
        (("--prompt", "plan.txt", "--budget", "20", "--recent", "16", "--sinks", "4"), "budget of at least 21"),
        (("--prompt", "plan.txt", "--cache", "becon"), "did you mean beacon"),
        (
            ("--prompt", "plan.txt", "--cache", "random", "--beacons", "4"),
            "--beacons has no effect with --cache random",
        ),
        (("--prompt", "plan.txt", "--temperature", "-1"), "temperature is -1"),
        (("--prompt", "plan.txt", "--top-p", "0.9"), "top-p has no effect while decoding is greedy"),
        (("--prompt", "plan.txt", "--temperature", "0", "--top-k", "5"), "give --temperature above 0"),
        (("--prompt", "plan.txt", "--model-sampling", "--temperature", "0"), "leave out one of them"),
        (("--prompt", "plan.txt", "--completion", "plan.txt", "--temperature", "1"), "temperature has no effect on a"),
        (("--prompt", "plan.txt", "--hits", "0"), "hits is 0"),
        (("--prompt", "plan.txt", "--layers", "first"), "is no list; write all, auto, 0,8,16 or 0-8:2"),
    ],
)
def test_options_that_cannot_be_are_refused_before_the_model_loads(run, here, arguments, says):
    # No such model: a command that got as far as loading would speak of it.
    result = run("record", "--model", "no/such-model", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert says in result.stderr
    assert [path.name for path in here.iterdir()] == ["plan.txt"]


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "does not exist"), (b"", "is empty"), (b"\x00\x01", "is binary"), (b"\xff\xfe\xfd", "is not UTF-8")],
)
@pytest.mark.parametrize("option", ["--prompt", "--prompts", "--completion"])
def test_a_text_that_cannot_be_read_is_refused_before_the_model_loads(run, here, content, says, option):
    if content is not None:
        Path("bad.txt").write_bytes(content)
    before = sorted(here.iterdir())
    prompt = ("--prompt", "plan.txt") if option == "--completion" else ()
    result = run("record", "--model", "no/such-model", *prompt, option, "bad.txt")
    assert result.exit_code == 1
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("option", ["--prompt", "--prompts"])
def test_an_empty_name_is_no_stdin(run, here, option):
    result = run("record", "--model", "no/such-model", option, "", stdin=b'{"id": "a", "prompt": "b"}')
    assert result.exit_code == 1
    assert "is a folder; give a file" in result.stderr


def test_an_output_that_exists_is_refused_before_the_model_loads_and_kept(run, here):
    Path("plan.parquet").write_bytes(b"precious")
    result = run("record", "--model", "no/such-model", "--prompt", "plan.txt")
    assert result.exit_code == 1
    assert "--force" in result.stderr
    assert Path("plan.parquet").read_bytes() == b"precious"


def test_a_journal_beside_the_output_is_refused_before_the_model_loads_and_kept(run, here):
    # GIVEN a recording that was interrupted
    interrupted(Path("plan.parquet"))
    # WHEN another to the same output begins, THEN it is told what to do
    result = run("record", "--model", "no/such-model", "--prompt", "plan.txt")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: plan.parquet.journal holds an interrupted recording; "
        "run `beaconscope recover plan.parquet`, or give --force to discard it\n"
    )
    assert load_trace(recover("plan.parquet")).length == 32


def test_a_recording_under_way_to_the_output_is_refused_before_the_model_loads(run, here):
    with Journal.create(Path("plan.parquet"), SMALL_LAYOUT, METADATA):
        result = run("record", "--model", "no/such-model", "--prompt", "plan.txt", "--force")
        assert result.exit_code == 1
        assert "in use by another process" in result.stderr


def test_force_replaces_an_output(run, here, model_folder):
    Path("plan.parquet").write_bytes(b"old")
    result = run("record", "--model", model_folder, "--prompt", "plan.txt", "--force", *SMALL)
    assert result.exit_code == 0, result.output
    assert load_trace("plan.parquet").whole


def test_a_missing_output_folder_is_refused_before_the_model_loads(run, here):
    result = run("record", "--model", "no/such-model", "--prompt", "plan.txt", "-o", "none/trace.parquet")
    assert result.exit_code == 1
    assert "mkdir -p none" in result.stderr


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("no/such-model", "cannot load the model no/such-model"),
        ("./empty", "no model"),
        ("none.gguf", "no model file"),
        ("plan.txt", "is a file but no .gguf"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(run, here, model, says):
    Path("empty").mkdir()
    result = run("record", "--model", model, "--prompt", "plan.txt")
    assert result.exit_code == 1
    assert says in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert not Path("plan.parquet").exists()


@pytest.fixture
def switched_folder(tmp_path_factory) -> Path:
    """A model whose chat template has a switch."""
    folder = save_tiny(tmp_path_factory.mktemp("switched"))
    (folder / "chat_template.jinja").write_text(SWITCHED, encoding="utf-8")
    return folder


SWITCHED = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


def test_options_of_the_template_reach_it_and_the_trace(run, here, switched_folder):
    arguments = ("record", "--model", switched_folder, "--prompt", "plan.txt", *SMALL)
    result = run(*arguments, "--template-option", "enable_thinking=false")
    assert result.exit_code == 0, result.output
    trace = load_trace("plan.parquet")
    assert trace.text.startswith(f"<|user|>{trace.prompt}<|assistant|><think>\n\n</think>\n\n")
    assert trace.options["template_options"] == {"enable_thinking": False}
    assert "think" not in set(trace.tokens["phase"])
    assert "template_options: enable_thinking=False" in run("info", "plan.parquet", "--verbose").stdout


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {}),
        (["a=false"], {"a": False}),
        (["a=null", "b=3", "c=1.5e3", 'd="x"'], {"a": None, "b": 3, "c": 1500.0, "d": "x"}),
        (['a=[{"b": "c=d"}]'], {"a": [{"b": "c=d"}]}),
        # What is no JSON is text.
        (["a=high", "b=x=y", "c= low ", "d=", "e=NaN", "f={"], {
            "a": "high", "b": "x=y", "c": " low ", "d": "", "e": "NaN", "f": "{",
        }),
        (['a="False"', "b=\N{SNOWMAN}"], {"a": "False", "b": "\N{SNOWMAN}"}),
    ],
)  # fmt: skip
def test_values_of_template_options_are_json_or_text(given, expected):
    assert _template_options(given) == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["enable_thinking"], "must be KEY=VALUE, for example enable_thinking=false"),
        (["=false"], "must be KEY=VALUE"),
        (["a=1", "a=2"], "--template-option a is given twice"),
        # As text they would be true in a template.
        (["a=False"], "would be the text 'False'; write a=false"),
        (["a=None"], "write a=null"),
        (["a b=1"], "'a b' cannot be an option of a chat template"),
    ],
)
def test_template_options_that_cannot_be_are_refused_before_the_model_loads(run, here, given, says):
    arguments = [argument for option in given for argument in ("--template-option", option)]
    result = run("record", "--model", "no/such-model", "--prompt", "plan.txt", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.fixture
def no_weights(monkeypatch) -> None:
    """Fail where weights are loaded."""

    def load(*_, **__):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)


@pytest.mark.parametrize(("source", "jobs"), [("--prompt", ()), ("--prompts", ()), ("--prompts", ("--jobs", "2"))])
@pytest.mark.usefixtures("no_weights")
def test_what_the_tokenizer_cannot_do_is_said_before_the_weights_are_loaded(run, here, switched_folder, source, jobs):
    Path("many.jsonl").write_text('{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}\n', "utf-8")
    prompts = {"--prompt": "plan.txt", "--prompts": "many.jsonl"}[source]
    arguments = ("record", "--model", switched_folder, source, prompts, *jobs)
    # WHEN an option is not the template's
    result = run(*arguments, "--template-option", "enable_thinkin=false")
    # THEN its own are listed, and the exit code is that of options that cannot be
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1] == (
        "error: this model's chat template does not use the option enable_thinkin; give one of its own: enable_thinking"
    )
    # WHEN there is no template
    (switched_folder / "chat_template.jinja").unlink()
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.splitlines()[-1] == (
        "error: this model's tokenizer has no chat template; give --raw to feed the prompt as it is"
    )
    # WHEN the template refuses a prompt, THEN it is named where there are many
    (switched_folder / "chat_template.jinja").write_text("{{ raise_exception('never') }}", encoding="utf-8")
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    name = "" if source == "--prompt" else "prompt a: "
    assert result.stderr.splitlines()[-1].startswith(f"error: {name}the model's chat template refuses the prompt")
    assert not Path("many-traces").exists()


@pytest.mark.usefixtures("no_weights")
def test_a_worker_of_a_cluster_asks_the_tokenizer_first(switched_folder, tmp_path):
    (switched_folder / "chat_template.jinja").unlink()
    load = LoadOptions(str(switched_folder))
    with pytest.raises(BeaconScopeError, match="has no chat template"):
        _Batch(load, (Prompt("a", "one"),), RecordOptions(), tmp_path, "run")()


@pytest.mark.parametrize("option", [("--layers", "7"), ("--heads", "0,2"), ("--layers", "one")])
def test_layers_and_heads_that_are_not_there_are_refused(run, here, model_folder, option):
    result = run("record", "--model", model_folder, "--prompt", "plan.txt", *option)
    assert result.exit_code == 2
    assert option[0].strip("-") in result.stderr.splitlines()[-1]
    assert [path.name for path in here.iterdir()] == ["plan.txt"]


def test_a_prompt_over_the_context_is_refused_with_both_numbers(run, here, model_folder):
    Path("long.txt").write_text("x" * 5000, encoding="utf-8")
    result = run("record", "--model", model_folder, "--prompt", "long.txt", "--raw")
    assert result.exit_code == 1
    assert "5000" in result.stderr
    assert "4096" in result.stderr
    assert not Path("long.parquet").exists()


def test_cuda_asked_for_and_absent(run, here, model_folder):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    result = run("record", "--model", model_folder, "--prompt", "plan.txt", "--device", "cuda")
    assert result.exit_code == 1
    assert "--device cpu" in result.stderr


def test_a_cache_that_never_fills_says_which_budget_would_have(run, here, model_folder):
    result = run("record", "--model", model_folder, "--prompt", "plan.txt", "--max-new-tokens", "8")
    assert result.exit_code == 0, result.output
    assert "Nothing was compressed" in result.stderr


def test_sampling_settings_for_prompts_that_all_have_a_completion_are_refused(run, here):
    line = '{"id": "a", "prompt": "one", "completion": "two"}\n'
    Path("many.jsonl").write_text(line, "utf-8")
    result = run("record", "--model", "no/such-model", "--prompts", "many.jsonl", "--model-sampling")
    assert result.exit_code == 2
    assert "model-sampling has no effect on a completion that is given" in result.stderr
    # Where one has none, they are for that one.
    Path("many.jsonl").write_text(line + '{"id": "b", "prompt": "one"}\n', "utf-8")
    assert (
        "cannot load the model"
        in run("record", "--model", "no/such-model", "--prompts", "many.jsonl", "--model-sampling").stderr
    )


def test_the_models_generation_config_is_used_and_what_is_not_is_said(run, here):
    # GIVEN a model folder whose generation config has rules, recommended sampling and a beam search
    model = tiny_model()
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 9, "repetition_penalty": 1.3, "num_beams": 2}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    arguments = ("record", "--model", "model", "--prompt", "plan.txt", "--seed", "3", *SMALL)
    # WHEN it is recorded without options, THEN the rules hold and the rest is said
    result = run(*arguments, "-o", "greedy.parquet")
    assert result.exit_code == 0, result.output
    assert "The model recommends sampling (temperature=0.7, top_k=9), but decoding is greedy" in result.stderr
    assert "num_beams=2" in result.stderr
    assert "--seed 3 has no effect" in result.stderr
    decoding = load_trace("greedy.parquet").options["decoding"]
    assert (decoding["temperature"], decoding["repetition_penalty"]) == (0.0, 1.3)
    # WHEN its sampling is asked for, THEN it holds but for what is given
    result = run(*arguments, "--model-sampling", "--top-k", "5", "-o", "sampled.parquet")
    assert result.exit_code == 0, result.output
    assert "recommends" not in result.stderr
    assert "--seed" not in result.stderr
    decoding = load_trace("sampled.parquet").options["decoding"]
    assert {name: decoding[name] for name in ("temperature", "top_k", "repetition_penalty", "seed")} == {
        "temperature": 0.7,
        "top_k": 5,
        "repetition_penalty": 1.3,
        "seed": 3,
    }


def test_ctrl_c_finishes_the_file_and_says_so(start, here, model_folder):
    # GIVEN a recording under way, long enough not to end by itself
    process = start(
        "record", "--model", model_folder, "--prompt", "plan.txt", "-n", "4000", "--temperature", "1", cwd=here
    )
    journal = here / "plan.parquet.journal" / "tokens.arrows"
    wait_for(lambda: journal.exists() and journal.stat().st_size > 20_000, process)
    # WHEN it is interrupted
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    # THEN there is a trace, marked as cut, and no journal
    assert process.returncode == 130, err
    assert out.startswith("Wrote plan.parquet\n")
    assert "ends early" in err
    assert "Traceback" not in err
    trace = load_trace(here / "plan.parquet")
    assert not trace.whole
    assert trace.length > trace.prompt_length
    assert not journal.parent.exists()


def test_help_shows_the_defaults_that_hold():
    defaults = {name: parameter.default for name, parameter in inspect.signature(record).parameters.items()}
    expected = {
        **{field.name: field.default for field in dataclasses.fields(Sampling)},
        **{field.name: field.default for field in dataclasses.fields(RecordOptions)},
        **{field.name: field.default for field in dataclasses.fields(LoadOptions)},
        "dtype_trace": RecordOptions().vector_type,
    }
    shared = set(defaults) & set(expected) - {"model"}
    assert len(shared) > 20
    assert {name: defaults[name] for name in shared} == {name: expected[name] for name in shared}


def test_help_shows_the_defaults_of_beaconkv():
    policy = BeaconKV()
    hints = inspect.get_annotations(record, eval_str=True)
    for field in dataclasses.fields(BeaconKV):
        if field.name in ("seed", "pool_low", "pool_high"):
            continue
        option = get_args(hints[field.name])[1]
        assert option.show_default.removesuffix(" with beacon") == str(getattr(policy, field.name)), field.name


def test_what_is_not_given_is_left_to_the_policy():
    policy, _ = _policies("streaming-llm", {"budget": 64}, seed=0)
    assert (policy.budget, policy.interval, policy.sinks) == (64, 1, 4)


def test_parameters_in_the_name_of_the_cache_outrank_options():
    policy, _ = _policies("beacon:budget=64,selector=random", {"budget": 128, "beacons": 4}, seed=3)
    assert policy == BeaconKV(budget=64, selector="random", beacons=4, seed=3)


def test_beacon_options_reach_the_shadow_of_a_full_cache():
    _, shadow = _policies("full", {"beacons": 4}, seed=0)
    assert shadow == BeaconKV(beacons=4)


def test_an_option_without_effect_is_refused():
    with pytest.raises(UsageError, match="--query-space has no effect with --cache streaming-llm"):
        _policies("streaming-llm", {"query_space": "post-rope"}, seed=0)
