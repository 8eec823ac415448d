"""What differs between the versions of transformers that are supported."""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str:
    """Name under which a model takes its cache: ``past_key_values`` in transformers 5.2, ``cache`` in later ones."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
