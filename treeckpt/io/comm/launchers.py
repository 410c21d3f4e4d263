"""Whether a launcher has started this process as one of several ranks, by its environment alone.

torchrun, srun, mpirun and jax.distributed give each process its number and how many there are. Processes without a comm
would each save as the only one, and overwrite each other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...errors import RankError

__all__ = ["LaunchedRank", "UnconnectedComm", "launched_rank", "unconnected_error"]

_SLURM_SPECIAL = 0xFFFF_FFF0
"""Steps from here on are SLURM's own: the batch script, an interactive shell, what is outside of all steps."""
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
)


class LaunchedRank(msgspec.Struct, frozen=True):
    """One rank of several, as its launcher says."""

    rank: int
    size: int
    said: str
    """By what."""


def launched_rank(environment: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """The place of this process among those that were started with it; None where it is alone, as far as is known."""
    found = os.environ if environment is None else environment
    inner = _rank_in(found, "RANK", "WORLD_SIZE")
    if inner is not None and inner.size == 1 and "TORCHELASTIC_RUN_ID" in found:
        places: list[LaunchedRank | None] = [
            _of_jax()
        ]  # torchrun's word: it is started by srun and mpirun, not the reverse
    else:
        places = [_of_jax(), inner, _of_slurm(found), *(_rank_in(found, *names) for names in _MPI)]
    return next((place for place in places if place is not None and place.size > 1), None)


def _of_slurm(found: Mapping[str, str]) -> LaunchedRank | None:
    step = _number(found.get("SLURM_STEP_ID", found.get("SLURM_STEPID")))
    if step is None or step >= _SLURM_SPECIAL:
        return None  # the shell of sbatch or salloc has the job's number of tasks, but is none of them
    return _rank_in(
        found, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in found else "SLURM_NTASKS"
    )


def _of_jax() -> LaunchedRank | None:
    """What jax.distributed was initialised with, if the program uses it; jax is not imported for that."""
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    rank, size = getattr(state, "process_id", None), getattr(state, "num_processes", None)
    if isinstance(rank, int) and isinstance(size, int) and size > 1:
        return LaunchedRank(rank, size, f"jax.distributed, process {rank} of {size}")
    return None


def _rank_in(found: Mapping[str, str], rank_name: str, size_name: str) -> LaunchedRank | None:
    rank, size = _number(found.get(rank_name)), _number(found.get(size_name))
    if rank is None or size is None or not rank < size:
        return None
    return LaunchedRank(rank, size, f"{rank_name}={rank} and {size_name}={size} in the environment")


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


class UnconnectedComm:
    """One of several ranks, as their launcher says, that cannot reach the others: enough for loads that do not talk."""

    def __init__(self, place: LaunchedRank, timeout: float) -> None:
        self.rank, self.size, self.timeout, self._place = place.rank, place.size, timeout, place
        self.memory: dict[str, Any] = {}

    def post(self, key: str, data: bytes) -> None:
        raise unconnected_error(self._place)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        raise unconnected_error(self._place)

    def drop(self, keys: Sequence[str]) -> None:
        pass


def unconnected_error(place: LaunchedRank, name: str = "comm") -> RankError:
    """What to raise where ranks would have to talk.

    Args:
        name: of the argument that would say how.
    """
    return RankError(
        name,
        ranks={place.rank: "it cannot reach the others"},
        expected=f"a way to reach the other ranks, of {place.size}",
        found=f"{place.said}, but no process group of torch.distributed, and no {name}",
        hint=f"Call dist.init_process_group first, or pass {name}=; a process that is to do this by itself, whatever "
        f'the others do, passes {name}="alone"',
    )
