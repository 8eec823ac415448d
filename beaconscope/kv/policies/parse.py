"""From ``name:parameter=value,...`` to a policy."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping

from beaconscope.errors import UsageError
from beaconscope.kv.policies.base import Policy
from beaconscope.kv.policies.beacon import BeaconKV
from beaconscope.kv.policies.bigbird import BigBird
from beaconscope.kv.policies.etc import ETC
from beaconscope.kv.policies.expected_attention import ExpectedAttention
from beaconscope.kv.policies.fastgen import FastGen
from beaconscope.kv.policies.full import Full
from beaconscope.kv.policies.h2o import H2O
from beaconscope.kv.policies.keydiff import KeyDiff
from beaconscope.kv.policies.knorm import Knorm
from beaconscope.kv.policies.lazy_eviction import LazyEviction
from beaconscope.kv.policies.longformer import Longformer
from beaconscope.kv.policies.oracle import Oracle
from beaconscope.kv.policies.random_eviction import RandomEviction
from beaconscope.kv.policies.rkv import RKV
from beaconscope.kv.policies.rpc import RPC
from beaconscope.kv.policies.scissorhands import ScissorHands
from beaconscope.kv.policies.snapkv import SnapKV
from beaconscope.kv.policies.streaming_llm import StreamingLLM
from beaconscope.kv.policies.tova import TOVA

POLICIES: Mapping[str, type[Policy]] = types.MappingProxyType(
    {
        policy.name: policy
        for policy in (
            BeaconKV,
            Full,
            StreamingLLM,
            RandomEviction,
            H2O,
            ScissorHands,
            FastGen,
            SnapKV,
            TOVA,
            RKV,
            RPC,
            LazyEviction,
            KeyDiff,
            Knorm,
            ExpectedAttention,
            Longformer,
            BigBird,
            ETC,
            Oracle,
        )
    }
)
"""Every policy by its name."""


def policy_kind(text: str) -> type[Policy]:
    """The class of the policy that ``text`` names, whatever its parameters are.

    Raises
    ------
    UsageError
        For a name that does not exist, with the nearest one.
    """
    name = text.partition(":")[0].strip().lower().replace("_", "-")
    if name not in POLICIES:
        raise UsageError(f"there is no policy {name!r}; {_nearest(name, POLICIES)}")
    return POLICIES[name]


def parse_policy(text: str, **defaults: object) -> Policy:
    """The policy that ``text`` names, such as ``streaming-llm`` or ``random:recent=32,seed=1``.

    Parameters
    ----------
    text
        Name of a policy, then after a colon its parameters. Dashes and underscores are the same.
    **defaults
        Parameters that hold unless ``text`` gives them; those that the policy does not have are passed over.

    Raises
    ------
    UsageError
        For a name or parameter that does not exist (with the nearest one), or a value that does not fit.
    """
    kind = policy_kind(text)
    name, rest = kind.name, text.partition(":")[2]
    hints = typing.get_type_hints(kind)
    fields = {field: hints[field] for field in kind.parameters()}
    values = {
        key: _fitting(f"policy {name}: {key}", value, fields[key]) for key, value in defaults.items() if key in fields
    }
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        key = key.replace("-", "_")
        if key not in fields:
            raise UsageError(f"policy {name} has no parameter {key!r}; {_nearest(key, fields)}")
        if not equals or not value:
            raise UsageError(f"policy {name}: {part!r} gives no value; write {key}=VALUE")
        values[key] = _convert(f"policy {name}: {key}", value, fields[key])
    return kind(**values)  # type: ignore[arg-type]


_MOST = (1 << 31) - 1
"""No number of a policy is larger."""


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"


def _convert(what: str, text: str, hint: object) -> object:
    """``text`` as a value of the annotated type ``hint``."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and text.lower() == "none":
        return None
    for option in options:
        if option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if typing.get_origin(option) is typing.Literal and text in typing.get_args(option):
            return text
        if option in (int, float):
            try:
                return _fitting(what, option(text), hint)
            except ValueError:
                continue
    raise UsageError(f"{what}={text} does not fit; give {_describe(options)}")


def _fitting(what: str, value: object, hint: object) -> object:
    """``value``, which is of the annotated type ``hint``: a number within bounds, a choice, a truth value or None."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            if isinstance(value, str) and value in typing.get_args(option):
                return value
        elif option in (type(None), bool):
            if isinstance(value, option):
                return value
        elif isinstance(value, bool) or not isinstance(value, (int, float) if option is float else int):
            continue
        elif abs(value) <= _MOST:  # which NaN is not
            return value
    raise UsageError(f"{what}={value} does not fit; give {_describe(options)}")


def _describe(options: tuple[object, ...]) -> str:
    words = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            words.append("one of " + ", ".join(map(str, typing.get_args(option))))
        else:
            words.append({int: "a whole number", float: "a number", bool: "true or false"}.get(option, "none"))  # type: ignore[call-overload]
    return " or ".join(words)
