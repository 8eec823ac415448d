"""Find what a chain of thought goes back to: revisits, their targets, the heads that look, and clusters of queries."""

from beaconscope.analyze.analysis import SCHEMA_VERSION, Analysis
from beaconscope.analyze.compare import Comparison, compare
from beaconscope.analyze.options import AnalyzeOptions
from beaconscope.analyze.run import analyze

__all__ = ["SCHEMA_VERSION", "Analysis", "AnalyzeOptions", "Comparison", "analyze", "compare"]
