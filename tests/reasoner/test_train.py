"""The training script: it learns, and it resumes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from beaconscope.reasoner.task import Size, make_problem, solve
from beaconscope.reasoner.train import IGNORE, Recipe, export, make_batch, make_model, quick, train
from beaconscope.reasoner.vocabulary import decode


def test_fifty_steps_lower_the_loss(tmp_path: Path) -> None:
    first, last = quick(tmp_path, seed=0)

    assert last < 0.7 * first


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = train(Recipe(steps=4), tmp_path / "whole", compiled=False)
    # The recipe decides the rate, so the run is cut by its number of steps at a constant rate.
    train(Recipe(steps=2, decay=0.0), tmp_path / "cut", compiled=False)
    cut = train(Recipe(steps=4, decay=0.0), tmp_path / "cut", resume=True, compiled=False)
    straight = train(Recipe(steps=4, decay=0.0), tmp_path / "straight", compiled=False)

    found, wanted, other = (
        torch.load(path, weights_only=False)["probed"]["name_probe.weight"] for path in (cut, straight, whole)
    )

    assert torch.equal(found, wanted)
    assert not torch.equal(found, other)


def test_exported_folder_tells_how_it_came_about(tmp_path: Path) -> None:
    recipe = Recipe(steps=2, seed=7)
    checkpoint = train(recipe, tmp_path, compiled=False)

    export(checkpoint, recipe, tmp_path / "model")

    record = json.loads((tmp_path / "model" / "training.json").read_text())
    assert record["recipe"]["seed"] == 7
    assert record["last"]["step"] == 1
    assert record["licence"] == "Apache-2.0"
    assert set(record["versions"]) == {"python", "torch", "transformers"}


def test_batch_marks_what_is_predicted_where() -> None:
    rng = random.Random(0)
    examples = [(problem, solve(problem)) for problem in (make_problem(Size(3, 4, 1), rng) for _ in range(3))]

    batch = make_batch(examples)

    for index, (problem, solution) in enumerate(examples):
        words = decode(batch.tokens[index].tolist())
        prompt_length = len(problem.prompt_ids)
        assert (batch.targets[index, : prompt_length - 1] == IGNORE).all()
        assert decode(batch.targets[index, prompt_length - 1 : -1].tolist()) == decode(solution.token_ids)
        for row, aim in zip(batch.rows[index].tolist(), batch.aims[index].tolist(), strict=True):
            if words[row] == "gives":
                # The digit of the letter before "gives", in that letter's definition.
                assert words[aim - 2 : aim] == [words[row - 1], "="]
                assert batch.values[index, row] == int(words[aim])
            else:
                assert words[aim] == words[row + 1]


def test_model_is_small_enough() -> None:
    parameters = sum(weight.numel() for weight in make_model(0).parameters())

    assert 2 * parameters <= 4 * 1024**2


@pytest.mark.parametrize("step", [0, 50, 99])
def test_rate_warms_up(step: int) -> None:
    assert Recipe(warmup=100).rate(step) == pytest.approx(2e-3 * (step + 1) / 100)


def test_rate_falls_to_nothing() -> None:
    recipe = Recipe(steps=1000, decay=0.5)

    assert recipe.rate(400) == pytest.approx(2e-3)
    assert recipe.rate(750) == pytest.approx(1e-3)
    assert recipe.rate(999) < 1e-7
