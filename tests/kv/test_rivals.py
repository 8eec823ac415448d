"""Every rival policy keeps, at every compression, what the slow reading of its rule keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kv.driving import head_info, make_rotary
from tests.kv.rivals import CASES, KINDS, drive, expected
from tests.kv.test_cache_kept import default_frequencies

LENGTH = 60
SIZE = 8
ROPE = {"inv_freq": default_frequencies(SIZE), "style": "half", "scaling": 1.0}


def made(group, seed, rows=2, heads=2, length=LENGTH):
    """Random queries [R, H, G, T, D], keys, values and kinds, whose attention is neither flat nor on one entry."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(rows, heads, group, length, SIZE)).astype(np.float32)
    key = 1.5 * rng.normal(size=(rows, heads, length, SIZE)).astype(np.float32)
    # Keys that resemble each other, and sinks, as in a model.
    key += 0.8 * rng.normal(size=(rows, heads, 1, SIZE)).astype(np.float32)
    value = rng.normal(size=(rows, heads, length, 6)).astype(np.float32)
    kinds = rng.choice(list(KINDS), p=[0.6, 0.15, 0.25], size=(rows, length))
    return query, key, value, kinds


def check(case, group, prompt, seed, chunks=None, **shape):
    policy, reading = CASES[case]
    query, key, value, kinds = made(group, seed, **shape)
    of_kind = torch.tensor([[KINDS[kind] for kind in row] for row in kinds], dtype=torch.uint8)
    heads = head_info(torch.from_numpy(query), make_rotary(**{**ROPE, "size": SIZE}))
    found = drive(policy, heads, *map(torch.from_numpy, (query, key, value)), prompt, of_kind, chunks)
    for row in range(query.shape[0]):
        wanted = expected(reading(ROPE), query[row].swapaxes(1, 2), key[row], value[row], prompt, kinds[row], chunks)
        assert wanted
        assert [position for position, _ in found] == [kept.position for kept in wanted]
        for (_, sets), kept in zip(found, wanted, strict=True):
            assert sets[row] == kept.sets
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_keeps_what_its_rule_says(case, group):
    check(case, group, prompt=25, seed=group)


@pytest.mark.parametrize("case", CASES)
def test_keeps_what_its_rule_says_after_a_short_prompt(case):
    check(case, 2, prompt=3, seed=5)


@pytest.mark.parametrize("case", CASES)
def test_keeps_what_its_rule_says_between_pieces_of_a_prompt(case):
    check(case, 2, prompt=30, seed=6, chunks=[13, 9, 8])
