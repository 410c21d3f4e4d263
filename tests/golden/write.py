"""Writes the golden checkpoint of the present format version, once, when the version is new.

`python -m tests.golden.write` refuses to touch one that is there: a golden file is what older programs wrote.
"""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import treeckpt as tc
from tests.golden.content import WORLD, tree
from treeckpt.core.index import VERSION
from treeckpt.io.comm import thread_comms


def main() -> None:
    """Writes it."""
    path = Path(__file__).parent / f"version_{VERSION}"
    with concurrent.futures.ThreadPoolExecutor(WORLD) as pool:
        comms = thread_comms(WORLD)
        jobs = [
            pool.submit(tc.save, path, tree(c.rank), step=12, comm=c, custom_metadata={"by": "golden"}) for c in comms
        ]
        for job in jobs:
            job.result()


if __name__ == "__main__":
    main()
