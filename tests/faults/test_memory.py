"""Memory of a recording does not grow with its trace."""

from __future__ import annotations

import json

import pytest

SCRIPT = """
import functools, json, resource
from pathlib import Path
from beaconscope import BeaconKV, RecordOptions, record
from beaconscope.trace import Journal, raw_bytes
from tests.record.recording import PROMPT, endless_tokenizer
from tests.tiny import tiny_model

# What waits for the disk is bounded; a bound that is small beside the trace is one that can be seen.
Journal.create = functools.partial(Journal.create, queue_bytes=1 << 20)
model = tiny_model(
    "llama",
    num_hidden_layers=1,
    hidden_size=64,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=10_000,
)
policy = BeaconKV(budget=64, interval=64)
peaks, sizes = [], []
for tokens in (1_000, 8_000):
    # Fed, not drawn, which is faster and takes the same way to the disk.
    options = RecordOptions(policy=policy, raw=True, layers="all", completion="0123456789" * (tokens // 10))
    trace = record(model, endless_tokenizer(), PROMPT, options, output=Path(f"{tokens}.parquet"))
    sizes.append(raw_bytes(trace.layout, trace.length))
    # In KiB, of the whole life of the process; the longer one comes second.
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(json.dumps([peaks, sizes]))
"""


@pytest.mark.slow
def test_eight_times_the_tokens_take_no_more_memory(start, tmp_path):
    out, err = start(script=SCRIPT, cwd=tmp_path).communicate(timeout=280)
    assert not err, err
    (short, long), (small, large) = json.loads(out)
    assert large > 7 * small
    assert long - short < 0.3 * (large - small)
