"""torchrun's agent: it imports torch and the cases once and forks the ranks; to import them in each rank takes longer.

python -m tests.multirank.agent CASES DIRECTORY PHASE...

CASES is the module whose phases the ranks run. Its `enter(rank, world, directory)`, where it has one, is the first that
each rank calls.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from treeckpt.demo.fork_ranks import fork_ranks

from .registry import Phases
from .worker import run_phases


def main(cases: str, directory: str, *chosen: str) -> None:
    module = importlib.import_module(cases)
    known: Phases = module.PHASES | getattr(module, "WHOLE", {})
    phases = {name: known[name] for name in chosen}
    enter = getattr(module, "enter", lambda rank, world, directory: None)
    fork_ranks(_run_rank, max(world for world, _ in phases.values()), Path(directory), phases, enter)


def _run_rank(directory: Path, phases: Phases, enter: Callable[[int, int, Path], object]) -> None:
    enter(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), directory)
    run_phases(directory, phases)
    atexit._run_exitfuncs()  # an interpreter that ends calls them, a forked process does not


if __name__ == "__main__":
    main(*sys.argv[1:])
