"""One rank of a launch: runs the cases of one phase after another, and leaves what became of each as JSON.

A phase of fewer ranks than the launch has is a default process group of the first ones, made for it and destroyed after
it: to start a process takes longer than most phases, so a process lives through many.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from treeckpt._io.comm.comm import TorchComm, default_comm

from .layouts import forget_made
from .registry import Case, Phases, Rank

LIMIT = 300.0
"""Seconds: a rank that waits longer than this for another one waits for ever."""
PHASE_LIMIT = timedelta(seconds=600)
"""How long the ranks that a phase has no use for wait until it ends."""


def run_phases(directory: Path, phases: Phases) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for phase, (world, found) in phases.items():
        done = [f"{phase}/{other}" for other in range(world)]
        if rank < world:
            _run_phase(dist.PrefixStore(phase, store), Rank(rank, world, directory), phase, found)
            store.set(done[rank], "")
        store.wait(done, PHASE_LIMIT)


def _run_phase(store: dist.Store, here: Rank, phase: str, found: Mapping[str, Case]) -> None:
    dist.init_process_group(
        "gloo", store=store, rank=here.rank, world_size=here.world, timeout=timedelta(seconds=LIMIT)
    )
    comm = default_comm()
    assert isinstance(comm, TorchComm) and (comm.rank, comm.size) == (here.rank, here.world)
    comm.timeout = LIMIT
    results: dict[str, str | None] = {}
    for name, case in found.items():
        error = None
        try:
            case(here)
        except BaseException:
            error = f"rank {here.rank} of {here.world}: {traceback.format_exc()}"
        results[name] = error
        (here.directory / f"{phase}.{here.rank}.json").write_text(json.dumps(results))
        dist.barrier()
    dist.barrier()
    forget_made()
    dist.destroy_process_group()
