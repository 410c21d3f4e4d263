"""Writes the golden checkpoints of the format's versions, each once, when the version is new.

`python -m tests.golden.write` refuses to touch one that is there: a golden file is what older programs wrote.
"""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import treeckpt as tc
from tests.golden.content import RANGES, WORLD, ranges_tree, tree
from treeckpt.io.comm import thread_comms

TREES = {1: (tree, WORLD), 2: (ranges_tree, len(RANGES) - 1)}
"""What each version was made for, and the ranks that hold it."""


def main(version: int = max(TREES)) -> None:
    """Writes it."""
    path = Path(__file__).parent / f"version_{version}"
    make, world = TREES[version]
    with concurrent.futures.ThreadPoolExecutor(world) as pool:
        comms = thread_comms(world)
        jobs = [
            pool.submit(tc.save, path, make(c.rank), step=12, comm=c, custom_metadata={"by": "golden"}) for c in comms
        ]
        for job in jobs:
            job.result()


if __name__ == "__main__":
    main()
