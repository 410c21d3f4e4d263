"""One rank of an MPI program, which saves and loads with mpi4py's communicators. Argument: a directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import treeckpt as tc


def main(directory: Path) -> None:
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    for step in (1, 2):
        tc.save(directory / f"{step}", {"own": tc.PerRank(rank), "w": np.arange(5)}, comm=world)
    loaded = tc.load(directory / "2", comm=world)
    pairs = world.Split(rank // 2)
    with tc.Manager(directory / f"pair {rank // 2}", comm=pairs) as manager:
        manager.save(1, {"number": tc.PerRank(pairs.Get_rank())})
    tc.save(directory / f"alone {rank}", {"rank": rank}, comm=MPI.COMM_SELF)
    own, worlds = loaded["own"].value, [tc.inspect(directory / name).world for name in ("2", "pair 0/step_00000001")]
    print(f"rank {rank} of {size}: {own} {worlds}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
