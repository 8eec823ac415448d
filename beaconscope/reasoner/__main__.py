"""Problems of the bundled reasoner as JSON Lines, for ``beaconscope record --model tiny-reasoner --prompts``.

``python -m beaconscope.reasoner --size 500 --count 4 > problems.jsonl``
"""

from __future__ import annotations

import argparse
import json
import random

from beaconscope.reasoner.task import SIZES, make_problem, solve


def main() -> None:
    """Print the problems."""
    parser = argparse.ArgumentParser(prog="python -m beaconscope.reasoner", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="250", help="about how many tokens a solution has")
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    for number in range(options.count):
        problem = make_problem(SIZES[options.size], draw)
        row = {"id": f"{options.size}-{number}", "prompt": problem.text, "answer": solve(problem).answer}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
