"""Memory of a recording does not grow with its trace."""

from __future__ import annotations

import json

import pytest

SCRIPT = """
import json, resource, sys
from pathlib import Path
from beaconscope import BeaconKV, RecordOptions, record
from tests.record.recording import PROMPT, endless_tokenizer
from tests.tiny import tiny_model

model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=10_000)
peaks, sizes = [], []
for tokens in (1_000, 8_000):
    options = RecordOptions(
        policy=BeaconKV(budget=64, interval=64), raw=True, layers="all", max_new_tokens=tokens, hits=4
    )
    path = Path(f"{tokens}.parquet")
    record(model, endless_tokenizer(), PROMPT, options, output=path)
    sizes.append(path.stat().st_size)
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
