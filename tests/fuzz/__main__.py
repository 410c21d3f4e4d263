"""Fuzzes the decoders: python -m tests.fuzz [--seconds N] [TARGET ...]

With atheris (`pip install 'treeckpt[fuzz]'`; it has wheels for some Pythons on Linux) coverage leads the way; without
it random bytes choose what Hypothesis makes of them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.fuzz")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*")
    options = parser.parse_args()
    guided = importlib.util.find_spec("atheris") is not None
    if options.inside:
        (name,) = options.targets
        return _guided(name, options.seconds) if guided else _random(name, options.seconds)
    names = options.targets or importlib.import_module("tests.fuzz.targets").TARGETS
    print(f"fuzzing {len(names)} targets for {options.seconds} s each, {'with' if guided else 'without'} atheris")
    failed = [name for name in names if _apart(name, options.seconds)]
    print(f"failed: {', '.join(failed)}" if failed else "nothing but errors of ours came out")
    return 1 if failed else 0


def _apart(name: str, seconds: int) -> int:
    """One target in a process of its own: atheris ends it."""
    command = [sys.executable, "-m", "tests.fuzz", "--inside", "--seconds", str(seconds), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"  {name}: {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
    return done.returncode


def _random(name: str, seconds: int) -> int:
    one = importlib.import_module("tests.fuzz.targets").TARGETS[name].hypothesis.fuzz_one_input
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        one(os.urandom(2048))
        count += 1
    print(f"{count} inputs")
    return 0


def _guided(name: str, seconds: int) -> int:
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["treeckpt"]):
        targets = importlib.import_module("tests.fuzz.targets").TARGETS
    one = targets[name].hypothesis.fuzz_one_input
    atheris.Setup(
        ["fuzz", f"-max_total_time={seconds}", "-max_len=4096", "-verbosity=0"], lambda data: one(data) and None
    )
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
