"""Record: drive a model with a cache and write what happens to a trace."""

from beaconscope.record.live_check import Forced, Free, LiveCheck, check_live, check_model
from beaconscope.record.many import record_with_workers
from beaconscope.record.options import RecordOptions, Sampling
from beaconscope.record.prompts import Prompt
from beaconscope.record.record import record, record_prompts

__all__ = [
    "Forced",
    "Free",
    "LiveCheck",
    "Prompt",
    "RecordOptions",
    "Sampling",
    "check_live",
    "check_model",
    "record",
    "record_prompts",
    "record_with_workers",
]
