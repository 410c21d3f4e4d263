"""Runs the benchmarks and prints their tables: `python -m tests.bench [name ...]`."""

import sys

from tests.bench import planning

BENCHMARKS = {"planning": planning.main}


def main(names: list[str]) -> None:
    """Runs the named benchmarks, all of them without a name."""
    for name in names or BENCHMARKS:
        BENCHMARKS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
