"""Ranks that save and load over Stores, in processes of their own without a process group of torch.distributed.

Arguments: size, a directory, and parts of the test, "first" or "again", that follow each other. Each rank is forked, so
that torch is imported once; what it has found is in a file `PART.RANK` of the directory, a line each. Prints the exit
codes of each part, as a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist

import treeckpt as tc
from tests.helpers.world import Patient


def run_rank(rank: int, size: int, directory: Path, part: str) -> None:
    files = dist.FileStore(str(directory / "store"), size)
    whole = np.arange(12.0).reshape(6, 2)
    rows = slice(6 * rank // size, 6 * (rank + 1) // size)
    tree = {"w": tc.Sharded(whole[rows], (6, 2), (rows.start, 0)), "own": tc.PerRank(rank), "step": 1}
    report = tc.save(directory / "file", tree, comm=(rank, size, files), overwrite=True)
    print(part, report.nbytes, tc.inspect(directory / "file").world)
    if part == "again":
        return
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        files.set("port", str(server.port))
    port = int(files.get("port"))
    store = server if rank == 0 else dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    comm = tc.comm(dist.PrefixStore("a", store), rank, size)
    with tc.Manager(directory / "run", keep=2, comm=comm) as manager:
        for step in (1, 2, 3):
            manager.save(step, tree, metrics={"loss": 1.0})
    with tc.Manager(directory / "run", comm=comm) as manager:
        restored = manager.restore()
        print("run", manager.steps(), restored["own"].value, restored["w"].sum())
    try:
        tc.load(directory / "run" / "step_00000003", comm=comm, read=tc.ReadOptions(once=True))
    except tc.CheckpointError as error:
        print("once", error)
    comm = tc.comm(dist.PrefixStore("b", store), rank, size)
    tc.save(directory / "before", tree, comm=comm)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        tc.save(directory / "killed", tree, comm=Patient(comm, 1, timeout=3))
    except tc.RankError as error:
        print("killed", sorted(error.ranks), error)


def forked(rank: int, size: int, directory: Path, part: str) -> int:
    if pid := os.fork():
        return pid
    sys.stdout, code = (directory / f"{part}.{rank}").open("w", buffering=1), 1
    try:
        run_rank(rank, size, directory, part)
        code = 0
    finally:
        os._exit(code)


def main(size: int, directory: Path, parts: list[str]) -> None:
    for part in parts:
        ranks = [forked(rank, size, directory, part) for rank in range(size)]
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
