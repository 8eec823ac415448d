"""A softmax whose exponentials are those of another, where only the entries that compete are others."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import torch

from beaconscope.attention.shifted_softmax import exponentials, normalized, shift_differs


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0, 300.0])
def test_it_is_a_softmax(spread):
    logits = spread * torch.randn((3, 2, 40), generator=torch.Generator().manual_seed(0))
    expected = scipy.special.softmax(logits.double().numpy(), axis=-1)
    found = normalized(exponentials(logits)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-30)


def test_largest_logits_far_from_0_do_no_harm():
    for largest in (-3e4, -16.0, 0.0, 16.0, 3e4):
        logits = torch.tensor([largest, largest - 1, largest - 60])
        found = normalized(exponentials(logits))
        np.testing.assert_allclose(found, scipy.special.softmax(logits.double().numpy()), rtol=1e-5)


def test_exponentials_of_some_entries_are_those_of_all_but_in_the_rows_that_are_told():
    draw = torch.Generator().manual_seed(1)
    logits = 12 * torch.randn((500, 60), generator=draw)
    every = exponentials(logits)
    # GIVEN caches that all hold the last 5 entries, and of the others some
    told = shift_differs(every[:, 55:])
    assert 0 < int(told.sum()) < 400
    for count in (1, 10, 50):
        held = torch.cat([torch.randperm(55, generator=draw)[:count], torch.arange(55, 60)])
        alone = exponentials(logits[:, held])
        same = (alone == every[:, held]).all(dim=1)
        # THEN every row that differs was told of, and some do
        assert bool((same | told).all())
        assert not bool(same.all())


def test_logits_at_a_multiple_of_the_step():
    logits = torch.tensor([[16.0, 0.0, -1.0], [16.5, 16.2, 0.5], [0.0, -16.0, -30.0]])
    # 16 itself is not shifted by more; an entry a whole step below cannot tell.
    assert exponentials(logits)[0, 0] == 1
    assert shift_differs(exponentials(logits)[:, 1:]).tolist() == [True, False, True]
