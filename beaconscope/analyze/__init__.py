"""Find what a chain of thought goes back to: revisits, their targets, the heads that look, and clusters of queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from beaconscope.analyze.analysis import SCHEMA_VERSION, Analysis
from beaconscope.analyze.compare import Comparison, compare
from beaconscope.analyze.options import AnalyzeOptions
from beaconscope.analyze.run import analyze

if TYPE_CHECKING:
    from beaconscope.analyze.causal import add_causal as add_causal

__all__ = ["SCHEMA_VERSION", "Analysis", "AnalyzeOptions", "Comparison", "add_causal", "analyze", "compare"]


def __getattr__(name: str) -> Any:
    # The only part that needs a model, and transformers with it.
    if name == "add_causal":
        from beaconscope.analyze.causal import add_causal

        return add_causal
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
