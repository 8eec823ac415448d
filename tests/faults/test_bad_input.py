"""Whatever is wrong: one line that says what and what to do, exit code 1 or 2, and nothing half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from beaconscope.record import plan
from tests.tiny import tiny_model, tiny_tokenizer


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): None if path.is_dir() else path.read_bytes() for path in sorted(folder.rglob("*"))}


@pytest.fixture
def refused(run, here, model_folder):
    """Run ``record`` with a model and a prompt that are fine, and something that is not."""

    def refused(*arguments: str | Path, code: int, stdin: bytes | None = None) -> str:
        given = [str(argument) for argument in arguments]
        if "--model" not in given:
            given += ["--model", str(model_folder)]
        if "--prompt" not in given and "--prompts" not in given:
            given += ["--prompt", "plan.txt"]
        before = snapshot(here)
        result = run("record", "-q", "-n", "4", "--raw", *given, stdin=stdin)
        assert result.exit_code == code, result.output
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert snapshot(here) == before
        return line

    return refused


@pytest.mark.parametrize("content", [None, b"", b" \n\n", b"\x00\x01", "é".encode("latin-1"), "x".encode("utf-16")])
@pytest.mark.parametrize("option", ["--prompt", "--prompts", "--completion"])
def test_texts(option, content, refused):
    if content is not None:
        Path("bad.txt").write_bytes(content)
    assert "bad.txt" in refused(option, "bad.txt", code=1)


def test_texts_on_stdin(refused):
    assert "on stdin is empty" in refused("--prompt", "-", code=1, stdin=b"")
    assert "on stdin is not UTF-8" in refused("--prompt", "-", code=1, stdin=b"\xff\xff")


def test_a_folder_for_a_prompt(refused):
    assert "is a folder" in refused("--prompt", ".", code=1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--budget", "32", "--recent", "32"), "give a budget of at least 33"),
        (("--budget", "36", "--recent", "32", "--sinks", "4"), "give a budget of at least 37"),
        (("--beacons", "-1"), "beacons is -1; give 0 to 256"),
        (("--beacons", "257"), "beacons is 257; give 0 to 256"),
        (("--interval", "0"), "interval is 0"),
        (("--recent", "-1"), "recent is -1"),
        (("--recent", "0", "--beacons", "0"), "nothing observes"),
        (("--selector", "kmeans", "--beacon-rotation", "own"), "give --beacon-rotation current"),
        (("--pool-low", "8"), "give --pool-low at least 16"),
        (("--pool-low", "40", "--pool-high", "40"), "give at least 41"),
        (("--max-new-tokens", "0"), "max-new-tokens is 0"),
        (("--layers", "2"), "goes to 2, but there are 2 (0 to 1)"),
        (("--layers", "first"), "is no list; write all, auto"),
        (("--layers", ""), "is no list"),
        (("--heads", "2"), "goes to 2, but there are 2 (0 to 1)"),
        (("--heads", "1-0"), "is no list"),
        (("--prefill-chunk", "0"), "prefill-chunk is 0"),
        (("--system", "Be brief."), "leave out --system or --raw"),
        (("--top-p", "0"), "top-p is 0"),
        (("--think-open", ""), "must not be empty"),
        (("--cache", "beacon:budget=many"), "budget"),
    ],
)
def test_options(arguments, says, refused):
    assert says in refused(*arguments, code=2)


def test_models(refused, model_folder):
    assert "cannot load the model no/such" in refused("--model", "no/such", code=1)
    assert "there is no model ./none" in refused("--model", "./none", code=1)
    Path("empty").mkdir()
    assert "holds no model" in refused("--model", "empty", code=1)
    shutil.copytree(model_folder, "bare")
    Path("bare/model.safetensors").unlink()
    assert "holds no weights" in refused("--model", "bare", code=1)
    Path("bare/model.safetensors").write_bytes(b"no weights")
    assert "bare/model.safetensors is not a whole safetensors file" in refused("--model", "bare", code=1)
    Path("broken.gguf").write_bytes(b"GGUF and nothing else")
    assert "broken.gguf" in refused("--model", "broken.gguf", code=1)
    Path("broken.gguf").write_bytes(b"something else")
    assert "is not a GGUF file" in refused("--model", "broken.gguf", code=1)


def test_devices(refused):
    import torch

    assert "is no device" in refused("--device", "gpu", code=1)
    if not torch.cuda.is_available():
        assert "give --device cpu" in refused("--device", "cuda", code=1)


def test_a_text_over_the_context(refused, tmp_path):
    tiny_model(max_position_embeddings=48).save_pretrained("short")
    tiny_tokenizer().save_pretrained("short")
    Path("long.txt").write_text("x" * 60)
    line = refused("--model", "short", "--prompt", "long.txt", code=1)
    assert "the prompt has 60 tokens, but the model's context is 48" in line
    line = refused("--model", "short", "--completion", "long.txt", code=1)
    assert "prompt and completion have 92 tokens, but the model's context is 48" in line
    Path("many.jsonl").write_text(json.dumps({"id": "a", "prompt": "x" * 60}))
    line = refused("--model", "short", "--prompts", "many.jsonl", code=1)
    assert "prompt a: the prompt has 60 tokens, but the model's context is 48" in line


def test_a_tokenizer_without_a_chat_template(run, here):
    tiny_model().save_pretrained("plain")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained("plain")
    result = run("record", "-q", "--model", "plain", "--prompt", "plan.txt")
    assert (result.exit_code, result.stdout) == (1, "")
    assert (
        result.stderr == "error: this model's tokenizer has no chat template; give --raw to feed the prompt as it is\n"
    )
    assert not Path("plan.parquet").exists()


def test_outputs(refused):
    Path("plan.parquet").write_bytes(b"precious")
    assert "give --force" in refused(code=1)
    assert "mkdir -p none" in refused("-o", "none/t.parquet", code=1)
    assert "is a file, not a folder" in refused("-o", "plan.txt/t.parquet", code=1)
    assert "is a folder" in refused("-o", ".", code=1)
    # Where root cannot write either.
    assert "/proc" in refused("-o", "/proc/t.parquet", code=1)
    Path("many.jsonl").write_text('{"id": "a", "prompt": "b"}')
    assert "is a file" in refused("--prompts", "many.jsonl", "-o", "plan.txt", code=1)
    assert "/proc/traces" in refused("--prompts", "many.jsonl", "-o", "/proc/traces", code=1)


def test_no_room_on_the_disk(refused, monkeypatch):
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 10_000)
    assert "10 kB free" in refused(code=1)
    Path("many.jsonl").write_text('{"id": "a", "prompt": "b"}')
    assert "10 kB free" in refused("--prompts", "many.jsonl", code=1)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("no json", "line 1: no JSON"),
        ('{"id": "a"}', "line 1: no 'prompt'"),
        ('{"id": "a", "prompt": "x"}\n\n{"id": "a", "prompt": "y"}', "line 3: the id 'a' is that of line 1"),
        ('{"id": "../a", "prompt": "x"}', "cannot name a file"),
    ],
)
def test_files_of_many_prompts(lines, says, refused):
    Path("many.jsonl").write_text(lines)
    assert says in refused("--prompts", "many.jsonl", code=1)
