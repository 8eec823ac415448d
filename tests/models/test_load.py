"""Which models load, and what is said of those that do not."""

from __future__ import annotations

import json
import shutil
import socket
import struct
from pathlib import Path

import pytest
import torch

from beaconscope import BeaconScopeError, LoadOptions, load_model
from beaconscope.models.load import pick_device
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "good"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(good, tmp_path) -> Path:
    """A copy that may be broken."""
    shutil.copytree(good, tmp_path / "model")
    return tmp_path / "model"


def refusal(model: str | Path, **options) -> str:
    with pytest.raises(BeaconScopeError) as caught:
        load_model(LoadOptions(str(model), **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_local_folder(good):
    loaded = load_model(LoadOptions(str(good)))
    assert (loaded.id, loaded.revision) == (str(good), None)
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert torch.equal(loaded.model.lm_head.weight, tiny_model("llama").lm_head.weight)
    assert loaded.tokenizer("abc").input_ids == [97, 98, 99]


def test_another_dtype_and_backend(good):
    model = load_model(LoadOptions(str(good), dtype="bfloat16", attn="eager", device="cpu")).model
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


def test_weights_in_a_torch_file_and_tied_ones(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_model(LoadOptions(str(tmp_path))).model.config.tie_word_embeddings
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = load_model(LoadOptions(str(tmp_path))).model
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_that_are_missing_are_not_made_up(folder):
    change_config(folder, num_hidden_layers=4)
    said = refusal(folder)
    assert "incomplete: 18 are missing" in said
    assert "model.layers.2." in said


def test_weights_of_another_shape(folder):
    change_config(folder, hidden_size=64)
    assert "do not fit its config.json: lm_head.weight has shape [264, 32], not [264, 64]" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("model.safetensors", b"garbage", "cannot load the model"),
        ("model.safetensors", b"", "cannot load the model"),
        ("config.json", b"{", "not a valid JSON file"),
        ("config.json", b"\xff\xfe", "not a valid JSON file"),
        ("config.json", b"{}", "Unrecognized model"),
        ("config.json", b'{"model_type": "nonsense"}', "nonsense"),
        ("tokenizer.json", b"garbage", "cannot load the model"),
        ("config.json", None, "holds no model (no config.json)"),
        ("model.safetensors", None, "holds no weights"),
    ],
)
def test_a_broken_folder(folder, file, content, says):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    assert says in refusal(folder)


def test_weights_cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "cannot load the model" in refusal(folder)


def test_a_folder_without_a_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "holds no tokenizer" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no GGUF file"),
        (b"PK\x03\x04 something else", "is no GGUF file"),
        (b"GGUF", "is the file whole?"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "is the file whole?"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "is the file whole?"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + b"x" * 100, "is the file whole?"),
    ],
)
def test_a_broken_gguf_file(content, says, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    said = refusal(path)
    assert says in said
    assert str(path) in said


def test_gguf_without_its_package(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'beaconscope[gguf]'" in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("", "no model is named"),
        ("./none", "there is no model ./none"),
        ("a/b/c", "there is no model a/b/c"),
        ("~/none.gguf", "there is no model file"),
        ("no/such-model", "cannot load the model no/such-model"),
    ],
)
def test_a_model_that_is_not_there(model, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in refusal(model)


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        ("tiny-reasner", "tiny-reasoner"),
        ("Tiny_Reasoner", "tiny-reasoner"),
        ("models/qwen-4b", "models/qwen3-4b"),
        ("./model.Q4.gguf", "model.Q4_1.gguf"),
        ("model.Q4.guf", "model.Q4_1.gguf"),
    ],
)
def test_a_name_close_to_one_that_is_there(model, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen3-4b").mkdir(parents=True)
    (tmp_path / "model.Q4_1.gguf").touch()
    said = refusal(model)
    assert f"; did you mean {meant}?" in said


def test_without_a_hub_the_bundled_model_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal("no/such-model").endswith("; the bundled model needs no hub: --model tiny-reasoner")


def test_a_hub_without_an_address_is_not_asked_again_and_again(tmp_path, monkeypatch):
    def nowhere(*_):
        raise socket.gaierror("Name or service not known")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("beaconscope.models.load.getproxies", dict)
    monkeypatch.setattr("socket.getaddrinfo", nowhere)
    # Whoever asked it, or waited to ask it once more, would fail here.
    monkeypatch.setattr("time.sleep", None)
    monkeypatch.setattr("huggingface_hub.utils._http.get_session", None)
    said = refusal("no/such-model")
    assert "cannot load the model no/such-model" in said
    assert said.endswith("; the bundled model needs no hub: --model tiny-reasoner")


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "model.txt").write_text("hello")
    assert "give the folder that holds the model" in refusal(tmp_path / "model.txt")


@pytest.mark.parametrize("name", ["nonsense", "meta", ""])
def test_what_is_no_device(name):
    with pytest.raises(BeaconScopeError, match="is no device; give auto, cpu"):
        pick_device(name)


def test_devices_that_are_absent(monkeypatch):
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BeaconScopeError, match="give --device cpu"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(BeaconScopeError, match="this machine has 2"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(BeaconScopeError, match="no MPS device"):
        pick_device("mps")
