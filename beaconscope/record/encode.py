"""From a prompt to the tokens that the model is fed.

The tokenizer is not asked for its warning of a long text: whether it fits is the plan's to say.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from beaconscope.errors import BeaconScopeError
from beaconscope.record.options import RecordOptions


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, options: RecordOptions) -> list[int]:
    """Token ids of a prompt, in the model's chat template unless ``options.raw``.

    Raises
    ------
    BeaconScopeError
        When the tokenizer has no chat template, the template refuses, or nothing is left of the prompt.
    """
    if options.raw:
        ids = list(tokenizer(prompt, verbose=False).input_ids)
    else:
        text = _in_template(tokenizer, prompt, options.system)
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    if not ids:
        raise BeaconScopeError("the prompt has no tokens; give some text")
    return ids


def encode_completion(tokenizer: PreTrainedTokenizerBase, completion: str) -> list[int]:
    """Token ids of a given chain of thought.

    Raises
    ------
    BeaconScopeError
        When nothing is left of it.
    """
    ids = list(tokenizer(completion, add_special_tokens=False, verbose=False).input_ids)
    if not ids:
        raise BeaconScopeError("the completion has no tokens; give some text")
    return ids


def _in_template(tokenizer: PreTrainedTokenizerBase, prompt: str, system: str | None) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise BeaconScopeError("this model's tokenizer has no chat template; give --raw to feed the prompt as it is")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program that comes with the model
        raise BeaconScopeError(
            f"the model's chat template refuses the prompt ({error}); give --raw, or no --system"
        ) from error
    return str(text)
