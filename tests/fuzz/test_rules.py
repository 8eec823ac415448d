"""What the package must never do, however the input asks for it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import beaconscope
from beaconscope.errors import BeaconScopeError
from beaconscope.models import LoadOptions, load_model
from tests.tiny import tiny_model, tiny_tokenizer

PACKAGE = Path(beaconscope.__file__).parent
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "yaml"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "joblib.load", "pd.read_pickle"}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def test_nothing_is_unpickled_and_no_text_is_run(trees: dict[str, ast.Module]) -> None:
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [(name, each.name) for each in node.names if each.name.split(".")[0] in UNSAFE_MODULES]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_MODULES:
                found.append((name, str(node.module)))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
                found.append((name, ast.unparse(node)))
    assert found == []


def test_files_of_arrays_and_weights_are_read_as_data_only(trees: dict[str, ast.Module]) -> None:
    for name, tree in trees.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert given.get("allow_pickle", "False") == "False", name
            assert given.get("shell", "False") == "False", name
            if ast.unparse(call.func).endswith("torch.load"):
                assert given.get("weights_only") == "True", name


def test_every_text_file_is_opened_in_utf8(trees: dict[str, ast.Module]) -> None:
    """Python's default is that of the locale."""
    found = []
    for name, tree in trees.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            whole = ast.unparse(call.func)
            function = whole.rpartition(".")[2]
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            modes = [each.value for each in [*call.args, given.get("mode")] if isinstance(each, ast.Constant)]
            binary = any(re.fullmatch("[rwax+]*b[+]?", str(mode)) for mode in modes)
            opens = function == "open" and whole not in ("os.open", "webbrowser.open") and not binary
            reads = function in ("read_text", "write_text") and "." in whole
            if (opens or reads or (whole.startswith("subprocess.") and "text" in given)) and "encoding" not in given:
                found.append((name, ast.unparse(call)))
    assert found == []


def test_code_that_a_model_brings_is_not_run_unless_asked(tmp_path: Path) -> None:
    """GIVEN a model whose folder names code of its own WHEN it is loaded THEN the code is not run."""
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    marker = tmp_path / "was-run"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BeaconScopeError) as caught:
        load_model(LoadOptions(str(tmp_path)))
    assert not marker.exists()
    assert "give --trust-remote-code" in str(caught.value)


def test_weights_that_are_a_pickled_program_are_not_run(tmp_path: Path) -> None:
    """GIVEN weights in the old format that run a program when unpickled WHEN they are loaded THEN it does not run."""
    import pickle

    import torch

    model = tiny_model()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    marker = tmp_path / "was-run"

    class Evil:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    torch.save({**model.state_dict(), "evil": Evil()}, tmp_path / "pytorch_model.bin", pickle_module=pickle)
    with pytest.raises(BeaconScopeError):
        load_model(LoadOptions(str(tmp_path)))
    assert not marker.exists()
