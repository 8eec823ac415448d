"""Which models load, and what is said of those that do not."""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
import socket
import struct
from pathlib import Path

import pytest
import torch

from beaconscope import BeaconScopeError, LoadOptions, load_model
from beaconscope.models import load_tokenizer
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


def write(name: str, content: bytes | str):
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def remove(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(name: str, length: int):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:length])


def config(**changes):
    return lambda folder: change_config(folder, **changes)


def only_class(name: str):
    """No file of the tokenizer but the name of its class."""

    def change(folder: Path) -> None:
        remove("tokenizer.json")(folder)
        write("tokenizer_config.json", json.dumps({"tokenizer_class": name}))(folder)

    return change


def vocabulary(name: str, content: str = ""):
    """A vocabulary of another kind in place of tokenizer.json."""

    def change(folder: Path) -> None:
        remove("tokenizer.json", "tokenizer_config.json")(folder)
        write(name, content)(folder)

    return change


def torch_file(content: bytes):
    def change(folder: Path) -> None:
        remove("model.safetensors")(folder)
        write("pytorch_model.bin", content)(folder)

    return change


def link_to_nothing(name: str):
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("../blobs/none")

    return change


def make_folder(name: str):
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def adapter(folder: Path) -> None:
    remove("config.json", "model.safetensors")(folder)
    write("adapter_config.json", "{}")(folder)


def code(folder: Path) -> None:
    """A pickle that calls a function when it is read."""

    class Call:
        def __reduce__(self):
            return print, ("called",)

    remove("model.safetensors")(folder)
    torch.save({"weight": Call()}, folder / "pytorch_model.bin")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
BROKEN = {
    "no config": (remove("config.json"), "holds no model (no config.json)"),
    "no weights": (remove("model.safetensors"), "holds no weights"),
    "an adapter": (adapter, "holds an adapter, not a model; merge it"),
    "config of no JSON": (write("config.json", "{"), "config.json is not valid JSON"),
    "config empty": (write("config.json", ""), "config.json is not valid JSON"),
    "config of bytes": (write("config.json", b"\xff\xfe"), "config.json is not UTF-8 (byte 0)"),
    "config a list": (write("config.json", "[]"), "config.json must hold a JSON object"),
    "config null": (write("config.json", "null"), "config.json must hold a JSON object"),
    "config a number": (write("config.json", "3"), "config.json must hold a JSON object"),
    "config with nothing": (write("config.json", "{}"), "Unrecognized model"),
    "config too deep": (write("config.json", "[" * 100_000), "config.json is not valid JSON"),
    "config a broken link": (link_to_nothing("config.json"), "config.json is a link to a file that is missing"),
    "config a folder": (make_folder("config.json"), "config.json is a folder, not a file"),
    "unknown architecture": (config(model_type="nonsense"), "model type `nonsense`"),
    "architecture a number": (config(model_type=3), "model_type must be text"),
    "architecture null": (config(model_type=None), "model_type must be text"),
    "no causal model": (config(model_type="t5"), "is not a causal language model (its model_type is t5)"),
    "an image model": (config(model_type="vit"), "is not a causal language model (its model_type is vit)"),
    "size a text": (config(hidden_size="32"), ""),
    "size null": (config(vocab_size=None), ""),
    "no layers": (config(num_hidden_layers=0), "has 0 layers by its config.json"),
    "fewer than no layers": (config(num_hidden_layers=-1), "has -1 layers by its config.json"),
    "no heads": (config(num_attention_heads=0), "ZeroDivisionError"),
    "unknown activation": (config(hidden_act="nonsense"), "KeyError: 'nonsense'"),
    "unknown rotary embedding": (config(rope_parameters={"rope_type": "none", "rope_theta": 1e4}), "KeyError: 'none'"),
    "unknown type": (config(dtype="float17"), "float17"),
    "too large": (config(hidden_size=10**9), "does not fit into memory; give --dtype bfloat16"),
    "quantized": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "pip install optimum"),
    "quantized how": (config(quantization_config="x"), "'str' object has no attribute"),
    "code of its own": (
        config(model_type="own", auto_map={"AutoConfig": "own.Config"}),
        "read it, then give --trust-remote-code",
    ),
    "weights empty": (write("model.safetensors", ""), "is not a whole safetensors file"),
    "weights of garbage": (write("model.safetensors", "garbage garbage"), "is not a whole safetensors file"),
    "weights cut short": (cut("model.safetensors", -1000), "is not a whole safetensors file"),
    "weights cut in their header": (cut("model.safetensors", 100), "is not a whole safetensors file"),
    "weights not fetched": (write("model.safetensors", POINTER), "is a pointer of Git LFS, not the file itself"),
    "weights a broken link": (link_to_nothing("model.safetensors"), "is a link to a file that is missing"),
    "weights a folder": (make_folder("model.safetensors"), "model.safetensors is a folder, not a file"),
    "torch weights of garbage": (torch_file(b"garbage"), "are damaged, or would run code"),
    "torch weights empty": (torch_file(b""), "are damaged, or would run code"),
    "torch weights not fetched": (torch_file(POINTER.encode()), "is a pointer of Git LFS"),
    "torch weights with code": (code, "are damaged, or would run code"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "holds no tokenizer"),
    "tokenizer of garbage": (write("tokenizer.json", "garbage"), "tokenizer.json is not valid JSON"),
    "tokenizer cut short": (cut("tokenizer.json", 500), "tokenizer.json is not valid JSON"),
    "tokenizer not fetched": (write("tokenizer.json", POINTER), "tokenizer.json is a pointer of Git LFS"),
    "tokenizer with nothing": (write("tokenizer.json", "{}"), "cannot load the tokenizer of"),
    "tokenizer a list": (write("tokenizer.json", "[]"), "tokenizer.json must hold a JSON object"),
    "tokenizer settings of garbage": (write("tokenizer_config.json", "garbage"), "tokenizer_config.json is not valid"),
    "tokenizer class a number": (write("tokenizer_config.json", '{"tokenizer_class": 3}'), "cannot load the tokenizer"),
    # transformers makes up an empty one for all but the first.
    "tokenizer file missing": (remove("tokenizer.json"), "has no vocabulary, a file such as tokenizer.json is missing"),
    "Llama vocabulary missing": (only_class("LlamaTokenizer"), "has no vocabulary"),
    "Qwen vocabulary missing": (only_class("Qwen2Tokenizer"), "has no vocabulary"),
    "T5 vocabulary missing": (only_class("T5Tokenizer"), "has no vocabulary"),
    "GPT-2 vocabulary missing": (only_class("GPT2Tokenizer"), "has no vocabulary"),
    "special tokens of garbage": (write("special_tokens_map.json", "x"), "special_tokens_map.json is not valid JSON"),
    "chat template of bytes": (write("chat_template.jinja", b"\xff"), "chat_template.jinja is not UTF-8"),
    "generation settings of garbage": (
        write("generation_config.json", "x"),
        "generation_config.json is not valid JSON",
    ),
}


