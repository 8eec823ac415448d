"""What a model's generation config adds to the settings that the user gives, and what of it cannot be applied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from beaconscope.errors import BeaconScopeError
from beaconscope.record.decoding import RULES, SAMPLING, Decoding, Text, logits_rules, logits_warpers
from beaconscope.record.options import MOST, Sampling, refuse_greedy

_TOP_K = 50
"""What `generate` takes where a model samples and sets no top_k."""
_NOTHING: tuple[Any, ...] = (None, [], (), {})
_WITHOUT_EFFECT = frozenset({
    "do_sample",
    # The length is the recording's, as `generate` prefers the max_new_tokens that it is given.
    "max_length", "max_new_tokens",
    # The cache is the recording's.
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size",
    # What `generate` returns and how fast it is.
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "compile_config", "disable_compile", "continuous_batching_config", "low_memory",
    # Texts end at the model's end tokens in any case; the other ids are for padding and encoders.
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id",
    # Details of beam search and of assisted decoding, which other settings switch on.
    "early_stopping", "length_penalty", "diversity_penalty", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type",
    "transformers_version",
})  # fmt: skip
"""Settings that do not change which tokens a recording writes. What is in none of these lists is named in a note."""
_OFF: Mapping[str, Any] = {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "guidance_scale": 1}
"""Values that switch a setting off, besides None, False, 0 and what is empty."""
_SHOWN = 40
"""Characters of a value that a note shows."""


def resolve_decoding(model: PreTrainedModel, sampling: Sampling) -> tuple[Decoding, list[str]]:
    """Combine what the user gives with what the model's generation config sets.

    The model's rules for logits hold as in ``generate(do_sample=False)``; its sampling only where it is asked for.

    Returns
    -------
    decoding
        The settings in force.
    notes
        Sentences for the user, on settings of the model that are not in force.

    Raises
    ------
    BeaconScopeError
        For a setting of the model that cannot be used.
    UsageError
        For settings of sampling where the model recommends none and decoding is therefore greedy.
    """
    config = getattr(model, "generation_config", None) or GenerationConfig()  # type: ignore[no-untyped-call]
    own = {name: value for name in (*SAMPLING, *RULES) if (value := getattr(config, name, None)) not in _NOTHING}
    samples = config.do_sample is True
    given = {name: value for name, value in vars(sampling).items() if value is not None and name != "model_sampling"}
    settings = {name: own[name] for name in RULES if name in own}
    if config.min_new_tokens is not None:
        # It replaces min_length, as in `generate`.
        settings.pop("min_length", None)
    if sampling.model_sampling and (samples or "temperature" in given):
        settings |= {"temperature": 1.0, "top_k": _TOP_K} | {name: own[name] for name in SAMPLING if name in own}
        if settings["temperature"] == 0 and "temperature" not in given:
            raise BeaconScopeError("the model's generation config samples at temperature 0; give --temperature")
    elif sampling.model_sampling:
        refuse_greedy(sampling)
    try:
        decoding = Decoding(**_plain(settings | given))
        check_decoding(decoding, model)
    except (TypeError, ValueError) as error:
        raise BeaconScopeError(f"the model's generation config cannot be used: {error}") from error
    return decoding, [*_on_sampling(sampling, own, samples), *_on_the_rest(config)]


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace tuples, sets and mappings by lists, which JSON can hold."""
    bias = settings.get("sequence_bias")
    pairs = bias.items() if isinstance(bias, Mapping) else bias or ()
    plain = {name: list(value) if isinstance(value, tuple | set) else value for name, value in settings.items()}
    if bias:
        plain["sequence_bias"] = [
            [list(ids), amount if math.isfinite(amount) else str(amount)] for ids, amount in pairs
        ]
    return plain


def check_decoding(decoding: Decoding, model: PreTrainedModel) -> None:
    """Refuse settings that cannot be used with a model.

    Raises
    ------
    TypeError, ValueError
        In one line.
    """
    forced = decoding.forced_eos_token_id
    ids = {
        "sequence_bias": [token for sequence, _ in decoding.sequence_bias or [] for token in sequence],
        "bad_words_ids": [token for sequence in decoding.bad_words_ids or [] for token in sequence],
        "forced_bos_token_id": [] if decoding.forced_bos_token_id is None else [decoding.forced_bos_token_id],
        "forced_eos_token_id": forced if isinstance(forced, list) else [] if forced is None else [forced],
    }
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    for name, tokens in ids.items():
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < vocabulary:
                raise ValueError(f"{name} names token {token}, but the model has tokens 0 to {vocabulary - 1}")
    if not 0 <= decoding.seed <= MOST:
        raise ValueError(f"seed is {decoding.seed}")
    # Making the processors checks the rest.
    logits_rules(decoding, Text((0,), 1, (0,)), torch.device("cpu"))
    logits_warpers(decoding, torch.device("cpu"))


def _on_sampling(sampling: Sampling, own: Mapping[str, Any], samples: bool) -> Iterator[str]:
    """Yield a note on what the model's sampling is, where it is not in force."""
    default = Decoding()
    if sampling.model_sampling:
        if not samples and sampling.temperature is None:
            yield (
                "The model's generation config does not recommend sampling, so --model-sampling decodes greedily; "
                "give --temperature to sample."
            )
        return
    unused = {
        name: own[name]
        for name in SAMPLING
        if name in own and getattr(sampling, name, None) is None and own[name] != getattr(default, name)
    }
    if sampling.temperature is None and samples:
        recommended = f" ({_shown(unused)})" if unused else ""
        yield f"The model recommends sampling{recommended}, but decoding is greedy; --model-sampling follows it."
    elif sampling.temperature and unused:
        yield f"The model's own {_shown(unused)} is not applied; --model-sampling applies it."


def _on_the_rest(config: GenerationConfig) -> Iterator[str]:
    """Yield a note that names the settings that cannot be applied."""
    known = {*SAMPLING, *RULES, *_WITHOUT_EFFECT}
    left = {
        name: value
        for name in vars(GenerationConfig())  # type: ignore[no-untyped-call]
        if name not in known and not name.startswith("_")
        if (value := getattr(config, name, None)) and value != _OFF.get(name)
    }
    if left:
        yield f"Not applied, though the model's generation config sets it: {_shown(left)}."


def _shown(settings: Mapping[str, Any]) -> str:
    """Return settings with their values in one line."""
    shown = []
    for name, value in settings.items():
        text = " ".join(repr(value).split())
        shown.append(f"{name}={text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'}")
    return ", ".join(shown)
