"""Checks of a local model folder that come before loading: the file that is missing, cut or unreadable is named.

Small files are read whole, of the weights only the headers.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from beaconscope.errors import BeaconScopeError
from beaconscope.files import os_reason

_JSON = (
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In the order in which transformers looks for them; that of an index of several files adds ``.index.json``."""
_VOCABULARIES = ("tokenizer.json", "vocab*", "tekken.json", "*.model", "*.spm", "*.tiktoken")
"""Names of which nearly every tokenizer has at least one."""
_PACKAGES = {
    "*.model": "sentencepiece",
    "*.spm": "sentencepiece",
    "*.tiktoken": "tiktoken",
    "tekken.json": "mistral-common",
}
"""Those that read a vocabulary other than tokenizer.json."""
_LFS_POINTER = b"version https://git-lfs.github.com/"


def check_model_folder(folder: Path, name: str) -> None:
    """Refuse a folder that holds no whole model.

    Parameters
    ----------
    folder
        It exists.
    name
        The model as the user named it.

    Raises
    ------
    BeaconScopeError
        Naming the first file that is missing or cannot be used.
    """
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        raise BeaconScopeError(
            f"the folder {name} cannot be read ({os_reason(error)}); check its permissions"
        ) from error
    if "config.json" not in names:
        if "adapter_config.json" in names:
            raise BeaconScopeError(
                f"the folder {name} holds an adapter, not a model; merge it into its base model and save that"
            )
        raise BeaconScopeError(f"the folder {name} holds no model (no config.json); give the folder that has it")
    config = _read_object(folder / "config.json")
    if not isinstance(config.get("model_type", ""), str):
        raise BeaconScopeError(f"{folder / 'config.json'}: model_type must be text; fetch the file again")
    # Where the weights have another name, config.json says so.
    if "transformers_weights" not in config:
        for path in _weights(folder, names, name):
            _check_weights(path)
    # transformers makes up an empty tokenizer where there is none.
    if not _has(names, *_VOCABULARIES, "tokenizer_config.json"):
        raise BeaconScopeError(f"the folder {name} holds no tokenizer (such as tokenizer.json); fetch the model again")
    for each in _JSON:
        if each in names:
            _read_object(folder / each)
    if "chat_template.jinja" in names:
        _read_text(folder / "chat_template.jinja")


def what_a_tokenizer_lacks(folder: Path) -> str | None:
    """Say why the tokenizer of a folder may have failed to load, and what to do; None where nothing is missing."""
    names = os.listdir(folder)
    if not _has(names, *_VOCABULARIES):
        return "has no vocabulary, a file such as tokenizer.json is missing; fetch the model again"
    if "tokenizer.json" in names:
        return None
    for pattern, package in _PACKAGES.items():
        if _has(names, pattern) and importlib.util.find_spec(package.replace("-", "_")) is None:
            return f"needs the package {package}; run: pip install {package}"
    return None


def _has(names: Collection[str], *patterns: str) -> bool:
    return any(fnmatch(name, pattern) for name in names for pattern in patterns)


def _weights(folder: Path, names: set[str], name: str) -> list[Path]:
    """The files of the weights that transformers is going to load."""
    for single in _WEIGHTS:
        if single in names:
            return [folder / single]
        index = f"{single}.index.json"
        if index in names:
            parts = _read_object(folder / index).get("weight_map")
            if not isinstance(parts, dict) or not parts or not all(isinstance(part, str) for part in parts.values()):
                raise BeaconScopeError(f"{folder / index} does not say which file has which weight; fetch it again")
            return [folder / part for part in sorted(set(parts.values()))]
    if any("-of-" in each for each in names):
        raise BeaconScopeError(
            f"the folder {name} holds weights in parts without their index ({_WEIGHTS[0]}.index.json); fetch it again"
        )
    raise BeaconScopeError(
        f"the folder {name} holds no weights that transformers loads ({' or '.join(_WEIGHTS)}); "
        "fetch them, or convert what is there"
    )


def _check_weights(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise _unreadable(path, error) from error
    _check_no_pointer(path, head)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise BeaconScopeError(f"{path} is not a whole safetensors file ({error}); fetch it again") from error


def _read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file."""
    text = _read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BeaconScopeError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise BeaconScopeError(f"{path} must hold a JSON object; fetch it again")
    return value


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    _check_no_pointer(path, data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BeaconScopeError(f"{path} is not UTF-8 (byte {error.start}); fetch it again") from error


def _check_no_pointer(path: Path, data: bytes) -> None:
    if data.startswith(_LFS_POINTER):
        raise BeaconScopeError(f"{path} is a pointer of Git LFS, not the file itself; run: git lfs pull")


def _unreadable(path: Path, error: OSError) -> BeaconScopeError:
    if isinstance(error, FileNotFoundError):
        what = "is a link to a file that is missing" if path.is_symlink() else "is missing"
        return BeaconScopeError(f"{path} {what}; fetch the model again")
    if isinstance(error, IsADirectoryError):
        return BeaconScopeError(f"{path} is a folder, not a file; fetch the model again")
    return BeaconScopeError(f"{path} cannot be read ({os_reason(error)}); check its permissions")
