"""A process that a launcher started as one of several does not take itself for the only one."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from treeckpt._io.comm.comm import TorchComm, launched_rank, ranks_of_host, thread_comms
from treeckpt.convert import convert

TREE = {"w": np.arange(5), "own": tc.PerRank(7)}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
SEVERAL = {
    "torchrun": TORCHRUN,
    "by hand": {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"},
    "srun": {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
    "srun of a part": {"SLURM_STEP_ID": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "4"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
    "hydra": {"PMI_SIZE": "4", "PMI_RANK": "1"},
    "torchrun on one of several nodes under srun": {
        **TORCHRUN, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"
    },
}  # fmt: skip
ONE = {
    "nothing": {},
    "torchrun of one": {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"},
    "torchrun of one in a step of several": {
        "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none",
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4",
    },
    "the shell of sbatch": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    "an interactive shell": {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
    "a notebook under srun": {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
    "a number of nodes alone": {"WORLD_SIZE": "4"},
    "words": {"RANK": "first", "WORLD_SIZE": "many"},
    "a rank outside": {"RANK": "4", "WORLD_SIZE": "4"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("name", SEVERAL)
def test_launchers_of_several_are_recognised(name: str) -> None:
    found = launched_rank(SEVERAL[name])
    assert found is not None and (found.rank, found.size) == (1, 4)


@pytest.mark.parametrize("name", ONE)
def test_a_process_that_is_alone_is_not_taken_for_one_of_several(name: str) -> None:
    assert launched_rank(ONE[name]) is None


def test_jax_distributed_is_asked_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax is not installed here: a module with the state that it keeps stands for it."""
    for size in (2, 1, None):
        module: Any = types.ModuleType("jax._src.distributed")
        module.global_state = types.SimpleNamespace(process_id=0, num_processes=size)
        monkeypatch.setitem(sys.modules, "jax._src.distributed", module)
        found = launched_rank({})
        assert (found is not None and "jax.distributed" in found.evidence) == (size == 2)


CALLS = {
    "save": lambda path, **comm: tc.save(path / "c", TREE, **comm),
    "save_async": lambda path, **comm: tc.save_async(
        path / "c", TREE, background=tc.BackgroundOptions(writer="thread"), **comm
    ).result(60),
    "prewarm": lambda path, **comm: tc.prewarm(TREE, background=tc.BackgroundOptions(writer="thread"), **comm),
    "manager": lambda path, **comm: tc.Manager(path / "run", background=False, **comm).save(1, TREE),
    "convert": lambda path, **comm: convert(path / "saved", path / "c.pt", **comm),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_would_write_is_refused_unless_it_is_said_to_be_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    tc.save(tmp_path / "saved", {"w": np.arange(5)})
    before = sorted(tmp_path.rglob("*"))
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(tc.RankError, match=r'RANK=1 and WORLD_SIZE=4 .*init_process_group.*comm="alone"') as caught:
        CALLS[call](tmp_path)
    assert caught.value.path == "comm" and sorted(tmp_path.rglob("*")) == before
    CALLS[call](tmp_path, comm="alone")


def test_loads_take_the_launchers_word_for_which_rank_this_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.helpers.world import errors_of, on_ranks

    def save(comm: Any) -> None:
        tc.save(tmp_path / "four", {"w": np.arange(5), "own": tc.PerRank(comm.rank)}, comm=comm)

    assert errors_of(on_ranks(4, save)) == [None] * 4
    tc.save(tmp_path / "one", TREE)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert tc.load(tmp_path / "four")["own"].value == 1
    assert tc.load(tmp_path / "one", select="w")["w"].tolist() == list(range(5))
    target = {"w": np.zeros(5, int)}
    tc.load_into(tmp_path / "one", target, strict=False)
    assert target["w"].tolist() == list(range(5)) and set(tc.abstract(target)) == {"w"}
    assert tc.verify(tmp_path / "one").ok
    with pytest.raises(tc.MismatchError, match=r'own.*: .*comm="alone"'):
        tc.load(tmp_path / "one")
    assert tc.load(tmp_path / "one", comm="alone")["own"].value == 7
    assert tc.load(tmp_path / "one", fallback=tc.Fallback(per_rank="take"))["own"].value == 7
    with pytest.raises(tc.RankError, match='comm="alone"'):
        tc.load(tmp_path / "one", fallback=tc.Fallback(on_corrupt="skip"))
    assert tc.load(tmp_path / "one", fallback=tc.Fallback(on_corrupt="skip"), comm="alone")["own"].value == 7


def test_trees_are_not_taken_for_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for call in (tc.trees.gather, tc.trees.broadcast):
        with pytest.raises(tc.RankError, match=r'group: .*WORLD_SIZE=4.*group="alone"'):
            call({"w": np.arange(5)})
        assert call({"w": np.arange(5)}, group="alone")["w"].tolist() == list(range(5))


def test_another_word_than_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tc.TreeckptError, match=r"comm: expected .*\"alone\".*found 'solo'"):
        tc.save(tmp_path / "c", TREE, comm="solo")


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import treeckpt as tc
from treeckpt.demo.fork_ranks import fork_ranks

def run(path):
    rank = int(os.environ["RANK"])
    try:
        tc.save(path + "/early", {"w": torch.ones(3)})
    except tc.RankError as error:
        assert "WORLD_SIZE=2" in str(error), error
    else:
        raise AssertionError("saved over the other rank")
    tc.save(f"{path}/own{rank}", {"rank": rank}, comm="alone")
    dist.init_process_group("gloo")
    tc.save(path + "/together", {"w": torch.ones(3), "own": tc.PerRank(rank)})
    if rank == 1:
        tc.save(path + "/one", {"w": torch.ones(3), "own": tc.PerRank(rank)}, comm="alone")
        assert tc.load(path + "/one", comm="alone")["own"].value == 1
        assert tc.save_async(path + "/two", {"n": 1}, comm="alone").result(60).world == 1
        assert tc.Manager(path + "/run", comm="alone").latest() is None
    dist.barrier()
    dist.destroy_process_group()

fork_ranks(run, 2, sys.argv[1])
"""
"""Ranks under torchrun's agent, which imports torch once for both."""


def test_under_torchrun_before_and_after_the_process_group(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "early").exists()
    assert [tc.load(tmp_path / f"own{rank}")["rank"] for rank in range(2)] == [0, 1]
    assert tc.inspect(tmp_path / "together").world == 2 and tc.inspect(tmp_path / "one").world == 1


HOSTS = {
    "torchrun": {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    "mpirun": {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
    "srun": {"SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"},
}


@pytest.mark.parametrize("launcher", [*HOSTS, ""])
def test_the_ranks_of_a_host_are_those_that_the_launcher_has_started_there(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for one in HOSTS.values() for name in one]:
        monkeypatch.delenv(name, raising=False)
    for name, value in HOSTS.get(launcher, {}).items():
        monkeypatch.setenv(name, value)
    world = thread_comms(8)
    assert ranks_of_host(world[5]) == ((4, 5, 6, 7) if launcher else (5,))
    group = TorchComm(None, 1, 3, members=(1, 5, 6))
    assert ranks_of_host(group) == ((5, 6) if launcher else (5,))
    assert ranks_of_host(thread_comms(1)[0]) == (0,)
