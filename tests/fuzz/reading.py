"""Ask a trace everything that there is to ask."""

from __future__ import annotations

import json
from pathlib import Path

from beaconscope.cli.ending import ending
from beaconscope.cli.info import _lines, _more
from beaconscope.errors import BeaconScopeError
from beaconscope.trace import Trace, load_trace, summarize
from beaconscope.trace.facts import attention_of, prefill_passes, rotary_of


def read_everything(path: Path) -> Trace:
    """Read all that a trace holds, and say it as ``beaconscope info`` does.

    Raises
    ------
    BeaconScopeError
        Where it does not hold what it should. Anything else that is raised is a fault.
    """
    trace = load_trace(path)
    summary = summarize(trace)
    json.dumps(summary, allow_nan=False)
    assert [f"{name} {value}" for name, value in (*_lines(summary, ending(trace)), *_more(summary))]
    assert len(trace.tokens) == trace.length
    prefill_passes(trace)
    for layer, head in trace.heads:
        attention_of(trace, layer)
        rotary_of(trace, layer)
        assert trace.head(layer, head).query.shape[0] == trace.length
        trace.beacons(layer, head)
        trace.evictions(layer, head)
        trace.hits(layer, head)
        trace.kept(layer, head, trace.length - 1)
    return trace


def refused(path: Path) -> str | None:
    """The line with which a trace is refused, None where it is read."""
    try:
        read_everything(path)
    except BeaconScopeError as error:
        line = str(error)
        assert str(path) in line
        assert len(line) < 2000
        return line
    return None
