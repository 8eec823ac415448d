"""The distribution of the queries that Expected Attention goes by, over more positions than it sums at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from beaconscope.kv.policies import CacheView, ExpectedAttention
from beaconscope.kv.policies.expected_attention import ExpectedQueries
from tests.kv.driving import head_info, make_rotary
from tests.reference.rotary import rotate, unrotate

SIZE = 8
ROPE = {"inv_freq": 10_000.0 ** (-np.arange(0, SIZE, 2) / SIZE), "style": "half", "scaling": 1.0}


def heads_of(query):
    return head_info(query, make_rotary(ROPE["inv_freq"].tolist(), SIZE))


def made(length):
    draw = torch.Generator().manual_seed(3)
    query = torch.randn((1, 2, 2, length, SIZE), generator=draw) + torch.randn((1, 2, 2, 1, SIZE), generator=draw)
    key = torch.randn((1, 2, length, SIZE), generator=draw)
    return query, CacheView(key, key, torch.arange(length).expand(1, 2, length), length - 1)


def logits(query, view, cuts, **fields):
    expected = ExpectedQueries(ExpectedAttention(budget=20, **fields), heads_of(query))
    for start, stop in pairwise((0, *cuts, query.shape[3])):
        expected.observe(query[:, :, :, start:stop], start)
    return expected.logits(view)


@pytest.mark.parametrize("length", [3, 100, 128, 131, 300])
def test_mean_and_covariance_are_those_of_all_queries_so_far(length):
    query, view = made(length)
    found = logits(query, view, (), future=40)
    turn = sum(rotate(np.eye(SIZE), [length + n] * SIZE, **ROPE).T for n in range(40)) / 40
    times = np.arange(4, length)
    for head in range(2):
        for member in range(2):
            wanted = np.zeros(length)
            if len(times):
                before = unrotate(query[0, head, member, 4:].double().numpy(), times, **ROPE)
                covariance = turn @ np.cov(before, rowvar=False, bias=True) @ turn.T
                key = view.key[0, head].double().numpy()
                wanted = key @ (turn @ before.mean(axis=0)) / SIZE**0.5
                wanted = wanted + np.einsum("nd,de,ne->n", key, covariance, key) / (2 * SIZE)
            np.testing.assert_allclose(found[0, head, member].numpy(), wanted, atol=2e-5)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (5, 127, 128, 129), (256,), tuple(range(1, 300))])
def test_it_makes_no_difference_how_the_queries_come(cuts):
    query, view = made(300)
    assert torch.equal(logits(query, view, cuts), logits(query, view, ()))


def test_rows_of_a_batch_are_kept_and_dropped_with_all_that_is_known():
    query, view = made(150)
    both = torch.cat([query, query.flip(3)])
    policy = ExpectedAttention(budget=20)
    state = policy.start(heads_of(both))
    state.expected.observe(both, 0)
    state.select_rows(torch.tensor([1, 1]))
    twice = CacheView(*(part.expand(2, -1, -1, -1) for part in (view.key, view.value)), view.positions, 149)
    found = state.expected.logits(twice)
    torch.testing.assert_close(found[:1], logits(query.flip(3), view, ()))
    torch.testing.assert_close(found[1:], found[:1])
