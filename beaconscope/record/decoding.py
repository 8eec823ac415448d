"""The settings that choose each next token, and the logits processors of transformers that apply them.

Names and meanings are those of transformers' ``GenerationConfig``. Processors come in the order of ``generate``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that only sampling uses."""
RULES = (
    "sequence_bias",
    "encoder_repetition_penalty",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "min_length",
    "min_new_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "remove_invalid_values",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "renormalize_logits",
)
"""Settings that change the logits of greedy decoding too."""


@dataclass(frozen=True)
class Decoding:
    """Everything that chooses the next token, with no default left open. The trace keeps it.

    Raises
    ------
    TypeError
        For a value that is not a number where it has to be. Ranges are checked when the processors are made.
    """

    temperature: float = 0.0
    """Divides the logits. 0 is greedy, and then the other settings of sampling have no effect."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_h: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    sequence_bias: list[Any] | None = None
    """Pairs of a list of token ids and its bias; a bias that is not finite is text, which JSON can hold."""
    encoder_repetition_penalty: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: list[list[int]] | None = None
    min_length: int = 0
    min_new_tokens: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | list[int] | None = None
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: list[Any] | None = None
    """The new tokens after which the penalty starts, and its factor."""
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    renormalize_logits: bool = False
    seed: int = 0
    """Random seed of sampling."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                fits = isinstance(value, bool)
            else:
                fits = field.default is None or (isinstance(value, int | float) and not isinstance(value, bool))
            if not fits:
                raise TypeError(f"{field.name} is {value!r}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of drawing one."""
        return self.temperature == 0

    def rules(self) -> dict[str, Any]:
        """Return the settings of :data:`RULES` that are in force, in that order."""
        default = Decoding()
        return {name: getattr(self, name) for name in RULES if getattr(self, name) != getattr(default, name)}

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def of_trace(cls, options: Mapping[str, Any]) -> Decoding:
        """Return the settings that a recording with these ``options`` used.

        Raises
        ------
        KeyError, TypeError
            When the options do not hold them.
        """
        if "decoding" in options:
            return cls(**options["decoding"])
        # In older traces greedy decoding used no other setting, and no setting came from the model.
        sampling = options["sampling"]
        return cls(**sampling) if sampling["temperature"] else cls(seed=sampling.get("seed", 0))


@dataclass(frozen=True)
class Text:
    """What the processors of one sequence depend on."""

    prompt: Sequence[int]
    """Its token ids, without padding."""
    limit: int
    """New tokens at most."""
    ends: tuple[int, ...]
    """Ids of the tokens that end it."""


def logits_rules(decoding: Decoding, text: Text, device: torch.device) -> list[LogitsProcessor]:
    """Return the processors of one sequence that change its logits whether decoding is greedy or not.

    Most of them read the ids of the sequence, prompt and new tokens, without padding.

    Raises
    ------
    ValueError
        For a setting that transformers refuses.
    """
    start, ends, on_device = len(text.prompt), list(text.ends), str(device)
    # `Any`, because transformers annotates a kind of tensor that torch.tensor is not declared to return.
    prompt: Any = torch.tensor([list(text.prompt)], device=device)

    def sequence_bias(pairs: Any) -> LogitsProcessor:
        biases: Any = {tuple(ids): float(bias) for ids, bias in pairs}
        return SequenceBiasLogitsProcessor(biases)

    def begin_suppress_tokens(ids: Any) -> LogitsProcessor:
        # Where the first token is forced, the one after it is the first that the model chooses.
        forced = start == 1 and decoding.forced_bos_token_id is not None
        return SuppressTokensAtBeginLogitsProcessor(ids, start + forced, device=on_device)

    made: dict[str, Callable[[Any], LogitsProcessor]] = {
        "sequence_bias": sequence_bias,
        "encoder_repetition_penalty": lambda penalty: EncoderRepetitionPenaltyLogitsProcessor(float(penalty), prompt),
        "repetition_penalty": lambda penalty: RepetitionPenaltyLogitsProcessor(float(penalty)),
        "no_repeat_ngram_size": NoRepeatNGramLogitsProcessor,
        "encoder_no_repeat_ngram_size": lambda size: EncoderNoRepeatNGramLogitsProcessor(size, prompt),
        "bad_words_ids": lambda words: NoBadWordsLogitsProcessor(words, ends or None),
        "min_length": lambda length: MinLengthLogitsProcessor(length, ends, device=on_device),
        "min_new_tokens": lambda count: MinNewTokensLengthLogitsProcessor(start, count, ends, device=on_device),
        "forced_bos_token_id": ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda ids: ForcedEOSTokenLogitsProcessor(start + text.limit, ids, device=on_device),
        "remove_invalid_values": lambda _: InfNanRemoveLogitsProcessor(),
        "exponential_decay_length_penalty": lambda pair: ExponentialDecayLengthPenalty(tuple(pair), ends, start),
        "suppress_tokens": lambda ids: SuppressTokensLogitsProcessor(ids, device=on_device),
        "begin_suppress_tokens": begin_suppress_tokens,
    }
    on = decoding.rules()
    if not ends:
        # These change the scores of the tokens that end a text, and there are none.
        for name in ("min_length", "min_new_tokens", "exponential_decay_length_penalty"):
            on.pop(name, None)
    return _listed([partial(make, on[name]) for name, make in made.items() if name in on])


def logits_warpers(decoding: Decoding, device: torch.device) -> list[LogitsProcessor]:
    """Return the processors that come after the rules. They read the logits only, so that a batch can share them.

    Raises
    ------
    ValueError
        For a setting that transformers refuses.
    """
    of = decoding
    drawn: list[tuple[bool, Callable[[], LogitsProcessor]]] = [
        (of.temperature != 1, lambda: TemperatureLogitsWarper(float(of.temperature))),
        (of.top_h is not None, lambda: TopHLogitsWarper(of.top_h or 0.0)),
        (of.top_k != 0, lambda: TopKLogitsWarper(of.top_k)),
        (of.top_p < 1, lambda: TopPLogitsWarper(of.top_p)),
        (of.min_p != 0, lambda: MinPLogitsWarper(of.min_p)),
        (of.typical_p < 1, lambda: TypicalLogitsWarper(of.typical_p)),
        (0 < of.epsilon_cutoff < 1, lambda: EpsilonLogitsWarper(of.epsilon_cutoff)),
        (0 < of.eta_cutoff < 1, lambda: EtaLogitsWarper(of.eta_cutoff, device=str(device))),
    ]
    warpers = [] if of.greedy else [make for on, make in drawn if on]
    return _listed(warpers + ([LogitNormalization] if of.renormalize_logits else []))


def _listed(makers: Sequence[Callable[[], LogitsProcessor]]) -> list[LogitsProcessor]:
    try:
        return [make() for make in makers]
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())) from error
