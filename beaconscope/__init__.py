"""A profiler for the reasoning of large reasoning models.

The public interface is what ``__all__`` lists. A name is loaded when it is first used, so that ``import beaconscope``
costs next to nothing: torch and transformers come only with what needs them.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from beaconscope.errors import BeaconScopeError, UsageError

if TYPE_CHECKING:
    from beaconscope.analyze import Analysis as Analysis
    from beaconscope.analyze import AnalyzeOptions as AnalyzeOptions
    from beaconscope.analyze import analyze as analyze
    from beaconscope.kv import BeaconCache as BeaconCache
    from beaconscope.kv.policies import BeaconKV as BeaconKV
    from beaconscope.kv.policies import Full as Full
    from beaconscope.kv.policies import Policy as Policy
    from beaconscope.kv.policies import RandomEviction as RandomEviction
    from beaconscope.kv.policies import StreamingLLM as StreamingLLM
    from beaconscope.kv.policies import parse_policy as parse_policy
    from beaconscope.models import LoadedModel as LoadedModel
    from beaconscope.models import LoadOptions as LoadOptions
    from beaconscope.models import load_model as load_model
    from beaconscope.record import Prompt as Prompt
    from beaconscope.record import RecordOptions as RecordOptions
    from beaconscope.record import Sampling as Sampling
    from beaconscope.record import record as record
    from beaconscope.record import record_prompts as record_prompts
    from beaconscope.trace import Trace as Trace
    from beaconscope.trace import load_trace as load_trace
    from beaconscope.trace import recover as recover

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "AnalyzeOptions",
    "BeaconCache",
    "BeaconKV",
    "BeaconScopeError",
    "Full",
    "LoadOptions",
    "LoadedModel",
    "Policy",
    "Prompt",
    "RandomEviction",
    "RecordOptions",
    "Sampling",
    "StreamingLLM",
    "Trace",
    "UsageError",
    "analyze",
    "load_model",
    "load_trace",
    "parse_policy",
    "record",
    "record_prompts",
    "recover",
]

_HOME = {
    "Analysis": "beaconscope.analyze",
    "AnalyzeOptions": "beaconscope.analyze",
    "BeaconCache": "beaconscope.kv",
    "BeaconKV": "beaconscope.kv.policies",
    "Full": "beaconscope.kv.policies",
    "LoadOptions": "beaconscope.models",
    "LoadedModel": "beaconscope.models",
    "Policy": "beaconscope.kv.policies",
    "Prompt": "beaconscope.record",
    "RandomEviction": "beaconscope.kv.policies",
    "RecordOptions": "beaconscope.record",
    "Sampling": "beaconscope.record",
    "StreamingLLM": "beaconscope.kv.policies",
    "Trace": "beaconscope.trace",
    "analyze": "beaconscope.analyze",
    "load_model": "beaconscope.models",
    "load_trace": "beaconscope.trace",
    "parse_policy": "beaconscope.kv.policies",
    "record": "beaconscope.record",
    "record_prompts": "beaconscope.record",
    "recover": "beaconscope.trace",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The package itself, where a public name outranks the subpackage of the same name.

    ``beaconscope.record`` is the function, but Python binds a subpackage to its parent when it is imported, which would
    hide the function behind its own folder. ``from beaconscope.record import ...`` is not touched by this.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in _HOME):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
