"""The KV cache: policies that decide what it keeps, beacons, and the cache that runs a policy in a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from beaconscope.kv.cache import BeaconCache as BeaconCache
    from beaconscope.kv.cache import CompressedCache as CompressedCache

__all__ = ["BeaconCache", "CompressedCache"]


def __getattr__(name: str) -> Any:
    # Replay uses the policies without transformers, which the caches need.
    if name in __all__:
        from beaconscope.kv import cache

        return getattr(cache, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
