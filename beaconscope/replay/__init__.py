"""Replay: what another budget, number of beacons or method would have kept of a trace."""

from beaconscope.replay.grid import (
    complete_lists,
    default_lists,
    expand,
    label,
    read_grid,
    split_policies,
    with_controls,
)
from beaconscope.replay.layer import LayerData, load_layer
from beaconscope.replay.measure import HeadMeasures, MeasureOptions, measure_head
from beaconscope.replay.simulate import simulate
from beaconscope.replay.summary import Answer, Difference, answer, best_few, by_setting, compare, to_dict
from beaconscope.replay.sweep import Found, Job, Parts, make_jobs, run_job, sweep

__all__ = [
    "Answer",
    "Difference",
    "Found",
    "HeadMeasures",
    "Job",
    "LayerData",
    "MeasureOptions",
    "Parts",
    "answer",
    "best_few",
    "by_setting",
    "compare",
    "complete_lists",
    "default_lists",
    "expand",
    "label",
    "load_layer",
    "make_jobs",
    "measure_head",
    "read_grid",
    "run_job",
    "simulate",
    "split_policies",
    "sweep",
    "to_dict",
    "with_controls",
]
