"""Finds out, by the environment alone, whether a launcher has started this process as one of several ranks.

torchrun, srun, mpirun and jax.distributed tell each process its rank and the number of ranks. Processes without a comm
would each save as the only one, and overwrite each other's files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...errors import RankError
from .state import CommState

_SLURM_SPECIAL = 0xFFFF_FFF0
"""Step ids from here on are SLURM's own: the batch script, an interactive shell, what is outside of all steps."""
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
)
_LOCAL = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


class LaunchedRank(msgspec.Struct, frozen=True):
    """The rank that a launcher has given this process."""

    rank: int
    size: int
    evidence: str
    """Where the launcher says so, as text for errors."""


def launched_rank(environment: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """Returns this process's rank among those that were started with it; None where no launcher is found."""
    variables = os.environ if environment is None else environment
    torchrun = _rank_in(variables, "RANK", "WORLD_SIZE")
    if torchrun is not None and torchrun.size == 1 and "TORCHELASTIC_RUN_ID" in variables:
        # torchrun says that there is one rank, and it is started by srun and mpirun, not the reverse
        candidates = [_rank_of_jax()]
    else:
        candidates = [_rank_of_jax(), torchrun, _rank_of_slurm(variables)]
        candidates += [_rank_in(variables, *names) for names in _MPI]
    return next((found for found in candidates if found is not None and found.size > 1), None)


def local_rank(environment: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """Returns this process's number among those that a launcher has started on this host; None where none says so."""
    variables = os.environ if environment is None else environment
    return next((found for names in _LOCAL if (found := _rank_in(variables, *names)) is not None), None)


def _rank_of_slurm(variables: Mapping[str, str]) -> LaunchedRank | None:
    step = _number(variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID")))
    if step is None or step >= _SLURM_SPECIAL:
        return None  # the shell of sbatch or salloc has the job's number of tasks, but is none of them
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    return _rank_in(variables, "SLURM_PROCID", size_name)


def _rank_of_jax() -> LaunchedRank | None:
    """Returns the rank that jax.distributed was initialised with, if the program uses it; does not import jax."""
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    rank, size = getattr(state, "process_id", None), getattr(state, "num_processes", None)
    if isinstance(rank, int) and isinstance(size, int) and size > 1:
        return LaunchedRank(rank, size, f"jax.distributed, process {rank} of {size}")
    return None


def _rank_in(variables: Mapping[str, str], rank_name: str, size_name: str) -> LaunchedRank | None:
    rank, size = _number(variables.get(rank_name)), _number(variables.get(size_name))
    if rank is None or size is None or not rank < size:
        return None
    return LaunchedRank(rank, size, f"{rank_name}={rank} and {size_name}={size} in the environment")


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


class UnconnectedComm:
    """The comm of a launched rank that cannot reach the others: sufficient for loads that exchange no messages."""

    def __init__(self, launched: LaunchedRank, timeout: float) -> None:
        self.rank, self.size, self.timeout, self._launched = launched.rank, launched.size, timeout, launched
        self.state = CommState()

    def post(self, key: str, data: bytes) -> None:
        raise unconnected_error(self._launched)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        raise unconnected_error(self._launched)

    def drop(self, keys: Sequence[str]) -> None:
        pass


def unconnected_error(launched: LaunchedRank, name: str = "comm") -> RankError:
    """Returns the error where ranks would have to exchange messages; argument `name` would say how."""
    return RankError(
        name,
        ranks={launched.rank: "it cannot reach the others"},
        expected=f"a way to reach the other ranks, of {launched.size}",
        found=f"{launched.evidence}, but no process group of torch.distributed, and no {name}",
        hint=f"Call dist.init_process_group first, or pass {name}=; a process that is to do this by itself, whatever "
        f'the others do, passes {name}="alone"',
    )
