"""The training script: it learns, and it resumes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from beaconscope.reasoner.evaluate import SINKS
from beaconscope.reasoner.task import Size, make_problem, solve
from beaconscope.reasoner.train import (
    IGNORE,
    STAGES,
    Probed,
    Recipe,
    Stage,
    export,
    make_batch,
    make_model,
    quick,
    train,
)
from beaconscope.reasoner.vocabulary import decode


def test_fifty_steps_lower_the_loss(tmp_path: Path) -> None:
    first, last = quick(tmp_path, seed=0)

    assert last < 0.7 * first


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = train(Recipe(most_steps=4), tmp_path / "whole", compiled=False)
    train(Recipe(most_steps=2), tmp_path / "cut", compiled=False)
    cut = train(Recipe(most_steps=4), tmp_path / "cut", resume=True, compiled=False)

    found, wanted = (torch.load(path, weights_only=False)["probed"]["name_probe.weight"] for path in (cut, whole))

    assert torch.equal(found, wanted)


def test_exported_folder_tells_how_it_came_about(tmp_path: Path) -> None:
    recipe = Recipe(most_steps=2, seed=7)
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


@torch.no_grad()
def test_looking_far_is_measured_where_nothing_is_recalled() -> None:
    # GIVEN a model, and the attention that it says it pays
    rng = random.Random(0)
    size = Size(3, 8, 1)
    batch = make_batch([(problem, solve(problem)) for problem in (make_problem(size, rng) for _ in range(2))])
    model: Any = make_model(0).eval()
    model.set_attn_implementation("eager")
    maps = model(input_ids=batch.tokens, output_attentions=True, use_cache=False).attentions
    rows = [size.prompt_length + offset for offset in (3, 80, 120, 150)]
    near = 40
    # WHEN the loss is asked for some rows
    positions = torch.arange(batch.tokens.shape[1])[None]
    fields = (batch.targets, batch.recalls, batch.names, batch.values, batch.rows, batch.aims)
    found = Probed(model)(batch.tokens, positions, *fields, None, torch.tensor(rows), near)[4]
    # THEN it is what stays near in every head of every layer, at those rows that recall nothing
    wanted = []
    for layer in maps:
        for index in range(2):
            for row in rows:
                if not batch.recalls[index, row]:
                    seen = [j for j in range(row + 1) if j < SINKS or row - j <= near]
                    wanted.append([-math.log(float(head[row, seen].sum())) for head in layer[index]])
    assert float(found) == pytest.approx(float(torch.tensor(wanted).mean()), rel=1e-4)


@pytest.mark.parametrize("step", [0, 50, 99])
def test_rate_warms_up(step: int) -> None:
    assert Recipe(warmup=100).rate(step, STAGES[0], 0) == pytest.approx(2e-3 * (step + 1) / 100)


def test_rate_falls_to_nothing_over_the_end_of_a_stage() -> None:
    stage = Stage((3, 4), (3, 4), 2048, lasts=600, decays=500, rate=0.5)

    found = [Recipe().rate(step, stage, began=400) for step in (400, 500, 750, 999)]

    assert found[:3] == pytest.approx([1e-3, 1e-3, 5e-4])
    assert found[3] < 1e-7


def test_a_stage_of_a_fixed_length_gives_way_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN two stages of two steps each
    short = Stage((3, 4), (3, 4), 256, lasts=2)
    monkeypatch.setattr("beaconscope.reasoner.train.STAGES", (short, short))
    # WHEN a run has more steps than it needs
    train(Recipe(most_steps=50), tmp_path, compiled=False)
    # THEN it ends with the last stage, and the curve has the last step of each
    curve = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [(line["step"], line["stage"]) for line in curve] == [(0, 0), (1, 0), (3, 1)]
