"""Entries picked out of keys, however these lie in memory."""

from __future__ import annotations

import pytest
import torch

from beaconscope.attention.gather import pick_entries


@pytest.mark.parametrize("lies", ["row by row", "as attention leaves a prompt"])
def test_each_head_has_its_own(lies):
    draw = torch.Generator().manual_seed(0)
    entries = torch.randn((2, 7, 3, 4), generator=draw).transpose(1, 2)  # [R, H, N, D]
    if lies == "row by row":
        entries = entries.contiguous()
    index = torch.randint(7, (2, 3, 5), generator=draw)
    picked = pick_entries(entries, index)
    assert picked.shape == (2, 3, 5, 4)
    for row in range(2):
        for head in range(3):
            assert picked[row, head].tolist() == [entries[row, head, at].tolist() for at in index[row, head].tolist()]
