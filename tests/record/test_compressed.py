"""What a trace says of a compressed cache and its beacons, against the reference fed with the trace's own vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from beaconscope import BeaconKV, Full
from beaconscope.kv.beacons import BeaconChanged, BeaconSet
from tests.kv import driving
from tests.kv.driving import IllConditioned, Run, changes_of, check_run, settings_of
from tests.record.recording import evictions_of, record_tiny
from tests.reference.beacon_kv import BeaconChange, simulate
from tests.reference.rotary import unrotate
from tests.tiny import tiny_model

# Pools fill and beacons change many times. 11 + 5 k and 33 + 6 m meet: a thinning and a compression at one position.
SMALL = {"budget": 20, "interval": 6, "beacons": 4, "recent": 3, "pool_low": 6, "pool_high": 11}
NEW = 48
FREQUENCIES = 10_000.0 ** (-np.arange(0, 16, 2) / 16)

PROMPTS = [
    "Plan: add, then double. 3 and 4?",
    "First sort them, then drop the las",
    "What is 7 times 8, less 9, step by step?",
]


def one_change_per_position(simulation):
    """The changes as a trace tells them: the last set of a position, the members of the one before the first."""
    merged = {}
    for change in changes_of(simulation):
        first = merged.get(change.position, change)
        merged[change.position] = BeaconChange(change.position, change.beacons, first.members)
    return list(merged.values())


@pytest.fixture(autouse=True)
def _changes_as_a_trace_tells_them(monkeypatch):
    monkeypatch.setattr(driving, "changes_of", one_change_per_position)


def changes_in(trace, layer, kv_head):
    """The changes of a head's beacons in the terms of the tracker, with vectors where the source gives them."""
    head = trace.head(layer, kv_head)
    pre_rope = trace.policy["params"].get("shadow", trace.policy["params"])["query_space"] == "pre-rope"
    query = head.query.astype(np.float64)
    if pre_rope:
        query = unrotate(query.swapaxes(0, 1), np.arange(trace.length), FREQUENCIES).swapaxes(0, 1)
    frame = trace.beacons(layer, kv_head)
    found, former = [], 0
    for position, rows in frame.groupby("position", sort=True):
        source, vector, members = [], [], []
        for query_head, beacons in rows.groupby("query_head", sort=True):
            assert beacons["beacon"].tolist() == list(range(len(beacons)))
            source.append(beacons["source"].tolist())
            vector.append(
                [
                    query[s, query_head] if v is None else v
                    for s, v in zip(beacons["source"], beacons["vector"], strict=True)
                ]
            )
            counts = beacons["members"].tolist()
            assert not any(counts[former:])
            members.append(counts[:former])
        former = len(source[0])
        beacon_set = BeaconSet(torch.tensor(np.array(vector))[None, None], torch.tensor(source)[None, None])
        found.append(BeaconChanged(int(position), beacon_set, torch.tensor(members)[None, None]))
    return found


def run_in(trace, layer, kv_head):
    """What happened to one head, as the reference's checks take it."""
    evictions = trace.evictions(layer, kv_head)
    head = trace.head(layer, kv_head)
    return Run(
        positions=[eviction.position for eviction in evictions],
        kept=[trace.kept(layer, kv_head, eviction.position)[None, None] for eviction in evictions],
        changes=changes_in(trace, layer, kv_head),
        assignment=head.beacon.T[None, None],
        similarity=head.beacon_similarity.T[None, None],
    )


def check_head(trace, layer, kv_head, policy, chunks=None):
    head = trace.head(layer, kv_head)
    run = run_in(trace, layer, kv_head)
    query, key = head.query.astype(np.float64), head.key.astype(np.float64)
    check_run(run, policy, query[None, None], key[None, None], trace.prompt_length, FREQUENCIES, chunks=chunks)
    return run


