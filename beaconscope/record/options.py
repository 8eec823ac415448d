"""The settings of a recording."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from beaconscope.errors import UsageError
from beaconscope.kv.policies import BeaconKV, Full, Policy
from beaconscope.selection import check_selection

MOST = (1 << 31) - 1
"""No number of tokens is larger; a seed may not be."""


_OFF = {"top_k": 0, "top_p": 1, "min_p": 0}
"""Settings that only sampling uses, with the value that switches each off."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. What is None is left to a default.

    Decoding is greedy unless a temperature above 0 is given or ``model_sampling`` finds that the model recommends
    sampling. The rules for logits in the model's generation config, such as ``no_repeat_ngram_size`` or
    ``suppress_tokens``, hold in any case, as in transformers' ``generate``.

    Raises
    ------
    UsageError
        For a value out of its range, or a setting that has no effect because decoding is greedy.
    """

    temperature: float | None = None
    """Divides the logits; 0 is greedy."""
    top_k: int | None = None
    """Draw from this many of the most likely tokens; 0 is off, and the default."""
    top_p: float | None = None
    """Draw from the most likely tokens that together have this probability; 1 is off, and the default."""
    min_p: float | None = None
    """Draw from the tokens with at least this fraction of the highest probability; 0 is off, and the default."""
    repetition_penalty: float | None = None
    """Lowers the scores of tokens that occurred already; 1 is off. The default is the model's own."""
    seed: int | None = None
    """Random seed; the default is 0."""
    model_sampling: bool = False
    """Sample as the model's generation config recommends; what is given here replaces the model's value."""

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise UsageError(f"temperature is {self.temperature}; give 0 (greedy) or more")
        if self.top_k is not None and not 0 <= self.top_k <= MOST:
            raise UsageError(f"top-k is {self.top_k}; give 0 (off) or more, at most {MOST}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top-p is {self.top_p}; give more than 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p < 1:
            raise UsageError(f"min-p is {self.min_p}; give 0 (off) or more, below 1")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < math.inf:
            raise UsageError(f"repetition penalty is {self.repetition_penalty}; give more than 0 (1 is off)")
        if self.seed is not None and not 0 <= self.seed <= MOST:
            raise UsageError(f"seed is {self.seed}; give 0 or more, at most {MOST}")
        if self.model_sampling and self.temperature == 0:
            raise UsageError("temperature 0 is greedy and --model-sampling samples; leave out one of them")
        if not self.model_sampling and not self.temperature:
            refuse_greedy(self)


def refuse_greedy(sampling: Sampling) -> None:
    """Refuse settings that greedy decoding does not use.

    Raises
    ------
    UsageError
        Naming them.
    """
    idle = [name for name, off in _OFF.items() if getattr(sampling, name) not in (None, off)]
    if idle:
        raise UsageError(f"{_named(idle)} no effect while decoding is greedy; give --temperature above 0")


def refuse_given(sampling: Sampling) -> None:
    """Refuse settings where the text is given and no token is chosen, but for a seed: the cache's policy may use it.

    Raises
    ------
    UsageError
        Naming them.
    """
    idle = [name for name, value in vars(sampling).items() if name != "seed" and value]
    if idle:
        raise UsageError(f"{_named(idle)} no effect on a completion that is given; leave out one or the other")


def _named(names: list[str]) -> str:
    """Return the settings as the subject of a sentence."""
    return ", ".join(name.replace("_", "-") for name in names) + (" has" if len(names) == 1 else " have")


@dataclass(frozen=True)
class RecordOptions:
    """Everything that a recording can be told, validated where it is made.

    Raises
    ------
    UsageError
        For a value out of its range, or values that cannot hold together.
    """

    policy: Policy = field(default_factory=BeaconKV)
    """What the KV cache evicts. With ``Full`` nothing is, and the beacons run as a shadow."""
    shadow: BeaconKV = field(default_factory=BeaconKV)
    """The beacons that run beside a ``Full`` cache."""
    max_new_tokens: int = 1024
    sampling: Sampling = field(default_factory=Sampling)
    system: str | None = None
    """A system message for the chat template."""
    template_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Variables of the chat template by name, such as ``{"enable_thinking": False}``; values are of JSON's types."""
    raw: bool = False
    """Feed the prompt as it is, without the chat template."""
    completion: str | None = None
    """A chain of thought to be teacher-forced instead of generated."""
    think_open: str = "<think>"
    think_close: str = "</think>"
    layers: str = "auto"
    """``auto`` (up to six, spread over the depth), ``all``, or a list such as ``0,8,16`` or ``0-8:2``."""
    heads: str = "all"
    """KV heads, written like ``layers``."""
    hits: int = 8
    """M, the most attended positions logged per query head and step; 1 to 128."""
    values: bool = True
    """Record values beside queries and keys."""
    vector_type: Literal["auto", "float16", "float32"] = "auto"
    """Of queries, keys and values in the trace; ``auto`` is float32, in which every model's are exact."""
    sink_positions: int = 4
    """The first positions, whose mass is ``mass_sink``."""
    local_window: int = 128
    """How far back a position is local, in tokens; what is neither sink nor local is distant."""
    prefill_chunk: int | None = None
    """Feed the prompt in pieces of this many tokens and compress between them; None feeds it whole."""

    def __post_init__(self) -> None:
        self.policy.check_live()
        check_selection(self.layers, "layers")
        check_selection(self.heads, "heads")
        if self.max_new_tokens < 1:
            raise UsageError(f"max-new-tokens is {self.max_new_tokens}; give at least 1")
        if not 1 <= self.hits <= 128:
            raise UsageError(f"hits is {self.hits}; give 1 to 128")
        if not 0 <= self.sink_positions <= MOST:
            raise UsageError(f"sink-positions is {self.sink_positions}; give 0 or more, at most {MOST}")
        if not 1 <= self.local_window <= MOST:
            raise UsageError(f"local-window is {self.local_window}; give at least 1, at most {MOST}")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise UsageError(f"prefill-chunk is {self.prefill_chunk}; give at least 1")
        if self.completion is not None:
            refuse_given(self.sampling)
        if self.raw and self.system is not None:
            raise UsageError("a system message needs the chat template; leave out --system or --raw")
        if self.raw and self.template_options:
            raise UsageError("options of the chat template need the template; leave out --template-option or --raw")
        object.__setattr__(self, "template_options", _checked_template_options(self.template_options))
        check_unicode(self.system or "", "system message")
        check_unicode(self.completion or "", "completion")
        check_unicode(self.think_open + self.think_close, "think markers")
        if not self.think_open or not self.think_close:
            raise UsageError("the think markers must not be empty; give --think-open and --think-close a text")


def _checked_template_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of template options.

    Raises
    ------
    UsageError
        For a name that is no identifier, or a value that JSON cannot express.
    """
    if not isinstance(options, Mapping):
        raise UsageError(f"template options are {options!r}; give a mapping of names to values")
    for name, value in options.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"{name!r} cannot be an option of a chat template; give the name of a variable")
        try:
            text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            raise UsageError(
                f"the template option {name} is {value!r:.80}; give a value that JSON can express"
            ) from None
        check_unicode(text, f"template option {name}")
    return dict(options)


def check_unicode(text: str, what: str) -> None:
    """Refuse text that no tokenizer can read.

    Raises
    ------
    UsageError
        For a lone surrogate: half of a pair, or a byte that Python could not decode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"half of a surrogate pair is in the {what}; give valid Unicode") from None


def with_shadow(options: RecordOptions) -> RecordOptions:
    """The same options, where a ``Full`` cache carries the beacons that run beside it."""
    if isinstance(options.policy, Full) and options.policy.shadow is None:
        return replace(options, policy=replace(options.policy, shadow=options.shadow))
    return options
