"""What the tokens of a model are: special ones, those that end a text, and the kind of each."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from beaconscope.kv.kinds import token_kinds
from beaconscope.models import token_bytes


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of the tokens that stand for no text of their own."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def kinds_of_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The kind of every token of the model's vocabulary, uint8 [V]."""
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    size = embeddings.shape[0]
    special = {index for index in special_ids(tokenizer) if index < size}
    return token_kinds(token_bytes(tokenizer, range(size)), special)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a text: the model's own and the tokenizer's."""
    of_model = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = of_model if isinstance(of_model, list) else [of_model]
    return frozenset(int(end) for end in [*ends, tokenizer.eos_token_id] if end is not None)
