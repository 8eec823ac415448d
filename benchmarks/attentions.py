"""Recording against what people do today: ``generate(output_attentions=True)`` with eager attention.

    python benchmarks/attentions.py              # 1 K and 2 K tokens, 5 rounds; some twenty minutes
    python benchmarks/attentions.py --tokens 4096 --large-blocks-back
    python benchmarks/attentions.py --quick      # 96 tokens, to keep the script alive

A model with random weights (4 layers, hidden 640, 8 query heads on 2 KV heads of 128) writes as many tokens after a
prompt of 32, in four ways that take turns, each in a process of its own:

- *output_attentions*: transformers' ``generate``, which keeps every weight of every step in memory. Nothing is written.
- *recorded, full*: ``record`` with ``--cache full`` and all layers: nothing is evicted, the same attention.
- *recorded, beacon*: ``record`` with BeaconKV, a budget of a sixteenth of the length, and all layers.
- *unrecorded*: transformers' ``generate`` with sdpa attention, for comparison.

Seconds are those of the whole call, the finished file included; memory is the process's highest resident size less that
before the call. Medians over the rounds.

glibc keeps the keys and values, which ``generate`` copies to a larger block at every step, in a heap that the weights
kept between them tear to pieces. That is what *output_attentions* costs as things are: 1.5 GB at 1 K tokens, and at 4 K
over 22 GB. With ``--large-blocks-back`` the allocator gives blocks over 128 KB back, so that what is left is what is
needed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

import beaconscope
from benchmarks.memory import peak_bytes
from tests.tiny import VOCABULARY, tiny_tokenizer

WAYS = ("output_attentions", "recorded, full", "recorded, beacon", "unrecorded")
PROMPT = "Plan a garden in five steps now."


def make_model(attention: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=640, intermediate_size=2432, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=128, vocab_size=VOCABULARY, max_position_embeddings=65536, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    config._attn_implementation = attention
    return Qwen3ForCausalLM(config).eval()


def generate(model: Qwen3ForCausalLM, tokens: int, *, attentions: bool) -> Any:
    ids = torch.tensor([list(PROMPT.encode())])
    return model.generate(
        ids, max_new_tokens=tokens, do_sample=False, output_attentions=attentions, return_dict_in_generate=True
    )


def record(model: Qwen3ForCausalLM, tokens: int, policy: Any) -> Any:
    options = beaconscope.RecordOptions(policy=policy, max_new_tokens=tokens, layers="all", raw=True)
    with tempfile.TemporaryDirectory() as folder:
        return beaconscope.record(model, tiny_tokenizer(), PROMPT, options, output=Path(folder) / "trace.parquet")


def run(way: str, tokens: int) -> tuple[float, int]:
    """Seconds, and bytes by which this process grew at most."""
    model = make_model("eager" if way == "output_attentions" else "sdpa")
    generate(model, 4, attentions=False)
    before = peak_bytes()
    begin = time.perf_counter()
    if way.startswith("recorded"):
        full = way.endswith("full")
        beacon = beaconscope.BeaconKV(budget=max(64, tokens // 16), interval=128)
        kept = record(model, tokens, beaconscope.Full() if full else beacon)
    else:
        kept = generate(model, tokens, attentions=way == "output_attentions")
    took = time.perf_counter() - begin
    assert kept is not None
    return took, peak_bytes() - before


def run_apart(way: str, tokens: int, threads: int, large_back: bool) -> tuple[float, int]:
    command = [sys.executable, __file__, "--run", way, str(tokens), "--threads", str(threads)]
    environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": str(1 << 17)} if large_back else {})}
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()
    return float(said[-2]), int(said[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tokens", default="1024,2048")
    parser.add_argument("--large-blocks-back", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.run:
        print(*run(args.run[0], int(args.run[1])))
        return
    if args.quick:
        args.tokens, args.rounds = "96", 1
    figures: dict[str, Any] = {
        "threads": args.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_before": os.getloadavg()[0],
        "rows": [],
    }
    print("| tokens | way | seconds | times ours, full | memory, MB | times ours, full |")
    print("|---|---|---|---|---|---|")
    for tokens in map(int, args.tokens.split(",")):
        found: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
        for turn in range(args.rounds):
            for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
                found[way].append(run_apart(way, tokens, args.threads, args.large_blocks_back))
        ours = found["recorded, full"]
        for way in WAYS:
            seconds, grown = (statistics.median(part) for part in zip(*found[way], strict=True))
            slower, larger = (
                statistics.median(each[n] / own[n] for each, own in zip(found[way], ours, strict=True)) for n in (0, 1)
            )
            figures["rows"].append({"tokens": tokens, "way": way, "runs": found[way]})
            print(f"| {tokens} | {way} | {seconds:.1f} | {slower:.2f} | {grown / 1e6:.0f} | {larger:.1f} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
