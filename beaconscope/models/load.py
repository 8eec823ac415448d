"""Load a model and its tokenizer: from a hub, a local folder or a GGUF file."""

from __future__ import annotations

import difflib
import importlib.util
import re
import socket
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
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from beaconscope.errors import BeaconScopeError

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
BUNDLED = "tiny-reasoner"
"""Name of the model that comes with BeaconScope."""
BUNDLED_FOLDER = Path(__file__).resolve().parents[1] / "reasoner" / "model"
_CLOSE = 0.8
"""Likeness from which on one name may be meant by another."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_TOKENIZERS = ("tokenizer*", "vocab*", "tekken.json", "*.model", "*.tiktoken")

Dtype = Literal["auto", "float32", "float16", "bfloat16"]


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


def load_model(options: LoadOptions) -> LoadedModel:
    """Load a model for inference.

    Raises
    ------
    BeaconScopeError
        When the model is missing or lacks weights, the device is absent, or the library cannot load it.
    """
    device = None if options.device_map else pick_device(options.device)
    source, extra = _locate(options)
    common: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code, **extra}
    common = {key: value for key, value in common.items() if value is not None}
    if options.dtype not in get_args(Dtype):
        raise BeaconScopeError(
            f"{options.dtype!r} is no type to load a model in; give one of {', '.join(get_args(Dtype))}"
        )
    loading: dict[str, Any] = {"dtype": options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)}
    if options.attn != "auto":
        loading["attn_implementation"] = options.attn
    if options.device_map:
        loading["device_map"] = options.device_map
    try:
        with _library_errors(options.model):
            tokenizer = AutoTokenizer.from_pretrained(source, **common)
            pair: Any = AutoModelForCausalLM.from_pretrained(
                source, **common, **loading, output_loading_info=True, ignore_mismatched_sizes=True
            )
            model: PreTrainedModel = pair[0]
            found: dict[str, Any] = pair[1]
            _check_weights(options.model, found)
            if device is not None:
                model.to(device)  # type: ignore[arg-type]  # the library wraps the method and loses its type
    except torch.OutOfMemoryError:
        raise BeaconScopeError(
            f"{options.model} does not fit into the memory of {device or 'the devices'}; give --dtype bfloat16, "
            "--device-map auto or another device"
        ) from None
    model.train(False)
    return LoadedModel(model, tokenizer, options.model, options.revision)


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
def _library_errors(model: str) -> Iterator[None]:
    """Say in one line what the library has against a model's files, whose faults it answers with errors of any kind."""
    try:
        yield
    except (torch.OutOfMemoryError, BeaconScopeError):
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise BeaconScopeError(
                f"{model} brings code of its own, which is not run unasked; read it, then give --trust-remote-code"
            ) from error
        # What it says runs over many lines; the first says what is wrong.
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        remedy = "; is the file whole?" if model.lower().endswith(".gguf") else _meant(Path(model))
        if _of_the_hub(error):
            remedy += f"; the bundled model needs no hub: --model {BUNDLED}"
            first = first.rstrip(".")
        raise BeaconScopeError(f"cannot load the model {model}: {first.removesuffix(':')}{remedy}") from error


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
    with suppress(OSError):
        likely |= {
            each.name.casefold(): str(path.with_name(each.name))
            for each in path.expanduser().parent.iterdir()
            if each.is_dir() or each.suffix.lower() == ".gguf"
        }
    close = difflib.get_close_matches(path.name.casefold(), likely, n=1, cutoff=_CLOSE)
    return f"; did you mean {likely[close[0]]}?" if close else ""


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


def _locate(options: LoadOptions) -> tuple[str, dict[str, Any]]:
    """Where to load from, and the arguments that it needs."""
    if not options.model:
        raise BeaconScopeError("no model is named; give a local folder, a .gguf file or a hub id (owner/name)")
    path = Path(options.model).expanduser()
    if options.model == BUNDLED and not path.exists():
        path = BUNDLED_FOLDER
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise BeaconScopeError(f"there is no model file {options.model}{_meant(Path(options.model))}")
        if importlib.util.find_spec("gguf") is None:
            raise BeaconScopeError("GGUF files need the package gguf; run: pip install 'beaconscope[gguf]'")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise BeaconScopeError(f"{options.model} is no GGUF file")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BeaconScopeError(f"the folder {options.model} holds no model (no config.json)")
        if not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
            raise BeaconScopeError(f"the folder {options.model} holds no weights (such as model.safetensors)")
        # transformers 5.2 would make up an empty one.
        if not any(any(path.glob(pattern)) for pattern in _TOKENIZERS):
            raise BeaconScopeError(f"the folder {options.model} holds no tokenizer (such as tokenizer.json)")
        return str(path), {}
    if path.is_file():
        raise BeaconScopeError(f"{options.model} is a file but no .gguf; give the folder that holds the model")
    meant = _meant(Path(options.model))
    # The hub has no model of such a name without an owner, and need not be asked.
    if not _HUB_ID.fullmatch(options.model) or BUNDLED in meant:
        raise BeaconScopeError(
            f"there is no model {options.model}; give a local folder, a .gguf file or a hub id (owner/name){meant}"
        )
    return options.model, {"local_files_only": True} if _hub_is_unknown() else {}
