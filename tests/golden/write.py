"""Writes the golden checkpoints of the format, each once, when it is new.

`python -m tests.golden.write` refuses to touch those that are there: a golden file is what older programs wrote.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import Any

import treeckpt as tc
from tests.golden.content import RANGES, WORLD, blob_tree, ranges_tree, sharing_tree, table_tree, tree
from treeckpt._core.format import index
from treeckpt._io.comm.comm import thread_comms
from treeckpt._loading.flatten import flatten_store
from treeckpt.policy import parse_keep

TREES: dict[str, tuple[Callable[[int], Any], int]] = {
    "version_1": (tree, WORLD),
    "version_1_tables": (table_tree, WORLD),
    "version_1_blobs": (blob_tree, WORLD),
    "version_1_ranges": (ranges_tree, len(RANGES) - 1),
}
"""What each was made of, and by how many ranks."""
RUN = "version_1_run"
"""A run that was restored from its first step after it had saved the second one."""
KEEP = "last:2 every:10 best:loss:min:1"
SHARING = "version_2_run"
"""A run whose second step shares a file of the first one; the third one did, and was flattened."""


def main() -> None:
    """Writes what is not there.

    Raises:
        CheckpointExists: all of them are.
    """
    place = Path(__file__).parent
    if not (place / SHARING).exists():
        write_sharing(place / SHARING)
        return
    if not (place / RUN).exists():
        _write_run(place / RUN)
        return
    missing = [name for name in TREES if not (place / name / "index.json").exists()]
    for name in missing or TREES:
        make, world = TREES[name]
        index.MAX_PLAIN_NBYTES = 0 if name == "version_1_ranges" else 256 << 10  # its ranges are few
        _write(place / name, make, world)


def _write(path: Path, make: Callable[[int], Any], world: int) -> None:
    with concurrent.futures.ThreadPoolExecutor(world) as pool:
        comms = thread_comms(world)
        jobs = [
            pool.submit(tc.save, path, make(c.rank), step=12, comm=c, custom_metadata={"by": "golden"}) for c in comms
        ]
        for job in jobs:
            job.result()


def _write_run(run: Path) -> None:
    with tc.Manager(run, keep=parse_keep(KEEP), background=False) as manager:
        for step in (10, 20):
            manager.save(step, {"step": step}, metrics={"loss": 1 / step})
    with tc.Manager(run, keep=parse_keep(KEEP), background=False) as manager:
        manager.restore(step=10)
        manager.save(15, {"step": 15}, metrics={"loss": 0.01})
        manager.save("tuned", {"step": 16})


def write_sharing(run: Path) -> None:
    """Writes the run that `SHARING` is."""
    with tc.Manager(run, keep=None, incremental=True, background=False) as manager:
        for step in (10, 20, 30):
            manager.save(step, sharing_tree(step))
    flatten_store(tc.LocalStore(run / "step_00000030"))


if __name__ == "__main__":
    main()
