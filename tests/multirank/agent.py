"""torchrun's agent: it imports torch and the cases once and forks the ranks; to import them in each rank takes longer.

python -m tests.multirank.agent CASES DIRECTORY PHASE...

CASES is the module whose phases the ranks run.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import sys
import uuid
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch._dynamo  # noqa: F401  an optimizer or DTensor imports it first of all: in each rank, if not here
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .registry import Phases
from .worker import LIMIT, run_phases


def main(cases: str, directory: str, *chosen: str) -> None:
    module = importlib.import_module(cases)
    known: Phases = module.PHASES | getattr(module, "WHOLE", {})
    phases = {name: known[name] for name in chosen}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=max(world for world, _ in phases.values()),
        run_id=str(uuid.uuid4()),
        rdzv_endpoint="localhost:0",
        rdzv_backend="c10d",
        max_restarts=0,
        start_method="fork",
    )
    # the agent's store looks up the name of each rank that connects, and a rank that is forked meanwhile inherits
    # glibc's lock of the resolver, held
    started = multiprocessing.get_context("fork").Barrier(config.nproc_per_node)
    gc.freeze()  # so that no rank's collector looks at, and thereby copies, what all share
    elastic_launch(config, _run_rank)(Path(directory), phases, started)


def _run_rank(directory: Path, phases: Phases, started: Barrier) -> None:
    started.wait(LIMIT)
    run_phases(directory, phases)
    atexit._run_exitfuncs()  # an interpreter that ends calls them, a forked process does not


if __name__ == "__main__":
    main(*sys.argv[1:])
