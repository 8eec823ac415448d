"""What simulated caches hold, by themselves and together."""

from __future__ import annotations

import torch

from beaconscope.replay.held import Held, unite


def caches(*held):
    return [Held(torch.tensor([heads])) for heads in held]


def test_a_union_has_what_one_of_the_caches_holds():
    # GIVEN two caches of two heads, whose heads have more or less in common
    union = unite(caches([[0, 4, 9], [1, 2, 3]], [[4, 9, 11], [5, 6, 7]]), 12)
    # THEN the union of the first head has four entries, that of the second six
    assert union.size == 6
    assert union.positions[0, 0, :4].tolist() == [0, 4, 9, 11]
    assert union.positions[0, 1].tolist() == [1, 2, 3, 5, 6, 7]
    # and every entry is found where it lies
    held = torch.tensor([[[4, 11], [3, 7]]])
    assert torch.equal(union.positions.gather(2, union.columns(held)), held)


def test_a_union_of_nearly_all_is_everything():
    union = unite(caches([[0, 1, 2, 3]], [[2, 3, 4, 5]]), 7)
    assert union.column is None
    assert union.positions.tolist() == [[list(range(7))]]
    held = torch.tensor([[[1, 5]]])
    assert torch.equal(union.columns(held), held)
