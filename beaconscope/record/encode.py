"""From a prompt to the tokens that the model is fed.

The tokenizer is not asked for its warning of a long text: whether it fits is the plan's to say.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import jinja2
from jinja2 import meta
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerBase

from beaconscope.errors import BeaconScopeError, UsageError
from beaconscope.record.options import RecordOptions, check_unicode
from beaconscope.record.prompts import Prompt


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, options: RecordOptions) -> list[int]:
    """Token ids of a prompt, in the model's chat template unless ``options.raw``.

    Raises
    ------
    BeaconScopeError
        When the tokenizer has no chat template, the template refuses, or nothing is left of the prompt.
    UsageError
        For a template option that the template does not use.
    """
    check_unicode(prompt, "prompt")
    if options.raw:
        ids = list(tokenizer(prompt, verbose=False).input_ids)
    else:
        text = _in_template(tokenizer, prompt, options)
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
    check_unicode(completion, "completion")
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


def check_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], options: RecordOptions, *, many: bool = True
) -> None:
    """Refuse prompts and completions that cannot be encoded; needs no model, so it can run before one is loaded.

    Parameters
    ----------
    tokenizer, prompts, options
        Of the recording.
    many
        Whether the message names the prompt.

    Raises
    ------
    BeaconScopeError
        As :func:`encode_prompt` and :func:`encode_completion`.
    """
    if not options.raw:
        check_template(tokenizer, options)
    for prompt in prompts:
        try:
            encode_prompt(tokenizer, prompt.prompt, options)
            if prompt.completion is not None:
                encode_completion(tokenizer, prompt.completion)
        except BeaconScopeError as error:
            if not many:
                raise
            raise type(error)(f"prompt {prompt.id}: {error}") from error


def check_template(tokenizer: PreTrainedTokenizerBase, options: RecordOptions) -> None:
    """Refuse a tokenizer without a chat template, and options that its template does not use.

    Raises
    ------
    BeaconScopeError
        When there is no template, or none that jinja can read.
    UsageError
        For the first option that is not the template's, with those that are.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise BeaconScopeError("this model's tokenizer has no chat template; give --raw to feed the prompt as it is")
    if not options.template_options:
        return
    known = template_variables(tokenizer, tools="tools" in options.template_options)
    for name in options.template_options:
        if name not in known:
            own = ", ".join(known)
            remedy = f"give one of its own: {own}" if own else "it has none, leave out --template-option"
            raise UsageError(f"this model's chat template does not use the option {name}; {remedy}")


def template_variables(tokenizer: PreTrainedTokenizerBase, *, tools: bool = False) -> list[str]:
    """Names of the variables of a chat template that a caller may set, sorted.

    Parameters
    ----------
    tokenizer
        With a chat template.
    tools
        Of the template for tools, where the tokenizer has one of its own for them.

    Raises
    ------
    BeaconScopeError
        When jinja cannot read the template.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    try:
        template = tokenizer.get_chat_template(tools=[] if tools else None)
        found = meta.find_undeclared_variables(environment.parse(template))
    except (ValueError, RecursionError, jinja2.TemplateError) as error:
        raise BeaconScopeError(f"this model's chat template cannot be read ({_one_line(error)}); give --raw") from error
    # The others are set by transformers, or are arguments of its own that do not reach the template.
    arguments = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"tools", "documents"}
    special = {*tokenizer.SPECIAL_TOKENS_ATTRIBUTES, *tokenizer.special_tokens_map}
    return sorted(found - arguments - special - _SET_BY_TRANSFORMERS)


_SET_BY_TRANSFORMERS = {"messages", "raise_exception", "strftime_now"}


class _GenerationTag(Extension):
    """The tag with which templates mark what the assistant wrote; transformers adds it to jinja."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        """Return what is between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _in_template(tokenizer: PreTrainedTokenizerBase, prompt: str, options: RecordOptions) -> str:
    """The text that the model is fed: the system message and the prompt in the chat template."""
    check_template(tokenizer, options)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    user = {"role": "user", "content": prompt}
    text = _render(tokenizer, [*system, user], options)
    if system and text == _render(tokenizer, [user], options):
        raise UsageError("this model's chat template ignores the system message; leave out --system")
    # Templates for images and text may read content only as a list of parts.
    if text == _render(tokenizer, [*system, {**user, "content": f"{prompt} and more"}], options):
        raise BeaconScopeError("this model's chat template leaves out the prompt; give --raw to feed it as it is")
    return text


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], options: RecordOptions) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **options.template_options
        )
    except Exception as error:  # a template is a program that comes with the model
        given = {"--system": options.system is not None, "--template-option": bool(options.template_options)}
        remedy = "".join(f", or leave out {flag}" for flag, there in given.items() if there)
        raise BeaconScopeError(
            f"the model's chat template refuses the prompt ({_one_line(error)}); give --raw{remedy}"
        ) from error
    return str(text)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
