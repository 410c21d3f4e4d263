"""One rank of a launch: runs the cases of a phase in order, and leaves what became of each as JSON.

python -m torch.distributed.run --standalone --nproc-per-node 4 -m tests.multirank.worker PHASE DIRECTORY
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from treeckpt.io.comm import TorchComm, default_comm

from . import cases

LIMIT = 20.0
"""Seconds: a rank that waits longer than this for another one waits for ever."""
SLOW_LIMIT = 120.0
"""The same where a case loads hundreds of checkpoints, and ranks may drift apart."""


def main(phase: str, directory: Path, found: Mapping[str, cases.Case] | None = None) -> int:
    torch.set_num_threads(1)
    limit = SLOW_LIMIT if phase in cases.WHOLE else LIMIT
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
    rank, world = dist.get_rank(), dist.get_world_size()
    comm = default_comm()
    assert isinstance(comm, TorchComm)
    comm.timeout = limit
    results: dict[str, str | None] = {}
    for name, case in (cases.of(phase) if found is None else found).items():
        error = None
        try:
            case(cases.Rank(rank, world, directory))
        except BaseException:
            error = f"rank {rank} of {world}: {traceback.format_exc()}"
        results[name] = error
        (directory / f"{phase}.{rank}.json").write_text(json.dumps(results))
        dist.barrier()
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
