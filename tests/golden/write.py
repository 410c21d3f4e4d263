"""Writes the golden checkpoints of the present format version, once, when the version is new: a tree, and tables.

`python -m tests.golden.write` refuses to touch those that are there: a golden file is what older programs wrote.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import Any

import treeckpt as tc
from tests.golden.content import WORLD, table_tree, tree
from treeckpt.core.index import VERSION
from treeckpt.io.comm import thread_comms


def main() -> None:
    """Writes what is not there.

    Raises:
        CheckpointExists: all of them are.
    """
    place = Path(__file__).parent
    todo = {place / f"version_{VERSION}": tree, place / f"version_{VERSION}_tables": table_tree}
    missing = {path: make for path, make in todo.items() if not (path / "index.json").exists()}
    for path, make in (missing or todo).items():
        _write(path, make)


def _write(path: Path, make: Callable[[int], Any]) -> None:
    with concurrent.futures.ThreadPoolExecutor(WORLD) as pool:
        comms = thread_comms(WORLD)
        jobs = [
            pool.submit(tc.save, path, make(c.rank), step=12, comm=c, custom_metadata={"by": "golden"}) for c in comms
        ]
        for job in jobs:
            job.result()


if __name__ == "__main__":
    main()
