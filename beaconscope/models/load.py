"""Load a model and its tokenizer: from a hub, a local folder or a GGUF file."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import socket
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from beaconscope.errors import BeaconScopeError, no_memory
from beaconscope.files import os_reason
from beaconscope.models.folder import check_model_folder, what_a_tokenizer_lacks

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_LONGEST_HUB_ID = 96
BUNDLED = "tiny-reasoner"
"""Name of the model that comes with BeaconScope."""
BUNDLED_FOLDER = Path(__file__).resolve().parents[1] / "reasoner" / "model"
_CLOSE = 0.8
"""Likeness from which on one name may be meant by another."""
_FEWEST_TOKENS = 2
"""Fewest tokens of a vocabulary; special and added tokens do not count."""
_LONGEST_REASON = 300
"""Characters that are quoted of an error of the library."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
_Part = Literal["configuration", "tokenizer", "model"]


@dataclass(frozen=True)
class LoadOptions:
    """Which model to load, and how."""

    model: str
    """Hub id, local folder or ``.gguf`` file."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None is its main branch."""
    dtype: Dtype = "auto"
    """``auto`` is that of the weights."""
    device: str = "auto"
    """``cpu``, ``cuda:1``, ``mps``; ``auto`` is an accelerator where there is one."""
    device_map: str | None = None
    """Of transformers, such as ``auto``: spreads a model over devices, and ``device`` counts no more."""
    attn: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """``auto`` is sdpa where the model has it, else eager."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer and where they are from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    id: str
    """As it was asked for."""
    revision: str | None = None


@dataclass(frozen=True)
class _Source:
    """Where a model is loaded from."""

    path: str
    """Folder or hub id."""
    arguments: dict[str, Any]
    """Of ``from_pretrained``, for configuration, tokenizer and weights alike."""
    folder: Path | None
    """The folder of a local model that is not a GGUF file."""


def load_tokenizer(options: LoadOptions) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, and check all that can be checked of the model without its weights.

    Raises
    ------
    BeaconScopeError
        When the model is missing, one of its files cannot be used, it is not a causal language model, or it has no
        tokenizer.
    """
    source = _locate(options)
    if source.folder is not None:
        check_model_folder(source.folder, options.model)
    if "gguf_file" not in source.arguments:
        with _library_errors(source, options, "configuration"):
            config = AutoConfig.from_pretrained(source.path, **source.arguments)
        _check_config(options.model, config)
    with _library_errors(source, options, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source.path, **source.arguments)
        # Where files are missing, transformers makes up a tokenizer that has special tokens only.
        if len(set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder)) < _FEWEST_TOKENS:
            raise BeaconScopeError(
                f"the tokenizer of {options.model} has no vocabulary, a file such as tokenizer.json is missing; "
                "fetch the model again"
            )
    return tokenizer


def load_model(options: LoadOptions, tokenizer: PreTrainedTokenizerBase | None = None) -> LoadedModel:
    """Load a model for inference.

    Parameters
    ----------
    options
        Which, and how.
    tokenizer
        Of the same model, from ``beaconscope.models.load_tokenizer``; loaded here by default.

    Raises
    ------
    BeaconScopeError
        When the model is missing or lacks weights, the device is absent, or the library cannot load it.
    """
    device = None if options.device_map else pick_device(options.device)
    if options.dtype not in get_args(Dtype):
        raise BeaconScopeError(
            f"{options.dtype!r} is no type to load a model in; give one of {', '.join(get_args(Dtype))}"
        )
    # The tokenizer first: what is wrong with it is known at once, and weights may take minutes.
    tokenizer = load_tokenizer(options) if tokenizer is None else tokenizer
    source = _locate(options)
    loading: dict[str, Any] = {"dtype": options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)}
    if options.attn != "auto":
        loading["attn_implementation"] = options.attn
    if options.device_map:
        loading["device_map"] = options.device_map
    with _library_errors(source, options, "model"):
        pair: Any = AutoModelForCausalLM.from_pretrained(
            source.path, **source.arguments, **loading, output_loading_info=True, ignore_mismatched_sizes=True
        )
        model: PreTrainedModel = pair[0]
        found: dict[str, Any] = pair[1]
        _check_weights(options.model, found)
        if device is not None:
            model.to(device)  # type: ignore[arg-type]  # the library wraps the method and loses its type
    model.train(False)
    return LoadedModel(model, tokenizer, options.model, options.revision)


