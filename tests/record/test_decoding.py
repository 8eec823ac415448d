"""What a recording writes, against transformers' `generate` with the same settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, WatermarkingConfig

from beaconscope import (
    BeaconKV,
    BeaconScopeError,
    Full,
    RandomEviction,
    RecordOptions,
    Sampling,
    UsageError,
    load_trace,
    recover,
)
from beaconscope.record import check_live, record, record_prompts
from beaconscope.record.decoding import Decoding
from beaconscope.record.generation_config import resolve_decoding
from beaconscope.record.prompts import Prompt
from tests.record.recording import PROMPT, endless_tokenizer, record_tiny, token_ids
from tests.tiny import tiny_model

COUNT = 24
ROOMY = BeaconKV(budget=512, interval=8, beacons=3, recent=4)
PROMPTS = ("Three plus four", "Plan: add, then double. 3 and 4?", "x")


def ids_of(prompt: str) -> list[int]:
    return list(prompt.encode())


def configured(**settings: Any) -> PreTrainedModel:
    """A tiny model whose generation config has these settings."""
    model = tiny_model()
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def generated(model: PreTrainedModel, prompt: str = PROMPT, seed: int = 0, **arguments: Any) -> list[int]:
    """What `generate` writes."""
    ids = torch.tensor([ids_of(prompt)])
    torch.manual_seed(seed)
    with torch.no_grad():
        output = model.generate(ids, **{"max_new_tokens": COUNT, "pad_token_id": 256, **arguments})
    return output[0, ids.shape[1] :].tolist()


def recorded(model: PreTrainedModel, folder: Any, prompt: str = PROMPT, **options: Any) -> list[int]:
    """What a recording writes."""
    trace = record_tiny(model, folder, prompt, **{"policy": Full(), "max_new_tokens": COUNT, **options})
    return token_ids(trace)[trace.prompt_length :]


FREE = generated(tiny_model(), do_sample=False)
"""Greedy tokens under no setting."""
# The token that ends a text here: greedy decoding would write it eighth.
END = next(token for at, token in enumerate(FREE) if at >= 7 and token not in FREE[:at])

RULES: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.4},
    "repetition reward": {"repetition_penalty": 0.7},
    "no repeated pair": {"no_repeat_ngram_size": 2},
    "no repeated token": {"no_repeat_ngram_size": 1},
    "suppressed": {"suppress_tokens": FREE[:3]},
    "suppressed at first": {"begin_suppress_tokens": FREE[:1]},
    "bad words": {"bad_words_ids": [FREE[:1], FREE[2:4]]},
    "bad words with the end": {"bad_words_ids": [[END], FREE[2:4]], "eos_token_id": END},
    "bias": {"sequence_bias": {(FREE[0],): -9.0, (FREE[3],): 2.0, (FREE[1], FREE[2]): -float("inf")}},
    "bias in lists": {"sequence_bias": [[[FREE[0]], -9.0], [[FREE[1], FREE[2]], 4.0]]},
    "end": {"eos_token_id": [END, 257]},
    "least new tokens": {"eos_token_id": END, "min_new_tokens": 12},
    "least length": {"eos_token_id": END, "min_length": len(PROMPT) + 12},
    "least length replaced": {"eos_token_id": END, "min_length": len(PROMPT) + 12, "min_new_tokens": 2},
    "least length without an end": {"min_length": len(PROMPT) + 12, "repetition_penalty": 1.4},
    "decay": {"eos_token_id": END, "exponential_decay_length_penalty": (2, 1.8)},
    "forced end": {"forced_eos_token_id": 65},
    "one of two forced ends": {"forced_eos_token_id": [65, 66], "eos_token_id": 66},
    "prompt favoured": {"encoder_repetition_penalty": 1.8},
    "no pair of the prompt": {"encoder_no_repeat_ngram_size": 1},
    "finite": {"remove_invalid_values": True, "suppress_tokens": FREE[:3]},
    "normalized": {"renormalize_logits": True, "repetition_penalty": 1.4},
    "many": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "encoder_repetition_penalty": 1.1,
        "sequence_bias": {(FREE[0],): -3.0},
        "suppress_tokens": FREE[1:2],
        "begin_suppress_tokens": [70, 71],
        "eos_token_id": END,
        "min_new_tokens": 9,
        "forced_eos_token_id": END,
        "exponential_decay_length_penalty": (9, 1.2),
        "renormalize_logits": True,
    },
}


@pytest.mark.parametrize("policy", [Full(), ROOMY], ids=["full", "beacon"])
@pytest.mark.parametrize("settings", RULES.values(), ids=RULES)
def test_greedy_decoding_follows_the_models_rules_as_generate_does(settings, policy, tmp_path):
    expected = generated(configured(**settings), do_sample=False)
    assert expected != FREE
    assert recorded(configured(**settings), tmp_path, policy=policy) == expected


def test_a_forced_first_token_follows_a_prompt_of_one_token(tmp_path):
    settings = {"forced_bos_token_id": 66, "begin_suppress_tokens": list(range(100))}
    for prompt in ("x", "xy"):
        expected = generated(configured(**settings), prompt, do_sample=False)
        assert (expected[0] == 66) == (prompt == "x")
        assert recorded(configured(**settings), tmp_path, prompt, name=prompt) == expected


@pytest.mark.parametrize("policy", [Full(), ROOMY], ids=["full", "beacon"])
def test_a_repetition_penalty_that_is_given_replaces_the_models(policy, tmp_path):
    for penalty in (1.0, 1.3):
        expected = generated(configured(repetition_penalty=1.9), do_sample=False, repetition_penalty=penalty)
        sampling = Sampling(repetition_penalty=penalty)
        written = recorded(
            configured(repetition_penalty=1.9), tmp_path, policy=policy, sampling=sampling, name=str(penalty)
        )
        assert written == expected


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "plain": {"temperature": 1.0},
    "top-k": {"temperature": 1.2, "top_k": 7},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
    "min-p": {"temperature": 1.2, "min_p": 0.2},
    "all": {"temperature": 1.4, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("policy", [Full(), ROOMY], ids=["full", "beacon"])
@pytest.mark.parametrize("settings", SAMPLED.values(), ids=SAMPLED)
def test_sampling_draws_what_generate_draws_after_the_same_seed(settings, policy, tmp_path):
    rules = {"no_repeat_ngram_size": 2, "suppress_tokens": FREE[:1]}
    expected = generated(configured(**rules), seed=5, do_sample=True, **{"top_k": 0, "top_p": 1.0, **settings})
    written = recorded(configured(**rules), tmp_path, policy=policy, sampling=Sampling(**settings, seed=5))
    assert written == expected
    assert recorded(configured(**rules), tmp_path, sampling=Sampling(**settings, seed=6), name="other") != expected


RECOMMENDED: dict[str, dict[str, Any]] = {
    "nothing but sampling": {},
    "temperature": {"temperature": 0.8},
    "top-k": {"top_k": 5},
    "top-p": {"top_k": 0, "top_p": 0.8},
    "min-p": {"top_k": 0, "min_p": 0.1},
    "top-h": {"top_h": 0.5},
    "typical": {"top_k": 0, "typical_p": 0.7},
    "epsilon": {"top_k": 0, "epsilon_cutoff": 0.02},
    "eta": {"top_k": 0, "eta_cutoff": 0.02},
    "all": {
        "temperature": 1.4,
        "top_k": 90,
        "top_p": 0.97,
        "min_p": 0.001,
        "top_h": 0.9,
        "typical_p": 0.97,
        "epsilon_cutoff": 0.001,
        "eta_cutoff": 0.001,
        "repetition_penalty": 1.1,
        "renormalize_logits": True,
    },
}


@pytest.mark.parametrize("settings", RECOMMENDED.values(), ids=RECOMMENDED)
def test_a_models_own_sampling_is_that_of_generate(settings, tmp_path):
    model = {"do_sample": True, **settings}
    expected = generated(configured(**model), seed=3)
    written = recorded(configured(**model), tmp_path, sampling=Sampling(seed=3, model_sampling=True))
    assert written == expected
    assert written != FREE


def test_what_is_given_replaces_the_models_sampling(tmp_path):
    model = {"do_sample": True, "temperature": 0.3, "top_k": 3, "typical_p": 0.9}
    given = {"temperature": 1.5, "top_k": 0, "top_p": 0.9}
    expected = generated(configured(**model), seed=3, **given)
    written = recorded(configured(**model), tmp_path, sampling=Sampling(**given, seed=3, model_sampling=True))
    assert written == expected
    # A temperature samples from a model that recommends no sampling, with the rest as it has it.
    model["do_sample"] = False
    expected = generated(configured(**model), seed=3, do_sample=True, temperature=1.5)
    sampling = Sampling(temperature=1.5, seed=3, model_sampling=True)
    assert recorded(configured(**model), tmp_path, sampling=sampling, name="again") == expected


def test_without_being_asked_a_model_that_recommends_sampling_is_greedy(tmp_path):
    assert recorded(configured(do_sample=True, temperature=0.9, top_k=3), tmp_path) == FREE


@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.1, "top_p": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_each_row_of_a_batch_writes_what_generate_writes_for_it_alone(drawn, tmp_path):
    rules = {
        **RULES["many"],
        "encoder_no_repeat_ngram_size": 2,
        "bad_words_ids": [[ids_of(PROMPTS[0])[-1], FREE[0]], [80]],
        "forced_bos_token_id": 66,
    }
    texts = [Prompt(str(at), text) for at, text in enumerate(PROMPTS)]
    options = RecordOptions(policy=Full(), raw=True, max_new_tokens=COUNT, sampling=Sampling(**drawn))
    paths = record_prompts(configured(**rules), endless_tokenizer(), texts, options, folder=tmp_path, batch_size=3)
    arguments = {"do_sample": False} if not drawn else {"do_sample": True, "top_k": 0, **drawn}
    for prompt, path in zip(PROMPTS, paths, strict=True):
        trace = load_trace(path)
        expected = generated(configured(**rules), prompt, **arguments)
        assert token_ids(trace)[trace.prompt_length :] == expected
    assert len({load_trace(path).length for path in paths}) == 3


def test_logprob_and_entropy_are_those_of_the_model_without_its_rules(tmp_path):
    model = configured(repetition_penalty=1.5, suppress_tokens=FREE[:2])
    trace = record_tiny(model, tmp_path, policy=Full(), max_new_tokens=12)
    ids = token_ids(trace)
    with torch.no_grad():
        log_p = tiny_model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    for position in range(trace.prompt_length, trace.length):
        before = log_p[position - 1]
        assert trace.tokens["logprob"][position] == pytest.approx(float(before[ids[position]]), abs=1e-4)
        assert trace.tokens["entropy"][position] == pytest.approx(-float((before.exp() * before).sum()), abs=1e-4)


def test_the_trace_says_what_was_in_force(tmp_path):
    model = configured(do_sample=True, temperature=0.7, typical_p=0.9, sequence_bias={(1, 2): -float("inf")})
    trace = record_tiny(model, tmp_path, sampling=Sampling(top_p=0.8, seed=2, model_sampling=True), max_new_tokens=3)
    options = load_trace(trace.path).options
    assert options["sampling"] == {
        "temperature": None,
        "top_k": None,
        "top_p": 0.8,
        "min_p": None,
        "repetition_penalty": None,
        "seed": 2,
        "model_sampling": True,
    }
    expected = Decoding(temperature=0.7, top_k=50, top_p=0.8, typical_p=0.9, sequence_bias=[[[1, 2], "-inf"]], seed=2)
    assert options["decoding"] == expected.to_dict()
    assert Decoding.of_trace(options) == expected


# The live check


@pytest.mark.parametrize("drawn", [Sampling(), Sampling(temperature=1.2, seed=3)], ids=["greedy", "sampled"])
def test_the_live_check_decodes_as_the_recording_did(drawn, tmp_path):
    rules = RULES["many"]
    trace = record_tiny(configured(**rules), tmp_path, policy=Full(), sampling=drawn, max_new_tokens=COUNT)
    assert trace.length - trace.prompt_length < COUNT or drawn.temperature
    # The settings are those of the trace, whatever the model's are now.
    model = configured(eos_token_id=END, repetition_penalty=3.0)
    full, again = check_live(model, endless_tokenizer(), load_trace(trace.path), [ROOMY])
    assert full.free.tokens == trace.length - trace.prompt_length
    assert again.free.first_divergence is None


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_trace_of_version_0_1_is_run_again_as_it_was_made(temperature, tmp_path):
    settings = {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}
    # Greedy decoding used none of them, and nothing came from the model.
    sampling = Sampling(temperature=temperature, seed=3, **(settings if temperature else {}))
    trace = load_trace(record_tiny(tiny_model(), tmp_path, policy=Full(), sampling=sampling, max_new_tokens=COUNT).path)
    old = {"temperature": temperature, "seed": 3, **settings}
    del trace.metadata["options"]["decoding"]
    trace.metadata["options"]["sampling"] = old
    (full,) = check_live(configured(no_repeat_ngram_size=1), endless_tokenizer(), trace, [])
    assert full.free.tokens == COUNT
    decoding = Decoding.of_trace(trace.options)
    assert decoding == (Decoding(**old) if temperature else Decoding(seed=3))


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_p": "x"},
        {"temperature": None},
        {"temperature": -1.0},
        {"new_setting": 1},
        {"remove_invalid_values": 1},
        {"repetition_penalty": -1.0},
        {"bad_words_ids": 3},
        {"forced_bos_token_id": "x"},
        {"sequence_bias": [[[264], 1.0]]},
        {"seed": 1 << 80},
    ],
)
def test_a_trace_with_settings_that_cannot_be_is_refused(wrong, tmp_path):
    trace = load_trace(record_tiny(tiny_model(), tmp_path, policy=Full(), max_new_tokens=4).path)
    trace.metadata["options"]["decoding"] = wrong
    with pytest.raises(BeaconScopeError, match="does not say how it was generated"):
        check_live(tiny_model(), endless_tokenizer(), trace, [])


# What is refused


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"top_p": 0.9}, "top-p has no effect while decoding is greedy; give --temperature above 0"),
        ({"top_k": 5, "min_p": 0.1, "temperature": 0.0}, "top-k, min-p have no effect while decoding is greedy"),
        ({"temperature": 0.0, "model_sampling": True}, "temperature 0 is greedy and --model-sampling samples"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, says):
    with pytest.raises(UsageError, match=says):
        Sampling(**settings)


def test_settings_that_are_off_are_no_contradiction():
    Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0)


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"repetition_penalty": 1.2}, {"model_sampling": True}])
def test_settings_for_a_text_that_is_given_are_refused(settings):
    with pytest.raises(UsageError, match="has no effect on a completion that is given"):
        RecordOptions(completion="x", sampling=Sampling(**settings))


def test_sampling_settings_for_a_model_that_recommends_none_are_refused():
    with pytest.raises(UsageError, match="top-p has no effect while decoding is greedy"):
        resolve_decoding(configured(temperature=0.6), Sampling(top_p=0.9, model_sampling=True))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"repetition_penalty": -1.0}, "`penalty` has to be a strictly positive float"),
        ({"no_repeat_ngram_size": 1.5}, "`ngram_size` has to be a strictly positive integer"),
        ({"bad_words_ids": [[5], [264]]}, "bad_words_ids names token 264, but the model has tokens 0 to 263"),
        ({"sequence_bias": [[[300], 1.0]]}, "sequence_bias names token 300"),
        ({"forced_eos_token_id": [3, -1]}, "forced_eos_token_id names token -1"),
        ({"forced_bos_token_id": 264}, "forced_bos_token_id names token 264"),
        ({"sequence_bias": [[1, 2, 3]]}, "cannot be used"),
        ({"suppress_tokens": ["a"]}, "cannot be used"),
    ],
)
def test_a_generation_config_that_cannot_be_is_refused_before_anything_is_written(settings, says, tmp_path):
    with pytest.raises(
        BeaconScopeError, match=f"the model's generation config cannot be used: .*{says}|{says}"
    ) as error:
        recorded(configured(**settings), tmp_path)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_samples_at_temperature_0_is_refused():
    with pytest.raises(BeaconScopeError, match="samples at temperature 0; give --temperature"):
        resolve_decoding(configured(do_sample=True, temperature=0.0), Sampling(model_sampling=True))


@pytest.mark.parametrize("drawn", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_rules_that_leave_no_token_are_refused_and_not_guessed(drawn, tmp_path):
    # Five tokens may be written, each once.
    left = [128, 129, 130, 131, 132]
    others = [token for token in range(264) if token not in left]
    model = configured(no_repeat_ngram_size=1, suppress_tokens=others)
    says = r"after 5 new tokens, .*\(no_repeat_ngram_size, suppress_tokens\) leave no token to choose"
    with pytest.raises(BeaconScopeError, match=says) as error:
        recorded(model, tmp_path, sampling=drawn)
    # What came before is safe, and the message says where.
    assert f"run `beaconscope recover {tmp_path / 't.parquet'}`" in str(error.value)
    assert recover(tmp_path / "t.parquet").exists()
    # A text that ends before is whole.
    model.generation_config.eos_token_id = left
    assert len(recorded(model, tmp_path, sampling=drawn, name="ends")) == 1


def test_a_row_that_has_ended_and_has_no_token_left_stops_no_other(tmp_path):
    # Each of six letters may be written once, and the one that the second row would write last ends a text.
    rules = {
        "no_repeat_ngram_size": 1,
        "suppress_tokens": [token for token in range(264) if token not in ids_of("abcdef")],
    }
    expected = generated(configured(**rules), "x", do_sample=False, max_new_tokens=6)
    model = configured(**rules, eos_token_id=expected[-1])
    # Of the first row the prompt has the five others, so that only the end is left to it.
    texts = [Prompt("short", bytes(expected[:-1]).decode()), Prompt("long", "x")]
    options = RecordOptions(policy=Full(), raw=True, max_new_tokens=COUNT)
    paths = record_prompts(model, endless_tokenizer(), texts, options, folder=tmp_path / "f", batch_size=2)
    written = [token_ids(trace)[trace.prompt_length :] for trace in map(load_trace, paths)]
    assert written == [expected[-1:], expected]


# What is said


def notes_of(model: PreTrainedModel, folder: Any, **options: Any) -> list[str]:
    """Notes of a recording, those on the trace's size and on the cache left out."""
    said: list[str] = []
    settings = RecordOptions(**{"raw": True, "max_new_tokens": 4, **options})
    record(model, endless_tokenizer(), PROMPT, settings, output=folder / "t.parquet", force=True, note=said.append)
    return [text for text in said if not text.startswith(("The trace takes", "The cache never filled"))]