@pytest.mark.parametrize(("change", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_folder_is_one_line_with_a_remedy(folder, change, says):
    change(folder)
    said = refusal(folder)
    assert says in said
    assert str(folder) in said
    # An existing folder is not asked about, and there is something to do.
    assert "did you mean" not in said
    assert "; " in said or "pip install" in said
    assert len(said) < 600


@pytest.mark.parametrize(
    ("file", "package"),
    [("tokenizer.model", "sentencepiece"), ("x.tiktoken", "tiktoken"), ("tekken.json", "mistral-common")],
)
def test_a_tokenizer_that_needs_a_package_names_it(folder, file, package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name.replace("_", "-") == package else find(name, *rest)
    )
    vocabulary(file, "{}" if file.endswith("json") else "garbage")(folder)
    said = refusal(folder)
    assert "tokenizer" in said
    assert package in said or "has no vocabulary" in said  # transformers 5.2 makes up a tokenizer
    assert "did you mean" not in said


@pytest.fixture
def parts(tmp_path) -> Path:
    """A model whose weights are in several files."""
    folder = tmp_path / "parts"
    tiny_model("llama").save_pretrained(folder, max_shard_size="30KB")
    tiny_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: min(folder.glob("model-*")).unlink(), "model-00001-of-00006.safetensors is missing"),
        (cut("model-00002-of-00006.safetensors", -10), "model-00002-of-00006.safetensors is not a whole safetensors"),
        (remove(INDEX), f"holds weights in parts without their index ({INDEX})"),
        (write(INDEX, "garbage"), f"{INDEX} is not valid JSON"),
        (write(INDEX, "[]"), f"{INDEX} must hold a JSON object"),
        (write(INDEX, "{}"), f"{INDEX} does not say which file has which weight"),
        (write(INDEX, '{"weight_map": {"lm_head.weight": 3}}'), f"{INDEX} does not say which file has which weight"),
        (write(INDEX, '{"weight_map": {"lm_head.weight": "other"}}'), "other is missing"),
    ],
)
def test_weights_in_parts(parts, change, says):
    assert load_model(LoadOptions(str(parts))).model.num_parameters() == tiny_model("llama").num_parameters()
    change(parts)
    said = refusal(parts)
    assert says in said
    assert "did you mean" not in said


def test_files_that_may_not_be_read(folder, monkeypatch):
    def refuse(path: Path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert f"{folder}/config.json cannot be read (Permission denied); check its permissions" in refusal(folder)
    monkeypatch.setattr("os.listdir", refuse)
    assert f"the folder {folder} cannot be read (Permission denied); check its permissions" in refusal(folder)


def test_a_tokenizer_is_loaded_without_the_weights(good, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    tokenizer = load_tokenizer(LoadOptions(str(good)))
    assert tokenizer("abc").input_ids == [97, 98, 99]


@pytest.mark.parametrize("change", ["no tokenizer", "tokenizer with nothing", "weights cut short", "no causal model"])
def test_what_can_be_known_before_the_weights_is_said_before(folder, change, monkeypatch):
    def load(*_, **__):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    BROKEN[change][0](folder)
    refusal(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04 something else", "is not a GGUF file"),
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


@pytest.mark.parametrize("name", ["model.gguf", "model.Q4.gguf", "tiny-reasoner", "tiny-reasoners"])
def test_an_existing_name_is_never_suggested_for_itself(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    said = refusal(name)
    assert said == f"the folder {name} holds no model (no config.json); give the folder that has it"


@pytest.mark.parametrize("name", ["link", "link.gguf"])
def test_a_link_to_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).symlink_to("none")
    assert refusal(name) == f"{name} is a link to a file that is missing; give where the model is"


@pytest.mark.parametrize("name", ["~nobody-of-that-name/model", "x" * 5000, "a/" * 3000, "./a\0b"])
def test_a_name_that_no_file_can_have(name):
    assert refusal(name).startswith(f"there is no model {name}; give a local folder")


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
