"""What recording costs: time against the same generation unrecorded, and bytes against the raw vectors.

    python benchmarks/recording.py              # SmolLM2, 512 tokens, 5 alternating pairs
    python benchmarks/recording.py --quick      # a tiny random-weight model, to keep the script alive

Each pair generates the same tokens twice with the same BeaconKV cache in one process, once recorded and once not; which
goes first alternates. The ratio is the median over pairs of recorded to unrecorded decoding time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import beaconscope
from beaconscope.kv import CompressedCache
from beaconscope.models import tap
from beaconscope.record.decoding import Decoding
from beaconscope.record.encode import encode_prompt
from beaconscope.record.generate import Generation
from beaconscope.trace import vector_bytes
from benchmarks import smollm2

QUICK_PROMPT = "Plan a garden in five steps."
PROMPT = (
    "You are planning a small vegetable garden. First write a numbered plan of five steps. Then work through every "
    "step in detail, and say at each point which step of the plan it belongs to."
)


def unrecorded(model: object, ids: list[int], options: beaconscope.RecordOptions) -> float:
    """Seconds of decoding with the cache alone."""
    cache = CompressedCache(tap(model), options.policy)
    generation = Generation(model, cache, [ids], Decoding(), [options.max_new_tokens], frozenset())
    with torch.inference_mode():
        generation.prefill(None)
        started = time.perf_counter()
        generation.run(lambda: False)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--layers", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16"])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    if args.quick:
        from tests.tiny import tiny_model, tiny_tokenizer

        model, tokenizer, args.tokens, args.pairs = tiny_model("llama"), tiny_tokenizer(), 64, 2
    else:
        loaded = beaconscope.load_model(beaconscope.LoadOptions(str(smollm2.fetch()), dtype=args.dtype, device="cpu"))
        model, tokenizer = loaded.model, loaded.tokenizer
    # Nothing ends a text here: both of a pair write the same number of tokens.
    model.generation_config.eos_token_id = None
    tokenizer.eos_token_id = None
    options = beaconscope.RecordOptions(
        policy=beaconscope.BeaconKV(budget=256 if not args.quick else 32, interval=128 if not args.quick else 8),
        max_new_tokens=args.tokens,
        layers=args.layers,
    )
    prompt = QUICK_PROMPT if args.quick else PROMPT
    ids = encode_prompt(tokenizer, prompt, options)
    plain, recorded = [], []
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "trace.parquet"
        for pair in range(args.pairs + 1):
            for turn in ("plain", "recorded") if pair % 2 else ("recorded", "plain"):
                if turn == "plain":
                    plain.append(unrecorded(model, ids, options))
                else:
                    trace = beaconscope.record(model, tokenizer, prompt, options, output=output, force=True)
                    recorded.append(trace.metadata["timings"]["decode_seconds"])
        size, raw = output.stat().st_size, vector_bytes(trace.layout, trace.length)
    # The first pair warms up.
    ratios = [with_ / without for with_, without in zip(recorded[1:], plain[1:], strict=True)]
    figures = {
        "tokens": args.tokens,
        "layers": list(trace.layers),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "seconds_unrecorded": statistics.median(plain[1:]),
        "seconds_recorded": statistics.median(recorded[1:]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "trace_bytes": size,
        "raw_vector_bytes": raw,
        "bytes_ratio": size / raw,
    }
    print(f"decoding {args.tokens} tokens: {figures['seconds_unrecorded']:.2f} s unrecorded, ", end="")
    print(f"{figures['seconds_recorded']:.2f} s recorded, ratio {figures['ratio']:.3f} ", end="")
    print(f"(pairs {min(ratios):.3f} to {max(ratios):.3f})")
    print(f"trace {size:,} bytes, {size / raw:.3f} of the {raw:,} raw bytes of its vectors")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