def test_a_plain_recording_has_nothing_to_say(tmp_path):
    assert notes_of(tiny_model(), tmp_path) == []
    plain = {"max_length": 99, "num_beams": 1, "top_p": 0.9, "use_cache": False, "eos_token_id": 3, "guidance_scale": 1}
    assert notes_of(configured(**plain), tmp_path) == []


def test_settings_that_are_not_applied_are_named_in_one_note(tmp_path):
    model = configured(
        num_beams=4,
        guidance_scale=1.5,
        penalty_alpha=0.6,
        stop_strings=["\n\n"],
        watermarking_config=WatermarkingConfig(),
        prompt_lookup_num_tokens=3,
        max_time=9.0,
        token_healing=True,
        length_penalty=2.0,
    )
    (said,) = notes_of(model, tmp_path)
    assert said.startswith("Not applied, though the model's generation config sets it: ")
    for part in ("num_beams=4", "guidance_scale=1.5", "penalty_alpha=0.6", r"stop_strings=['\n\n']", "max_time=9.0",
                 "watermarking_config=", "prompt_lookup_num_tokens=3", "token_healing=True"):  # fmt: skip
        assert part in said
    assert "length_penalty" not in said
    assert "\n" not in said


def test_recommended_sampling_that_is_not_used_is_said(tmp_path):
    model = configured(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    assert notes_of(model, tmp_path) == [
        "The model recommends sampling (temperature=0.6, top_k=20, top_p=0.95), but decoding is greedy; "
        "--model-sampling follows it."
    ]
    assert notes_of(model, tmp_path, sampling=Sampling(temperature=0.0)) == []
    assert notes_of(model, tmp_path, sampling=Sampling(temperature=0.5, top_k=9)) == [
        "The model's own top_p=0.95 is not applied; --model-sampling applies it."
    ]
    assert notes_of(model, tmp_path, sampling=Sampling(model_sampling=True)) == []
    assert notes_of(model, tmp_path, completion="xyz") == []


def test_a_model_that_recommends_no_sampling_is_said_to(tmp_path):
    assert notes_of(tiny_model(), tmp_path, sampling=Sampling(model_sampling=True)) == [
        "The model's generation config does not recommend sampling, so --model-sampling decodes greedily; "
        "give --temperature to sample."
    ]


IDLE = ["--seed 3 has no effect: decoding is greedy, and the cache's policy draws no random numbers from it."]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, IDLE),
        ({"policy": Full(), "completion": "xyz"}, IDLE),
        ({"policy": BeaconKV(seed=3, selector="kmeans")}, IDLE),
        ({"policy": RandomEviction(seed=4)}, IDLE),
        ({"policy": RandomEviction(seed=3)}, []),
        ({"policy": BeaconKV(seed=3, selector="random")}, []),
        ({"policy": Full(), "shadow": BeaconKV(seed=3, selector="random")}, []),
    ],
)
def test_a_seed_that_nothing_draws_from_is_said(options, expected, tmp_path):
    assert notes_of(tiny_model(), tmp_path, sampling=Sampling(seed=3), **options) == expected


def test_a_seed_that_sampling_draws_from_is_not_said(tmp_path):
    assert notes_of(tiny_model(), tmp_path, sampling=Sampling(temperature=1.0, seed=3)) == []
    assert notes_of(configured(do_sample=True), tmp_path, sampling=Sampling(model_sampling=True, seed=3)) == []


def test_notes_on_decoding_come_once_for_many_prompts(tmp_path):
    said: list[str] = []
    texts = [Prompt("given", "x", completion="y"), Prompt("a", "x"), Prompt("b", "xy")]
    options = RecordOptions(raw=True, max_new_tokens=3, sampling=Sampling(seed=3))
    record_prompts(
        configured(num_beams=2), endless_tokenizer(), texts, options, folder=tmp_path / "f", note=said.append
    )
    assert sum(text.startswith("--seed") for text in said) == 1
    assert sum("num_beams" in text for text in said) == 1