def local_path(name: str) -> Path:
    """The path that a model's name would be, with the home folder in place of ``~``."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        # A name from a trace, in a locale that has not all of its letters.
        name = os.fsdecode(name.encode("utf-8", "replace"))
    # Path.expanduser raises for users that do not exist.
    return Path(os.path.expanduser(name))


def is_bundled(model: PreTrainedModel) -> bool:
    """Whether it is the model that comes with BeaconScope."""
    return bool(getattr(model.config, "_name_or_path", "") == str(BUNDLED_FOLDER))


def pick_device(name: str) -> torch.device:
    """Turn ``auto`` or the name of a device into a device that is there.

    Raises
    ------
    BeaconScopeError
        For a name that is no device, or one that this machine does not have.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else accelerator
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError
    except RuntimeError:
        raise BeaconScopeError(f"{name!r} is no device; give auto, cpu, cuda, cuda:0 or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BeaconScopeError("no CUDA device can be used here; give --device cpu")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise BeaconScopeError(f"there is no device {name}; this machine has {torch.cuda.device_count()} (cuda:0 on)")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise BeaconScopeError("no MPS device can be used here; give --device cpu")
    return device


@contextmanager
def _library_errors(source: _Source, options: LoadOptions, part: _Part) -> Iterator[None]:
    """Turn errors of the library about a part of a model into one line; they are of any type and length."""
    name = options.model
    try:
        yield
    except BeaconScopeError:
        raise
    except Exception as error:
        if no_memory(error):
            raise BeaconScopeError(
                f"{name} does not fit into memory; give --dtype bfloat16, --device-map auto or another --device"
            ) from error
        if "trust_remote_code" in str(error):
            raise BeaconScopeError(
                f"{name} brings code of its own, which is not run unasked; read it, then give --trust-remote-code"
            ) from error
        if type(error).__name__ in ("UnpicklingError", "EOFError"):  # pickle itself is not imported here
            raise BeaconScopeError(
                f"the weights of {name} are damaged, or would run code when they are read; fetch them again, as "
                "safetensors if there are any"
            ) from error
        if part == "tokenizer" and source.folder is not None and (lack := what_a_tokenizer_lacks(source.folder)):
            raise BeaconScopeError(f"the tokenizer of {name} {lack}") from error
        what = f"the {part} of {name}" if source.folder is not None and part != "model" else f"the model {name}"
        remedy = _remedy(error, source, options, part)
        raise BeaconScopeError(f"cannot load {what}: {_reason(error)}{remedy}") from error


def _reason(error: Exception) -> str:
    """Return the text of an error as one line of limited length, after its type where the text alone is unclear."""
    text = _ANSI.sub("", str(error))
    if not text or not isinstance(error, OSError | ValueError | RuntimeError | ImportError):
        text = f"{type(error).__name__}: {text}"
    return textwrap.shorten(text, _LONGEST_REASON, placeholder=" ...").rstrip(".:; ")


def _remedy(error: Exception, source: _Source, options: LoadOptions, part: _Part) -> str:
    """Return what to do about an error of the library, after a semicolon; empty if the error says it."""
    said = str(error)
    if _of_the_hub(error):
        return f"{_meant(Path(options.model))}; the bundled model needs no hub: --model {BUNDLED}"
    if isinstance(error, ImportError) or "pip install" in said:
        return ""
    if "gguf_file" in source.arguments:
        return "; is the file whole?" if "not supported" not in said else "; give the original model"
    if source.folder is None:
        return _meant(Path(options.model))
    if part == "configuration":
        return f"; check {source.folder / 'config.json'}, or fetch it again"
    if part == "tokenizer":
        return "; fetch the files of the tokenizer again"
    return f"; check that {source.folder / 'config.json'} belongs to the weights, or fetch the model again"


def _of_the_hub(error: BaseException) -> bool:
    """Whether an error comes of a hub that was not to be reached."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _hub_is_unknown() -> bool:
    """Whether the hub has no address here: the library would ask for it again and again, for a minute."""
    host = urlsplit(constants.ENDPOINT).hostname
    # A proxy may know addresses that this machine does not.
    if constants.HF_HUB_OFFLINE or not host or getproxies():
        return False
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        return True
    return False


def _meant(path: Path) -> str:
    """A question whether another name was meant, the most similar of those there are; nothing where none is."""
    likely = {BUNDLED.casefold(): BUNDLED} if path.parent == Path() else {}
    with suppress(OSError, RuntimeError):
        likely |= {
            each.name.casefold(): str(path.with_name(each.name))
            for each in path.expanduser().parent.iterdir()
            if each.name != path.name and (each.is_dir() or each.suffix.lower() == ".gguf")
        }
    close = difflib.get_close_matches(path.name.casefold(), likely, n=1, cutoff=_CLOSE)
    return f"; did you mean {likely[close[0]]}?" if close else ""


def _check_config(model: str, config: PreTrainedConfig) -> None:
    """Refuse a model that cannot write text token by token, or has no layers."""
    own = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in own:
        raise BeaconScopeError(
            f"{model} is not a causal language model (its model_type is {config.model_type}); give one that is"
        )
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise BeaconScopeError(f"{model} has {layers} layers by its config.json; fetch it again")


def _check_weights(model: str, found: Mapping[str, Any]) -> None:
    """Refuse a model some of whose weights the library had to make up."""
    for name, held, wanted in sorted(found["mismatched_keys"], key=lambda key: str(key[0])):
        raise BeaconScopeError(
            f"the weights of {model} do not fit its config.json: {name} has shape {list(held)}, not {list(wanted)}"
        )
    missing = sorted(found["missing_keys"])
    if missing:
        raise BeaconScopeError(
            f"the weights of {model} are incomplete: {len(missing)} are missing, such as {missing[0]}; fetch it again"
        )


def _locate(options: LoadOptions) -> _Source:
    """Where to load from, and the arguments that it needs.

    Raises
    ------
    BeaconScopeError
        When there is no such model.
    """
    name = options.model
    if not name:
        raise BeaconScopeError("no model is named; give a local folder, a .gguf file or a hub id (owner/name)")
    path = local_path(name)
    if name == BUNDLED and not os.path.lexists(path):
        path = BUNDLED_FOLDER
    arguments: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    if options.revision is not None:
        arguments["revision"] = options.revision
    if os.path.exists(path):
        _check_encoding(path, name)
    if os.path.isdir(path):
        return _Source(str(path), arguments, path)
    if os.path.islink(path) and not os.path.exists(path):
        raise BeaconScopeError(f"{name} is a link to a file that is missing; give where the model is")
    if path.suffix.lower() == ".gguf":
        _check_gguf(path, name)
        return _Source(str(path.parent), arguments | {"gguf_file": path.name}, None)
    if os.path.exists(path):
        raise BeaconScopeError(f"{name} is a file but no .gguf; give the folder that holds the model")
    meant = _meant(Path(name))
    # The hub has no model of such a name without an owner, and need not be asked.
    if not _HUB_ID.fullmatch(name) or len(name) > _LONGEST_HUB_ID or BUNDLED in meant:
        raise BeaconScopeError(
            f"there is no model {name}; give a local folder, a .gguf file or a hub id (owner/name){meant}"
        )
    if _hub_is_unknown():
        arguments["local_files_only"] = True
    return _Source(name, arguments, None)


def _check_encoding(path: Path, name: str) -> None:
    """Refuse a path that the libraries would not find: whatever the locale, they take paths for UTF-8."""
    data = os.fsencode(path)
    if data == str(path).encode("utf-8", "replace"):
        return
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        raise BeaconScopeError(f"the name of {name} is not UTF-8, which transformers needs; rename it") from None
    raise BeaconScopeError(f"transformers cannot find {name} in this locale; set PYTHONUTF8=1 and run this again")


def _check_gguf(path: Path, name: str) -> None:
    """Refuse a GGUF file that is missing, unreadable, or cannot be read for want of a package."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except FileNotFoundError:
        raise BeaconScopeError(f"there is no model file {name}{_meant(Path(name))}") from None
    except OSError as error:
        raise BeaconScopeError(f"{name} cannot be read ({os_reason(error)}); check its permissions") from error
    if importlib.util.find_spec("gguf") is None:
        raise BeaconScopeError("GGUF files need the package gguf; run: pip install 'beaconscope[gguf]'")
    if head != b"GGUF":
        raise BeaconScopeError(f"{name} is not a GGUF file; give another, or fetch it again")
