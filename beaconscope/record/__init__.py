"""Record: drive a model with a cache and write what happens to a trace."""

from beaconscope.record.many import record_with_workers
from beaconscope.record.options import RecordOptions, Sampling
from beaconscope.record.prompts import Prompt
from beaconscope.record.record import record, record_prompts

__all__ = ["Prompt", "RecordOptions", "Sampling", "record", "record_prompts", "record_with_workers"]