def check_on_some_prompt(folder, policy, make=tiny_model, check=check_head, **options):
    """Record and check every head, on the first prompt on which no choice hangs on the last digits."""
    for number, prompt in enumerate(PROMPTS):
        trace = record_tiny(make(), folder, prompt, name=f"t{number}", policy=policy, max_new_tokens=NEW, **options)
        try:
            return trace, [check(trace, layer, kv_head, policy) for layer, kv_head in trace.heads]
        except IllConditioned:
            continue
    pytest.fail("every prompt is decided by rounding")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"selector": "kmeans"},
        {"selector": "random"},
        {"selector": "none"},
        {"query_space": "post-rope"},
        {"sinks": 4, "group_pooling": "mean"},
    ],
    ids=lambda options: ",".join(options) or "default",
)
def test_evictions_and_beacons_are_the_references(options, tmp_path):
    policy = BeaconKV(**{**SMALL, **options})
    trace, runs = check_on_some_prompt(tmp_path, policy)
    assert all(len(run.positions) >= 7 for run in runs)
    assert trace.attention_over == "what the cache held"
    # A position is dropped once, and only from what is there.
    for layer, kv_head in trace.heads:
        dropped = np.concatenate([eviction.evicted for eviction in trace.evictions(layer, kv_head)])
        assert len(set(dropped.tolist())) == len(dropped)
        held = trace.kept(layer, kv_head, trace.length - 1)
        assert sorted([*dropped.tolist(), *held.tolist()]) == list(range(trace.length))


def test_a_thinning_and_a_compression_at_one_position_are_one_change(tmp_path):
    """The compression's beacons, and the members of those before the thinning."""
    policy = BeaconKV(**SMALL)

    def check(trace, layer, kv_head, policy):
        check_head(trace, layer, kv_head, policy)
        head = trace.head(layer, kv_head)
        expected = simulate(head.query, head.key, trace.prompt_length, settings_of(policy), FREQUENCIES)
        fired = {compression.position for compression in expected.compressions}
        both = fired & {thinning.position for thinning in expected.thinnings}
        for change in changes_in(trace, layer, kv_head):
            if change.position in both:
                assert int(change.members.sum()) > 0
        return both

    _, meetings = check_on_some_prompt(tmp_path, policy, check=check)
    assert all(meetings)


def held_before(trace, layer, kv_head, position):
    """Positions that the query at ``position`` attended to, from what the cache kept."""
    if position < trace.prompt_length:
        return np.arange(position + 1)
    return np.append(trace.kept(layer, kv_head, position - 1), position)


def test_hits_and_masses_are_over_what_the_cache_held(tmp_path):
    bounds = {"sink_positions": 2, "local_window": 6}
    trace = record_tiny(tiny_model(), tmp_path, policy=BeaconKV(**SMALL), max_new_tokens=NEW, hits=4, **bounds)
    for layer, kv_head in trace.heads:
        head = trace.head(layer, kv_head)
        for position in range(trace.length):
            held = held_before(trace, layer, kv_head, position)
            assert position < trace.prompt_length or len(held) <= 26
            for g in range(2):
                logit = head.key[held].astype(np.float64) @ head.query[position, g] / 4
                weight = np.exp(logit - logit.max())
                weight /= weight.sum()
                sink, local = held < 2, position - held <= 6
                parts = [weight[part].sum() for part in (sink, local & ~sink, ~local & ~sink)]
                ours = [mass[position, g] for mass in (head.mass_sink, head.mass_local, head.mass_distant)]
                np.testing.assert_allclose(ours, parts, atol=1e-5)
                hits = min(4, len(held))
                assert set(head.hit_position[position, g, :hits]) <= set(held.tolist())
                np.testing.assert_allclose(head.hit_mass[position, g, :hits], np.sort(weight)[::-1][:hits], atol=1e-5)
                assert (head.hit_position[position, g, hits:] == -1).all()


def test_the_shadow_of_a_full_cache_is_what_the_reference_does_without_evicting(tmp_path):
    shadow = BeaconKV(**SMALL)

    def check(trace, layer, kv_head, _):
        # Beacons depend on the queries and on when a compression fires, not on what it keeps.
        assert trace.evictions(layer, kv_head) == []
        assert len(trace.kept(layer, kv_head, trace.length - 1)) == trace.length
        run = run_in(trace, layer, kv_head)
        head = trace.head(layer, kv_head)
        query, key = head.query.astype(np.float64), head.key.astype(np.float64)
        expected = simulate(query, key, trace.prompt_length, settings_of(shadow), FREQUENCIES)
        run.positions = [compression.position for compression in expected.compressions]
        run.kept = [compression.kept[None, None] for compression in expected.compressions]
        check_run(run, shadow, query[None, None], key[None, None], trace.prompt_length, FREQUENCIES)
        return run

    _, runs = check_on_some_prompt(tmp_path, Full(), check=check, shadow=shadow)
    assert all(len(run.changes) >= 7 for run in runs)


