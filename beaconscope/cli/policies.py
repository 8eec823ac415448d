"""``beaconscope policies``: list what a cache can evict by."""

from __future__ import annotations

from json import dumps
from typing import TYPE_CHECKING, Any

import typer

from beaconscope.cli.options import Json, Quiet, Verbose, Version

if TYPE_CHECKING:
    from beaconscope.kv.policies import Policy


def policies(
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Version = False,
) -> None:
    """List the policies with what they keep, their parameters and defaults, and where they are from."""
    from beaconscope.kv.policies import POLICIES

    described = [_describe(kind) for kind in POLICIES.values()]
    if json:
        typer.echo(dumps(described, indent=2))
        return
    if quiet:
        return
    for policy in described:
        typer.echo(f"{policy['name']}: {policy['summary']}")
        given = ", ".join(f"{name}={value}" for name, value in policy["parameters"].items())
        if given:
            typer.echo(f"    {given}")
        typer.echo(f"    {policy['source']}")


def _describe(kind: type[Policy]) -> dict[str, Any]:
    default = kind()
    return {
        "name": kind.name,
        "summary": kind.summary,
        "source": kind.source,
        "live": kind.live,
        "parameters": {name: getattr(default, name) for name in kind.parameters()},
    }
