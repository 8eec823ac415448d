"""Choosing tokens on a device that works behind the host's back: nothing may be read at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from beaconscope.record.decoding import Decoding, Text
from beaconscope.record.draw import Draw

READS = ("aten._local_scalar_dense", "aten.nonzero", "aten._unique", "aten.unique", "aten.masked_select")
TEXTS = [Text((5, 6, 7), 300, (1,)), Text((8,), 300, (1,))]


class NothingIsRead(TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not str(func).startswith(READS), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "decoding",
    [
        Decoding(),
        Decoding(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, typical_p=0.9, epsilon_cutoff=0.001),
        Decoding(repetition_penalty=1.2, encoder_repetition_penalty=1.1, min_new_tokens=5, renormalize_logits=True),
        Decoding(temperature=0.8, repetition_penalty=1.2, min_length=9, remove_invalid_values=True),
    ],
    ids=["greedy", "sampling", "greedy with rules", "sampling with rules"],
)
def test_no_step_waits_for_the_device(decoding):
    draw = Draw(decoding, TEXTS, torch.device("cpu"))
    logits = torch.randn(300, 2, 64, generator=torch.Generator().manual_seed(0))
    with NothingIsRead():
        for step in range(300):
            assert draw(logits[step]).shape == (2,)


def test_a_read_would_be_noticed():
    with NothingIsRead(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(1).item()


def test_ids_are_kept_however_many_there_are():
    # Each of 600 tokens may be chosen once: what was written long ago counts.
    draw = Draw(Decoding(no_repeat_ngram_size=1), [Text((0, 1), 700, ()), Text((2,), 700, ())], torch.device("cpu"))
    chosen = torch.stack([draw(torch.zeros(2, 600)) for _ in range(598)])
    assert sorted(chosen[:, 0].tolist()) == list(range(2, 600))
    draw.check([598, 598])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_raise_nothing_while_sampling(wrong):
    # The recording refuses them, with the name of the layer, when the token is read.
    settings = Decoding(temperature=0.8, top_k=3, top_p=0.9, min_p=0.1, top_h=0.5, typical_p=0.9, eta_cutoff=0.1)
    draw = Draw(settings, TEXTS, torch.device("cpu"))
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    alone = Draw(settings, TEXTS[1:], torch.device("cpu"))(logits[1:])
    logits[0] = wrong
    assert draw(logits)[1] == alone[0]
