"""What a trace must give back of a made-up recording, stated without the package's own conversions."""

from __future__ import annotations

import numpy as np

from beaconscope.trace import Trace
from tests.trace.made import Made


def assert_holds(trace: Trace, made: Made, length: int | None = None) -> None:
    """Hold a trace against the first ``length`` positions of what was recorded."""
    length = made.length if length is None else length
    assert trace.length == length
    tokens = trace.tokens
    assert tokens["token_bytes"].tolist() == made.token_bytes[:length]
    assert tokens["token_id"].tolist() == made.token_id[:length].tolist()
    np.testing.assert_array_equal(tokens["logprob"].to_numpy(), made.logprob[:length])
    np.testing.assert_array_equal(tokens["entropy"].to_numpy(), made.entropy[:length])
    for layer in made.layers:
        assert trace.kv_heads(layer.layout.layer) == layer.layout.kv_heads
        for place, kv_head in enumerate(layer.layout.kv_heads):
            _assert_head(trace, layer.layout.layer, kv_head, place, made, length)


def _assert_head(trace: Trace, number: int, kv_head: int, place: int, made: Made, length: int) -> None:
    layer = next(layer for layer in made.layers if layer.layout.layer == number)
    head = trace.head(number, kv_head)
    for name, expected in (
        ("query", layer.query),
        ("key", layer.key),
        ("beacon", layer.beacon),
        ("beacon_similarity", layer.beacon_similarity),
        ("mass_sink", layer.mass[0]),
        ("mass_local", layer.mass[1]),
        ("mass_distant", layer.mass[2]),
        ("hit_position", layer.hit_position),
        ("hit_mass", layer.hit_mass),
    ):
        found = getattr(head, name)
        np.testing.assert_array_equal(found, expected[:length, place], err_msg=name)
    assert head.query.dtype == np.dtype(made.layout.vector_type)
    if layer.value is None:
        assert head.value is None
    else:
        np.testing.assert_array_equal(head.value, layer.value[:length, place])

    changes = [change for change in layer.changes if change.kv_head == kv_head and change.position < length]
    frame = trace.beacons(number, kv_head)
    assert frame["position"].tolist() == [c.position for c in changes for _ in c.query_head]
    assert frame["query_head"].tolist() == [int(h) for c in changes for h in c.query_head]
    assert frame["source"].tolist() == [int(s) for c in changes for s in c.source]
    assert frame["members"].tolist() == [int(m) for c in changes for m in c.members]
    vectors = [None if c.vector is None else c.vector[i] for c in changes for i in range(len(c.query_head))]
    for found, vector in zip(frame["vector"], vectors, strict=True):
        if vector is None:
            assert found is None
        else:
            np.testing.assert_array_equal(found, vector)

    evictions = [e for e in layer.evictions if e.kv_head == kv_head and e.position < length]
    found_evictions = trace.evictions(number, kv_head)
    assert [e.position for e in found_evictions] == [e.position for e in evictions]
    for found, eviction in zip(found_evictions, evictions, strict=True):
        np.testing.assert_array_equal(found.evicted, eviction.evicted)
    for position in {0, length // 2, length - 1}:
        gone = {int(p) for e in evictions if e.position <= position for p in e.evicted}
        assert trace.kept(number, kv_head, position).tolist() == sorted(set(range(position + 1)) - gone)
