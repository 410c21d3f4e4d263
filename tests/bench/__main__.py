"""Runs a benchmark: `python -m tests.bench speed|scale [OPTIONS]`; speed and scale without a name."""

import sys

from tests.bench import speed
from tests.bench.scale import report

BENCHMARKS = {"speed": speed.main, "scale": report.main}


def main(arguments: list[str]) -> int:
    """Runs the named benchmark with the arguments that follow; all of them without a name."""
    if arguments:
        return BENCHMARKS[arguments[0]](arguments[1:]) or 0
    return max(benchmark([]) or 0 for benchmark in BENCHMARKS.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
