"""Models: load one, tap its attention, undo its rotary embedding."""

from beaconscope.models.compat import cache_argument
from beaconscope.models.load import LoadedModel, LoadOptions, is_bundled, load_model, load_tokenizer, local_path
from beaconscope.models.probe import LayerInfo
from beaconscope.models.tap import TappedModel, tap
from beaconscope.models.tokens import token_bytes

__all__ = [
    "LayerInfo",
    "LoadOptions",
    "LoadedModel",
    "TappedModel",
    "cache_argument",
    "is_bundled",
    "load_model",
    "load_tokenizer",
    "local_path",
    "tap",
    "token_bytes",
]
