"""Runs a benchmark of what needs no disk: `python -m tests.bench scale [--json FILE] [--plot FILE] [--most RANKS]`."""

import sys

from tests.bench.scale import report

BENCHMARKS = {"scale": report.main}


def main(arguments: list[str]) -> None:
    """Runs the named benchmark with the arguments that follow; all of them without a name."""
    if arguments:
        BENCHMARKS[arguments[0]](arguments[1:])
    for benchmark in () if arguments else BENCHMARKS.values():
        benchmark([])


if __name__ == "__main__":
    main(sys.argv[1:])
