"""The settings of a sweep: every combination of policies and of lists of their parameters."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from beaconscope.errors import BeaconScopeError, UsageError
from beaconscope.kv.policies import POLICIES, Full, Oracle, Policy, RandomEviction, StreamingLLM, parse_policy

RANDOM_SEEDS = 5


def expand(policies: Sequence[str], lists: Mapping[str, Sequence[object]]) -> list[Policy]:
    """Every combination of ``policies`` with the values of ``lists`` that apply to them, without repeats.

    Parameters
    ----------
    policies
        As :func:`~beaconscope.kv.policies.parse_policy` reads them. What one gives itself is not varied.
    lists
        Values for each parameter; a policy that does not have a parameter passes it over.

    Raises
    ------
    UsageError
        For a policy or value that does not exist, or a parameter that none of the policies has.
    """
    used: set[str] = set()
    found: dict[Policy, None] = {}
    for text in policies:
        _, _, given = text.partition(":")
        kind = type(parse_policy(text))
        fixed = {part.partition("=")[0].strip().replace("-", "_") for part in given.split(",") if part.strip()}
        varied = [key for key in lists if key in kind.parameters() and key not in fixed]
        used.update(varied, fixed & set(lists))
        for values in itertools.product(*(lists[key] for key in varied)):
            found[parse_policy(text, **dict(zip(varied, values, strict=True)))] = None
    idle = [key for key in lists if key not in used]
    if idle:
        raise UsageError(
            f"--{idle[0].replace('_', '-')} has no effect with {', '.join(policies)}; leave it out, or add a policy "
            "that has it"
        )
    return list(found)


def read_grid(path: Path) -> list[Policy]:
    """Read settings from a TOML file: a table ``[[sweep]]`` for each block, with ``policy`` and lists of parameters.

    Raises
    ------
    BeaconScopeError
        For a file that is missing, is no TOML, or does not have that form.
    """
    try:
        blocks = tomllib.loads(path.read_text(encoding="utf-8")).get("sweep")
    except FileNotFoundError:
        raise BeaconScopeError(f"the grid {path} does not exist; check the name") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BeaconScopeError(f"the grid {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BeaconScopeError(f"the grid {path} is no TOML: {error}") from None
    if not isinstance(blocks, list) or not all(isinstance(block, dict) and "policy" in block for block in blocks):
        raise BeaconScopeError(f'the grid {path} has no [[sweep]] with a policy; write [[sweep]] and policy = "beacon"')
    found: dict[Policy, None] = {}
    for block in blocks:
        lists = {key.replace("-", "_"): _listed(value) for key, value in block.items() if key != "policy"}
        found.update(dict.fromkeys(expand([str(name) for name in _listed(block["policy"])], lists)))
    return list(found)


def with_controls(settings: Sequence[Policy]) -> list[Policy]:
    """The settings, and beside them at each of their budgets what they are to be measured by.

    These are the full cache, random eviction under several seeds, StreamingLLM and the oracle, at the settings'
    intervals.
    """
    found = dict.fromkeys(settings)
    found[Full()] = None
    for setting in settings:
        if setting.capacity is None:
            continue
        budget, interval = setting.budget, setting.interval
        for control in (Oracle, StreamingLLM, RandomEviction):
            least = control(budget=1 << 20).protected + 1
            if budget < least:
                continue
            if control is RandomEviction:
                if interval == RandomEviction.interval or not _has(found, RandomEviction, budget):
                    for seed in range(RANDOM_SEEDS):
                        found[RandomEviction(budget=budget, interval=interval, seed=seed)] = None
            elif control is Oracle:
                found[Oracle(budget=budget, interval=interval)] = None
            elif not _has(found, StreamingLLM, budget):
                found[StreamingLLM(budget=budget)] = None
    return list(found)


def label(policy: Policy) -> str:
    """A short name: the policy and what differs from its defaults, budget first; seeds are left out."""
    if isinstance(policy, Full):
        return policy.name
    default = type(policy)(budget=policy.budget)
    parts = [f"budget={policy.budget}"]
    for name in policy.parameters():
        if name not in ("budget", "seed") and getattr(policy, name) != getattr(default, name):
            parts.append(f"{name}={getattr(policy, name)}")
    return f"{policy.name}:{','.join(parts)}"


def without_seed(policy: Policy) -> Policy:
    """The same policy with the default seed: what its seeds are averaged under."""
    seeded = {"seed": 0} if any(field.name == "seed" for field in fields(policy)) else {}
    return replace(policy, **seeded)


def _has(found: Mapping[Policy, None], kind: type[Policy], budget: int) -> bool:
    return any(isinstance(policy, kind) and policy.budget == budget for policy in found)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


__all__ = ["POLICIES", "RANDOM_SEEDS", "expand", "label", "read_grid", "with_controls", "without_seed"]
