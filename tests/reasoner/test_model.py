"""The model in the package: it is what the script made, it answers, and its labels are true."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from beaconscope.reasoner import MODEL_FOLDER, SIZES, label
from beaconscope.reasoner.evaluate import accuracy, check_labels, fresh, load_model


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return load_model()


def test_weights_are_those_that_the_training_wrote() -> None:
    record = json.loads((MODEL_FOLDER / "training.json").read_text())

    found = hashlib.sha256((MODEL_FOLDER / "model.safetensors").read_bytes()).hexdigest()

    assert found == record["sha256"]["model.safetensors"]


def test_curve_ends_where_the_training_did() -> None:
    record = json.loads((MODEL_FOLDER / "training.json").read_text())
    lines = (MODEL_FOLDER / "curve.jsonl").read_text().splitlines()

    assert json.loads(lines[-1]) == record["last"]
    assert record["last"]["stage"] == len(record["stages"]) - 1
    assert record["last"]["rate"] < 1e-6


def test_transformers_loads_and_runs_it_like_any_other() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    auto: Any = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER)
    text = "given f = 7 , c = 2 , k = 9 . plan 03 subtract c ; 01 add f ; 02 keep d ; 04 stop ; start at 01 with 5 ."
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )

    written = auto.generate(**prompt, max_new_tokens=200, do_sample=False)

    answer = tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer.endswith("recall the plan for 04 stop .</think> the answer is 0 .")


def test_fresh_problems_are_answered(model: LlamaForCausalLM) -> None:
    found = accuracy(model, fresh(SIZES["250"], 20, seed=2_000_000))

    assert found.answers.count >= 19
    assert found.chains.count >= 19


def test_without_the_definitions_the_answer_is_luck(model: LlamaForCausalLM) -> None:
    found = accuracy(model, fresh(SIZES["250"], 40, seed=2_000_001), without_definitions=True)

    # At one in ten, 13 or more of 40 come up once in ten thousand times.
    assert found.answers.count <= 12


def test_labels_agree_with_attention_and_with_the_long_range_gain(model: LlamaForCausalLM) -> None:
    found = check_labels(model, fresh(SIZES["500"], 2, seed=2_000_002))

    assert found.visible.share >= 0.95
    assert found.far_recalls.share >= 0.95
    assert found.others.share <= 0.02


def test_the_model_writes_what_the_labels_are_made_for(model: LlamaForCausalLM) -> None:
    ((problem, solution),) = fresh(SIZES["250"], 1, seed=2_000_003)
    prompt = torch.tensor([problem.prompt_ids])

    written = model.generate(prompt, max_new_tokens=400, do_sample=False)[0].tolist()

    assert tuple(label(written, len(problem.prompt_ids))) == solution.recalls
