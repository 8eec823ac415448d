"""The bundled tiny reasoning model: a task whose truth is known, and a model trained on it."""

from beaconscope.reasoner.labels import Agreement, agreement, label, truth
from beaconscope.reasoner.task import (
    MODEL_FOLDER,
    SIZES,
    Problem,
    Recall,
    Size,
    Solution,
    check_size,
    make_problem,
    read_problem,
    solve,
)

__all__ = [
    "MODEL_FOLDER",
    "SIZES",
    "Agreement",
    "Problem",
    "Recall",
    "Size",
    "Solution",
    "agreement",
    "check_size",
    "label",
    "make_problem",
    "read_problem",
    "solve",
    "truth",
]
