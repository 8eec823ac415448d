"""The settings of a sweep: every combination of policies and of lists of their parameters."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from beaconscope.errors import BeaconScopeError, UsageError
from beaconscope.kv.policies import (
    BeaconKV,
    Full,
    Oracle,
    Policy,
    RandomEviction,
    StreamingLLM,
    parse_policy,
    policy_kind,
)

_P = TypeVar("_P", bound=Policy)

_MOST_SETTINGS = 10_000
_MOST_BYTES = 1 << 20
"""Of a grid."""
_NAMED = 3
"""Settings that a note names."""
_LEAST_BUDGET = 40
"""Of the default budgets: with the usual 16 recent entries it leaves something to choose."""
_CHOICE = 8
"""Entries that a default budget leaves to choose, at least, beside what the settings protect."""
_LARGE_BUDGET = 1 << 30
"""More than any settings protect."""
RANDOM_SEEDS = 5
"""Seeds of random eviction."""
RANDOM_QUERY_SEEDS = 3
"""Seeds of the beacons that are a random handful of past queries."""


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
        kind = policy_kind(text)
        fixed = {part.partition("=")[0].strip().replace("-", "_") for part in given.split(",") if part.strip()}
        varied = [key for key in lists if key in kind.parameters() and key not in fixed]
        used.update(varied, fixed & set(lists))
        count = len(found) + math.prod(len(lists[key]) for key in varied)
        if count > _MOST_SETTINGS:
            raise UsageError(f"these lists make {count:,} settings; give fewer values (at most {_MOST_SETTINGS:,})")
        for values in itertools.product(*(lists[key] for key in varied)):
            found[_without_idle(parse_policy(text, **dict(zip(varied, values, strict=True))))] = None
    idle = [key for key in lists if key not in used]
    if idle:
        raise UsageError(
            f"--{idle[0].replace('_', '-')} has no effect with {', '.join(policies)}; leave it out, or add a policy "
            "that has it"
        )
    return list(found)


def _without_idle(policy: _P) -> _P:
    """The same setting, with its defaults for what has no effect: how beacons are chosen where there are none."""
    if isinstance(policy, BeaconKV) and policy.beacons == 0:
        idle = ("selector", "query_space", "beacon_rotation", "pool_low", "pool_high", "seed")
        return replace(policy, **{name: getattr(BeaconKV, name) for name in idle})
    return policy


def read_grid(path: Path) -> list[Policy]:
    """Read settings from a TOML file: a table ``[[sweep]]`` for each block, with ``policy`` and lists of parameters.

    Raises
    ------
    BeaconScopeError
        For a file that is missing, is no TOML, or does not have that form.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise BeaconScopeError(f"the grid {path} has more than {_MOST_BYTES >> 20} MB; is it the right file?")
        blocks = tomllib.loads(data.decode("utf-8")).get("sweep")
    except FileNotFoundError:
        raise BeaconScopeError(f"the grid {path} does not exist; check the name") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BeaconScopeError(f"the grid {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BeaconScopeError(f"the grid {path} is no TOML: {error}") from None
    except (ValueError, RecursionError):
        raise BeaconScopeError(f"the grid {path} is no TOML that can be read") from None
    if not isinstance(blocks, list) or not all(isinstance(block, dict) and "policy" in block for block in blocks):
        raise BeaconScopeError(f'the grid {path} has no [[sweep]] with a policy; write [[sweep]] and policy = "beacon"')
    found: dict[Policy, None] = {}
    for block in blocks:
        lists = {key.replace("-", "_"): _listed(value) for key, value in block.items() if key != "policy"}
        found.update(dict.fromkeys(expand([str(name) for name in _listed(block["policy"])], lists)))
    if not found:
        raise BeaconScopeError(f"the grid {path} makes no settings; give each list a value")
    return list(found)


def with_controls(settings: Sequence[Policy]) -> list[Policy]:
    """The settings, and beside them what they are to be measured by.

    These are the full cache; at each budget and interval of the settings the oracle and random eviction under several
    seeds, and at each budget StreamingLLM; and beside each BeaconKV setting its two twins (:func:`recent_only`,
    :func:`random_queries`).
    """
    found = dict.fromkeys([*settings, Full()])
    for setting in settings:
        if setting.capacity is None:
            continue
        budget, interval = setting.budget, setting.interval
        beside: list[Policy] = [Oracle(budget=budget, interval=interval)]
        beside.append(StreamingLLM(budget=budget, sinks=_protected_by_control(StreamingLLM.sinks, budget)))
        recent = _protected_by_control(RandomEviction.recent, budget)
        beside += [
            RandomEviction(budget=budget, interval=interval, recent=recent, seed=seed) for seed in range(RANDOM_SEEDS)
        ]
        if isinstance(setting, BeaconKV):
            twin = recent_only(setting)
            beside += [*random_queries(setting), *([] if twin is None else [twin])]
        found.update(dict.fromkeys(beside))
    return list(found)


def _protected_by_control(usual: int, budget: int) -> int:
    """Entries that a control protects: the usual number, or half of a budget that is not larger than that."""
    return usual if usual < budget else budget // 2


def recent_only(setting: BeaconKV) -> BeaconKV | None:
    """The same number of observing queries, all of them recent; None where there are no beacons or no room for it."""
    observing = setting.recent + setting.beacons
    if setting.beacons == 0 or setting.selector == "none" or setting.budget < observing + setting.sinks + 1:
        return None
    return _without_idle(replace(setting, beacons=0, recent=observing, pool_low=None, pool_high=None))


def random_queries(setting: BeaconKV) -> list[BeaconKV]:
    """The same with beacons that are a random handful of past queries, under several seeds."""
    if setting.beacons == 0 or setting.selector in ("none", "random"):
        return []
    return [replace(setting, selector="random", seed=seed) for seed in range(RANDOM_QUERY_SEEDS)]


def label(policy: Policy) -> str:
    """Name a setting: its policy and what differs from the defaults, budget first, as ``parse_policy`` reads it.

    Seeds are left out, so that all seeds of a setting have one name; so are parameters without meaning for the policy
    and the beacons that run beside a full cache.
    """
    known = policy.parameters()
    parts = [f"budget={policy.budget}"] if "budget" in known else []
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if field.name in known and field.name not in ("budget", "seed") and value != field.default:
            parts.append(f"{field.name}={value}")
    return f"{policy.name}:{','.join(parts)}" if parts else policy.name


def split_policies(text: str) -> list[str]:
    """The policies of a list such as ``beacon,snapkv:window=64,kernel=7,random``."""
    found: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        if found and "=" in piece and ":" not in piece:
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


def never_full(settings: Sequence[Policy], length: int) -> str:
    """Say which settings never fill in traces of at most ``length`` tokens, and so keep everything; nothing if none."""
    idle = [each for each in settings if each.evicts and each.capacity is not None and each.capacity >= length]
    if not idle:
        return ""
    names = ", ".join(map(label, idle[:_NAMED])) + (f" and {len(idle) - _NAMED} more" if len(idle) > _NAMED else "")
    never = "never fills and keeps" if len(idle) == 1 else "never fill and keep"
    remedy = (
        "give a smaller --budget or --interval"
        if any(_may_fill(each, length) for each in idle)
        else "the trace is too short for what the policy protects"
    )
    return f"Within {length} tokens {names} {never} everything; {remedy}."


def _may_fill(policy: Policy, length: int) -> bool:
    """Whether a smaller budget or interval makes a policy evict something within ``length`` tokens."""
    soon = dataclasses.replace(policy, interval=1, budget=max(policy.budget, _LARGE_BUDGET))
    return soon.least_budget + 1 < length


def default_lists(length: int, least: int = 1) -> dict[str, list[object]]:
    """Budgets and intervals that say something of a trace of ``length`` tokens.

    Budgets are a sixteenth, an eighth and a quarter of it, rounded down to a multiple of 128, or of 8 where that is
    less than 128. They are at least 40, with which the usual 16 recent entries leave something to choose, and at least
    the multiple of 8 that holds 7 entries more than ``least``, the smallest budget that the settings allow. Those that
    come out the same are one.
    """
    lowest = max(_LEAST_BUDGET, -(-(least - 1 + _CHOICE) // 8) * 8)
    budgets: list[object] = []
    for part in (16, 8, 4):
        size = length // part
        size = max(lowest, size // 128 * 128 if size >= 128 else size // 8 * 8)
        if size not in budgets:
            budgets.append(size)
    # In a short trace the usual interval of 128 would let a small cache hold nearly everything.
    return {"budget": budgets} if length >= 2048 else {"budget": budgets, "interval": [max(4, length // 64)]}


def complete_lists(
    policies: Sequence[str], lists: Mapping[str, Sequence[object]], length: int
) -> dict[str, Sequence[object]]:
    """The lists of a sweep, with the defaults of :func:`default_lists` where they give no budget.

    Parameters
    ----------
    policies, lists
        As :func:`expand` takes them.
    length
        Tokens of the shortest trace.

    Returns
    -------
    dict
        Budgets are such that every policy allows every one of them. A default that no policy has is left out.

    Raises
    ------
    UsageError
        As :func:`expand`.
    """
    if "budget" in lists:
        return dict(lists)
    known = {parameter for text in policies for parameter in policy_kind(text).parameters()}

    def completed(defaults: Mapping[str, Sequence[object]]) -> dict[str, Sequence[object]]:
        return {**{name: values for name, values in defaults.items() if name in known}, **lists}

    # What a policy protects may depend on the interval.
    large = completed({**default_lists(length), "budget": [_LARGE_BUDGET]})
    least = max((each.least_budget for each in expand(policies, large) if "budget" in each.parameters()), default=1)
    return completed(default_lists(length, least))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
