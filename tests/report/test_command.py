"""The command that a report says a trace was recorded by: run as it is printed, it asks for the same recording."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from beaconscope import load_trace
from beaconscope.cli import app
from beaconscope.kv.policies import BeaconKV, ExpectedAttention, Full, RandomEviction
from beaconscope.models import LoadOptions
from beaconscope.record import RecordOptions, Sampling
from beaconscope.record.options import with_shadow
from beaconscope.report.command import OPTIONS, SAMPLING, recording_command
from beaconscope.trace import Trace
from tests.report.made import made_trace
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

BALCONY = Path(__file__).parents[2] / "traces" / "smollm2-balcony.parquet"
README = BALCONY.with_name("README.md")
PROMPT, COMPLETION = "Plan it.", "<think>First.</think> Done."


class Asked(Exception):
    """Carries what `record` was asked for in place of a recording."""


def asked_by(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LoadOptions, str, RecordOptions]:
    """What a command asks the recorder for."""
    (folder / "PROMPT_FILE").write_text(PROMPT)
    (folder / "COMPLETION_FILE").write_text(COMPLETION)
    monkeypatch.chdir(folder)
    loaded: list[LoadOptions] = []

    def load_tokenizer(options: LoadOptions) -> Any:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = f"{{{{ effort }}}}{{{{ enable_thinking }}}}{{{{ tools }}}}{CHAT_TEMPLATE}"
        return tokenizer

    def load(options: LoadOptions, tokenizer: Any) -> Any:
        loaded.append(options)
        return SimpleNamespace(model=None, tokenizer=tokenizer, id=options.model, revision=options.revision)

    def run(model: Any, tokenizer: Any, prompt: str, options: RecordOptions, **others: Any) -> None:
        raise Asked(prompt, options)

    monkeypatch.setattr(sys.modules["beaconscope.models"], "load_model", load)
    monkeypatch.setattr(sys.modules["beaconscope.models"], "load_tokenizer", load_tokenizer)
    monkeypatch.setattr(sys.modules["beaconscope.record"], "record", run)
    program, *arguments = shlex.split(command)
    assert program == "beaconscope"
    done = CliRunner().invoke(app, [*arguments, "-o", "out.parquet"])
    assert isinstance(done.exception, Asked), done.output
    prompt, options = done.exception.args
    return loaded[0], prompt, options


def recorded(path: Path, options: RecordOptions, **metadata: Any) -> Trace:
    """A trace that says of its options what a recording with them says."""
    said = {key: value for key, value in dataclasses.asdict(options).items() if key not in ("policy", "shadow")}
    policy = with_shadow(options).policy
    return made_trace(
        path,
        options={**said, "teacher_forced": options.completion is not None},
        policy={"name": policy.name, "params": policy.params()},
        **{"prompt": PROMPT, "prompt_id": "prompt", **metadata},
    )


@pytest.mark.parametrize(
    "options",
    [
        RecordOptions(),
        RecordOptions(completion=COMPLETION, layers="0,9", policy=BeaconKV(budget=128, interval=32)),
        RecordOptions(
            policy=BeaconKV(budget=64, selector="kmeans", query_pooling="mean", pool_low=40, sinks=2, seed=7),
            sampling=Sampling(0.7, 20, 0.9, 0.05, 1.1, 7), max_new_tokens=300, system="Be 'brief'.", prefill_chunk=16,
        ),
        RecordOptions(sampling=Sampling(top_p=0.9, seed=0, model_sampling=True)),
        RecordOptions(sampling=Sampling(temperature=0.0, repetition_penalty=1.0)),
        RecordOptions(policy=RandomEviction(budget=64, seed=3), sampling=Sampling(0.7, seed=5)),
        RecordOptions(policy=BeaconKV(budget=64, seed=0), sampling=Sampling(0.7, seed=5)),
        RecordOptions(policy=ExpectedAttention(budget=99, covariance=False)),
        RecordOptions(policy=Full(), shadow=BeaconKV(budget=40, interval=9, beacons=8)),
        RecordOptions(
            template_options={
                "enable_thinking": False, "effort": "a 'b' = \N{SNOWMAN}", "tools": [{"name": "f", "n": 1.5}],
            },
        ),
        RecordOptions(
            raw=True, think_open="<|think|>", think_close="<|done|>", heads="0-1", hits=3, values=False,
            vector_type="float16", sink_positions=1, local_window=32,
        ),
    ],
)  # fmt: skip
def test_a_recording_is_asked_for_again(
    options: RecordOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"id": "org/name", "revision": "v2", "dtype": "float16", "attention_backend": "eager"}
    trace = recorded(tmp_path / "made.parquet", options, model=model)
    load, prompt, again = asked_by(recording_command(trace, redact=False), tmp_path, monkeypatch)
    assert again == dataclasses.replace(options, shadow=again.shadow)
    assert with_shadow(again).policy == with_shadow(options).policy
    assert prompt == PROMPT
    assert load == LoadOptions("org/name", "v2", "float16", attn="eager")


OLD = {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.1, "seed": 5}


@pytest.mark.parametrize(
    ("old", "completion", "expected"),
    [
        (OLD, None, Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=5)),
        # What greedy decoding and a given text had no use for is refused today.
        (OLD | {"temperature": 0.0}, None, Sampling(seed=5)),
        (OLD, COMPLETION, Sampling(seed=5)),
        (OLD | {"seed": 0}, COMPLETION, Sampling()),
    ],
)
def test_a_recording_of_version_0_1_is_asked_for_again(
    old: dict[str, Any], completion: str | None, expected: Sampling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = recorded(tmp_path / "made.parquet", RecordOptions(completion=completion))
    trace.metadata["options"]["sampling"] = old
    _, _, again = asked_by(recording_command(trace, redact=False), tmp_path, monkeypatch)
    assert again.sampling == expected


def test_the_shipped_trace_has_the_command_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = README.read_text().replace("\\\n", " ")
    made_by = next(line for line in written.splitlines() if line.startswith("beaconscope record"))
    made_by = made_by.replace("traces/balcony.txt", "PROMPT_FILE")
    made_by = made_by.replace("traces/balcony-completion.txt", "COMPLETION_FILE").rsplit(" -o ", 1)[0]
    said = recording_command(load_trace(BALCONY), redact=False)
    assert asked_by(said, tmp_path, monkeypatch) == asked_by(made_by, tmp_path, monkeypatch)
    assert {"--completion", "--dtype"} <= set(said.split())


def test_one_of_many_prompts_names_their_file(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "made.parquet", RecordOptions(completion=COMPLETION), prompt_id="q7")
    said = recording_command(trace, redact=False)
    assert "--prompts PROMPTS.jsonl" in said
    # A completion is in that file.
    assert "--completion" not in said


def test_a_redacted_command_has_no_text_of_the_user(tmp_path: Path) -> None:
    options = RecordOptions(
        system="secret", think_open="<secret>", completion="secret", template_options={"effort": "secret"}
    )
    model = {"id": "secret/model", "revision": "secret"}
    said = recording_command(recorded(tmp_path / "made.parquet", options, model=model), redact=True)
    assert "secret" not in said
    assert "--system TEXT" in said
    assert "--template-option effort=VALUE" in said


def test_defaults_are_those_of_the_recorder() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(RecordOptions)}
    assert {key: default for key, (_, default) in OPTIONS.items()} == {key: fields[key] for key in OPTIONS}
    assert set(fields) - set(OPTIONS) == {"policy", "shadow", "sampling", "completion", "template_options"}
    drawn = {field.name: field.default for field in dataclasses.fields(Sampling)}
    assert {key: default for key, (_, default) in SAMPLING.items()} == drawn


def test_what_no_recorder_writes_is_said_as_it_is(tmp_path: Path) -> None:
    unknown: dict[str, Any] = {"name": "mine; rm -rf", "params": {"a b": 1}}
    trace = made_trace(tmp_path / "made.parquet", policy=unknown)
    assert "--cache 'mine; rm -rf:a b=1'" in recording_command(trace, redact=False)