SAME = ("query", "key", "beacon", "hit_position")
CLOSE = ("beacon_similarity", "mass_sink", "mass_local", "mass_distant", "hit_mass")
"""Products of more heads at once may be rounded otherwise, which depends on where in memory they lie."""


@pytest.mark.parametrize(
    "policy", [BeaconKV(**SMALL), BeaconKV(**SMALL, selector="random"), Full()], ids=["fps", "random", "full"]
)
def test_what_is_recorded_of_a_head_does_not_depend_on_what_else_is(policy, tmp_path):
    common = {"policy": policy, "shadow": BeaconKV(**SMALL), "max_new_tokens": 40}
    model = tiny_model("llama", num_hidden_layers=3)
    everything = record_tiny(model, tmp_path, name="all", **common)
    part = record_tiny(model, tmp_path, name="part", **{**common, "layers": "0,2", "heads": "1", "values": False})
    assert everything.heads == ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    assert part.heads == ((0, 1), (2, 1))
    assert part.tokens.equals(everything.tokens)
    for at in part.heads:
        ours, theirs = part.head(*at), everything.head(*at)
        for name in SAME:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        for name in CLOSE:
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-6)
        assert ours.value is None
        assert evictions_of(part, at) == evictions_of(everything, at)
        frames = [trace.beacons(*at).drop(columns="vector") for trace in (part, everything)]
        assert frames[0].equals(frames[1])


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_prompt_in_chunks_is_compressed_between_them(chunk, tmp_path):
    policy = BeaconKV(**SMALL)
    prompt = "A prompt that is a good deal longer than budget and interval together are."
    sizes = [min(chunk, len(prompt) - start) for start in range(0, len(prompt), chunk)]
    longest = 0

    def check(trace, layer, kv_head, policy):
        nonlocal longest
        # What a query of the prompt finds is what the chunks before it left, and its own chunk.
        for eviction in trace.evictions(layer, kv_head):
            held = len(trace.kept(layer, kv_head, eviction.position))
            assert held == policy.budget
            longest = max(longest, held + len(eviction.evicted))
        return check_head(trace, layer, kv_head, policy, chunks=sizes)

    prompts = [prompt, prompt.upper(), prompt[::-1]]
    for number, text in enumerate(prompts):
        trace = record_tiny(
            tiny_model(), tmp_path, text, name=f"c{number}", policy=policy, max_new_tokens=20, prefill_chunk=chunk
        )
        assert trace.metadata["prefill_passes"] == sizes
        try:
            runs = [check(trace, layer, kv_head, policy) for layer, kv_head in trace.heads]
        except IllConditioned:
            continue
        break
    else:
        pytest.fail("every prompt is decided by rounding")
    fired_in_prompt = [position for position in runs[0].positions if position < len(prompt)]
    assert len(fired_in_prompt) == {1: 9, 7: 7, 1000: 1}[chunk]
    assert longest <= max(policy.budget + min(chunk, len(prompt)) + policy.interval, len(sizes) == 1 and len(prompt))


def test_chunks_bound_the_memory_of_the_cache(tmp_path):
    """Peak memory goes with budget and chunk, not with the prompt: no pass attends to more."""
    from beaconscope.kv.layer import CompressedLayer

    seen = []
    original = CompressedLayer.update

    def watched(self, *args, **kwargs):
        key, value = original(self, *args, **kwargs)
        seen.append(key.shape[2])
        return key, value

    CompressedLayer.update = watched
    try:
        record_tiny(tiny_model(), tmp_path, "x" * 300, policy=BeaconKV(**SMALL), max_new_tokens=4, prefill_chunk=10)
    finally:
        CompressedLayer.update = original
    assert len(seen) >= 2 * 30
    assert max(seen) <= 20 + 6 + 10
