"""Every command with its options, from the command line itself."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import typer

from beaconscope.cli import app
from docs._reference.text import code, plain, table, title

_OWN = "Options"
"""Of options that a command puts in no group."""


def page() -> str:
    """The page."""
    group: Any = typer.main.get_command(app)
    lines = title(
        "Commands",
        group.help,
        "Every command answers `--help` and ends with exit code 0, with 1 where something failed that a user can mend, "
        "with 2 where options cannot hold together, and with 130 after Ctrl-C. Errors are one line on stderr; "
        "`--verbose` adds the traceback. Progress is shown on stderr, and only where that is a terminal. `NO_COLOR` is "
        "honoured, and `beaconscope --install-completion` sets up shell completion. `python -m beaconscope` is the "
        "same as `beaconscope`.",
    )
    lines += table(
        ["command", "what it does"],
        [[f"[`{name}`](#{name})", plain(command.help).split("\n\n")[0]] for name, command in group.commands.items()],
    )
    for name, command in group.commands.items():
        lines += _command(name, command)
    return "\n".join(lines)


def _command(name: str, command: Any) -> list[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join(["beaconscope", name, *(each.metavar for each in arguments), "[OPTIONS]"])
    lines = [f"## {name}", "", "```text", usage, "```", "", plain(command.help), ""]
    if arguments:
        lines += table(["argument", "meaning"], [[code(each.metavar), plain(each.help or "")] for each in arguments])
    panels: dict[str, list[Any]] = {}
    for each in command.params:
        if each.param_type_name == "option":
            panels.setdefault(each.rich_help_panel or _OWN, []).append(each)
    for panel, options in panels.items():
        lines += [f"**{panel}**", ""]
        lines += table(["option", "value", "default", "meaning"], [_option(each) for each in options])
    return lines


def _option(option: Any) -> list[str]:
    names = ", ".join(code(name) for name in [*option.opts, *option.secondary_opts])
    meaning = plain(option.help or "")
    if option.required:
        meaning += " Required."
    if getattr(option, "multiple", False):
        meaning += " May be given several times."
    return [names, _value(option), _default(option), meaning]


def _value(option: Any) -> str:
    """What may be given after an option; nothing for a flag."""
    if getattr(option, "is_flag", False):
        return ""
    hint = option.type_descriptor.annotation
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else (option.metavar or "").split("|")
    if len(choices) > 1:
        return ", ".join(code(choice) for choice in choices)
    if option.metavar:
        return code(option.metavar)
    least = getattr(option, "min", None)
    words = {int: "whole number", float: "number", str: "text", Path: "path"}.get(hint, "value")
    return words if least is None else f"{words}, at least {least}"


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    if option.secondary_opts:
        return code(option.opts[0] if option.default else option.secondary_opts[0])
    if option.default is None or getattr(option, "is_flag", False):
        return ""
    return code(option.default)
