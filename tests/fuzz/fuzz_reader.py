"""Fuzz the trace reader for a while: ``python -m tests.fuzz.fuzz_reader --minutes 30``.

With atheris installed the strings that `changing` reads are found by coverage of `beaconscope`; without it they are
drawn. Work is done in a child process, which is started again when it dies; what it died of, or what was raised in it
that is no BeaconScopeError, is kept in the folder of findings with the string that made it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

LONGEST = 96
"""Bytes of a script."""
MOST_SECONDS = 10
"""For one file; more is a hang."""
MOST_MEGABYTES = 3000
"""Of the process; more is a bomb."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.findings.mkdir(exist_ok=True)
    if given.child:
        _work(given.findings, given.minutes * 60, given.seed)
        return
    end = time.monotonic() + given.minutes * 60
    deaths = 0
    while (left := end - time.monotonic()) > 5:
        child = [sys.executable, "-m", "tests.fuzz.fuzz_reader", "--child", "--minutes", str(left / 60)]
        child += ["--findings", str(given.findings), "--seed", str(given.seed + deaths)]
        with (given.findings / "log.txt").open("a") as log:
            code = subprocess.run(child, check=False, stdout=log, stderr=log).returncode
        if time.monotonic() < end - 5:
            deaths += 1
            died = given.findings / f"died-{deaths}"
            died.write_bytes((given.findings / "current").read_bytes())
            print(f"the child died ({code}); see {died}", flush=True)
    executed = sum(json.loads(path.read_text())["executed"] for path in given.findings.glob("count-*.json"))
    refused = sum(json.loads(path.read_text())["refused"] for path in given.findings.glob("count-*.json"))
    faults = len(list(given.findings.glob("fault-*.txt")))
    print(f"{executed} files, {refused} refused in a line, {faults} kinds of fault, {deaths} deaths of the process")


class _Target:
    """Reads the file that a script makes, and keeps what goes wrong."""

    def __init__(self, findings: Path) -> None:
        from beaconscope.errors import BeaconScopeError
        from tests.fuzz.changing import make_seeds

        self._expected = BeaconScopeError
        self._findings = findings
        folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self._seeds = make_seeds(folder)
        self._path = folder / "t.parquet"
        self._counted = {"executed": 0, "refused": 0}
        self._said = time.monotonic()

    def __call__(self, script: bytes) -> None:
        from tests.fuzz.changing import changed
        from tests.fuzz.reading import refused

        (self._findings / "current").write_bytes(script)
        try:
            self._path.write_bytes(changed(self._seeds, script))
            began = time.monotonic()
            self._counted["refused"] += refused(self._path) is not None
            if time.monotonic() - began > MOST_SECONDS:
                raise TimeoutError(f"{time.monotonic() - began:.0f} s")
        except Exception as error:  # anything is a finding
            where = traceback.extract_tb(error.__traceback__)[-1]
            name = hashlib.sha256(f"{type(error).__name__}{where.filename}{where.lineno}".encode()).hexdigest()[:12]
            path = self._findings / f"fault-{name}.txt"
            if not path.exists():
                path.write_text(f"{script.hex()}\n{traceback.format_exc()}")
        self._counted["executed"] += 1
        if time.monotonic() - self._said > 2 or self._counted["executed"] == 1:
            self._said = time.monotonic()
            (self._findings / f"count-{os.getpid()}.json").write_text(json.dumps(self._counted))


def _work(findings: Path, seconds: float, seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        import atheris
    except ImportError:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEGABYTES << 20,) * 2)
        target = _Target(findings)
        draw = random.Random(seed)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            target(draw.randbytes(draw.randrange(LONGEST)))
        return
    with atheris.instrument_imports(include=["beaconscope"]):
        import beaconscope.trace.facts  # noqa: F401
    corpus = findings / "corpus"
    corpus.mkdir(exist_ok=True)
    options = [
        f"-max_total_time={seconds:.0f}", f"-max_len={LONGEST}", f"-timeout={MOST_SECONDS}", f"-seed={seed + 1}",
        f"-rss_limit_mb={MOST_MEGABYTES}", "-len_control=0", f"-artifact_prefix={findings}/", "-verbosity=1",
        str(corpus),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options], _Target(findings))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
