"""A decoding step reads nothing from the device: it runs where there is no data to be read.

On a GPU, to look at a number is to wait for everything that is queued. On the ``meta`` device it is an error, and so is
mixing it with another device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from beaconscope.kv.cache import CompressedCache
from beaconscope.kv.policies import POLICIES, Policy
from beaconscope.models import tap
from beaconscope.record import RecordOptions
from beaconscope.record.plan import make_layout
from beaconscope.record.recorder import Recorder
from tests.kv.live import feed, tokens
from tests.tiny import VOCABULARY, tiny_model

PROMPT, STEPS = 60, 30


def live_policies() -> list[Policy]:
    """Each policy that works live, compressing after the prompt and several times in the steps.

    How many entries heads of a ragged policy keep depends on the data, so a compression has to read it: they compress
    after the prompt alone.
    """
    small = {"budget": 40, "interval": 6, "recent": 4, "window": 8, "beacons": 4, "period": 8}
    found = []
    for kind in POLICIES.values():
        if kind.live:
            settings = small | ({"interval": STEPS + 1} if kind.ragged else {})
            found.append(kind(**{name: value for name, value in settings.items() if name in kind.parameters()}))
    beacon = POLICIES["beacon"]
    found += [beacon(budget=40, interval=6, recent=4, beacons=4, selector=way) for way in ("kmeans", "random", "none")]
    return found


def to_meta(thing: Any, seen: set[int]) -> Any:
    """Move every tensor that ``thing`` holds, however deep, to the meta device; what is not a tensor stays itself."""
    if isinstance(thing, Tensor):
        return thing.to("meta")
    if id(thing) in seen or isinstance(thing, torch.Generator):
        return thing
    seen.add(id(thing))
    if isinstance(thing, list):
        thing[:] = [to_meta(each, seen) for each in thing]
    elif isinstance(thing, tuple) and not hasattr(thing, "_fields"):
        return tuple(to_meta(each, seen) for each in thing)
    elif isinstance(thing, dict):
        for key in list(thing):
            thing[key] = to_meta(thing[key], seen)
    elif hasattr(thing, "__dict__") and type(thing).__module__.startswith(("beaconscope", "transformers.cache")):
        for name, value in vars(thing).items():
            vars(thing)[name] = to_meta(value, seen)
    elif isinstance(thing, torch.device):
        return torch.device("meta")
    return thing


@pytest.mark.parametrize("recorded", [False, True], ids=["alone", "with the recorder"])
@pytest.mark.parametrize(
    "policy", live_policies(), ids=lambda policy: f"{policy.name} {getattr(policy, 'selector', '')}"
)
def test_a_step_reads_nothing_from_the_device(policy, recorded):
    model = tiny_model("llama")
    tapped = tap(model)
    recorder = Recorder(make_layout(tapped, RecordOptions(layers="all")), 4, 16, lambda row, block: None)
    kinds = torch.zeros(VOCABULARY, dtype=torch.uint8)
    cache = CompressedCache(tapped, policy, observer=recorder if recorded else None, token_kinds=kinds)
    feed(model, tokens(PROMPT), cache)
    before = [layer.lanes[0].seen for layer in cache.compressed_layers]
    model.to("meta")
    token = torch.empty((1, 1), dtype=torch.int64, device="meta")
    # Its layers' facts belong to the tap, which other caches may use; here they move, too.
    to_meta([cache, recorder], set())
    for _ in range(STEPS):
        try:
            feed(model, token, cache)
        except RuntimeError as error:
            if "autocast" in str(error):  # in transformers 5.2
                pytest.skip(f"transformers itself cannot run on the meta device: {error}")
            raise
    after = [layer.lanes[0].seen for layer in cache.compressed_layers]
    assert [now - then for now, then in zip(after, before, strict=True)] == [STEPS] * 2
    assert all(layer.keys.device.type == "meta" for layer in cache.compressed_layers)
