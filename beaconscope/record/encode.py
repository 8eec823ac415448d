"""From a prompt to the tokens that the model is fed.

The tokenizer is not asked for its warning of a long text: whether it fits is the plan's to say.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def count_unknown(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> tuple[int, int]:
    """How many tokens of texts the tokenizer does not know, and how many tokens there are.

    A tokenizer that can write everything, such as a byte-level one, has no token for what it does not know, or never
    puts it. Where a text itself names that token, it is known.
    """
    unknown = tokenizer.unk_token_id
    # Some name the token that ends or begins a text, which may be put into any.
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        return 0, 0
    ids = [tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in texts]
    named = sum(text.count(str(tokenizer.unk_token)) for text in texts)
    return max(0, sum(each.count(unknown) for each in ids) - named), sum(map(len, ids))


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
