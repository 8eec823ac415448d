"""Reading what a recording starts from: a text file, or a JSON Lines file of many prompts."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beaconscope.errors import BeaconScopeError

STDIN = "-"

_MOST_BYTES = 256 << 20
"""Of a text; more is no text, but a device that never ends or the wrong file."""
# Names that Windows keeps for devices, whatever their ending.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)

_FILE_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)


@dataclass(frozen=True)
class Prompt:
    """One of many prompts."""

    id: str
    """Names its trace; letters, digits, dots, dashes and underscores."""
    prompt: str
    completion: str | None = None
    """A chain of thought to be teacher-forced instead of generated."""
    answer: str | None = None
    """The right answer, kept with the trace."""


def names_a_file(identifier: str) -> bool:
    """Whether the id of a prompt can be the name of a file."""
    return (
        _FILE_NAME.fullmatch(identifier) is not None
        and not identifier.startswith(".")
        and _DEVICES.fullmatch(identifier) is None
    )


def read_text(source: str, what: str) -> str:
    """Read a UTF-8 text file, less a byte-order mark and the one line break that editors put at the end.

    Parameters
    ----------
    source
        A path, or ``-`` for stdin.
    what
        What the text is, for the error: ``prompt``, ``completion``.

    Raises
    ------
    BeaconScopeError
        If it is missing, a folder, unreadable, empty, binary or not UTF-8.
    """
    name = f"the {what} on stdin" if source == STDIN else f"the {what} file {source}"
    data = _read_bytes(source, name)
    if len(data) > _MOST_BYTES:
        raise BeaconScopeError(f"{name} has more than {_MOST_BYTES >> 20} MB; give a part of it at a time")
    if b"\0" in data:
        raise BeaconScopeError(f"{name} is binary; give a text file in UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BeaconScopeError(
            f"{name} is not UTF-8 (byte {error.start}); convert it first, for instance with iconv"
        ) from None
    if not text.strip():
        raise BeaconScopeError(f"{name} is empty; give it some text")
    return text.removesuffix("\n").removesuffix("\r")


def read_prompts(source: str) -> tuple[Prompt, ...]:
    """Read a JSON Lines file with an object such as ``{"id": "p1", "prompt": "..."}`` on each line.

    ``completion`` and ``answer`` may be added; other keys are passed over; blank lines too.

    Parameters
    ----------
    source
        A path, or ``-`` for stdin.

    Raises
    ------
    BeaconScopeError
        For what :func:`read_text` refuses, and with its number for a line that is no such object or repeats an id.
    """
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(read_text(source, "prompts").split("\n"), start=1):
        if not line.strip():
            continue
        prompt = _parse_line(line, f"{source}, line {number}")
        # Two ids that differ in case alone would be one file on some disks.
        first = seen.setdefault(prompt.id.casefold(), number)
        if first != number:
            raise BeaconScopeError(
                f"{source}, line {number}: the id {prompt.id!r} is that of line {first}; give every prompt its own"
            )
        prompts.append(prompt)
    return tuple(prompts)


def _read_bytes(source: str, name: str) -> bytes:
    if source == STDIN:
        return sys.stdin.buffer.read(_MOST_BYTES + 1)
    try:
        with Path(source).open("rb") as file:
            return file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise BeaconScopeError(f"{name} does not exist; check the name") from None
    except IsADirectoryError:
        raise BeaconScopeError(f"{name} is a folder; give a file") from None
    except OSError as error:
        raise BeaconScopeError(f"{name} cannot be read ({error.strerror}); check its permissions") from None


def _parse_line(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise BeaconScopeError(f"{where}: no JSON ({error.msg}); write one object per line") from None
    except (ValueError, RecursionError):
        raise BeaconScopeError(f"{where}: no JSON that can be read; write one object per line") from None
    if not isinstance(entry, dict):
        raise BeaconScopeError(f'{where}: no object; write {{"id": ..., "prompt": ...}}')
    fields = {key: _text_field(entry, key, where) for key in ("id", "prompt", "completion", "answer")}
    identifier, prompt = fields["id"], fields["prompt"]
    if identifier is None or prompt is None:
        missing = "id" if identifier is None else "prompt"
        raise BeaconScopeError(f"{where}: no {missing!r}; every line needs an id and a prompt")
    if not names_a_file(identifier):
        raise BeaconScopeError(
            f"{where}: the id {identifier!r} cannot name a file; use letters, digits, dots, dashes and underscores"
        )
    return Prompt(identifier, prompt, fields["completion"], fields["answer"])


def _text_field(entry: dict[str, Any], key: str, where: str) -> str | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and key in ("id", "answer"):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise BeaconScopeError(f"{where}: {key!r} is no text; give a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BeaconScopeError(f"{where}: {key!r} holds half of a surrogate pair; write the character itself") from None
    return value
