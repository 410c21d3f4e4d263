"""Jobs of one or more processes that save, and die at one effect after another; see test_matrix.

A job is processes that were forked from this one, which has torch imported, and their writer processes. Where the mine
lies, the process that is about to make the call, or has just made it, stops and says so; then it, or the whole job, is
killed from here. Every line that is printed is one case.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import treeckpt as tc
from tests.crash.cases import Case
from tests.crash.kills import impatient_once
from tests.crash.mined import Mined
from tests.helpers.background import calls_of, gone, until
from tests.helpers.world import LONG, small_tree
from treeckpt._core.format.files import step_name
from treeckpt._io.comm.comm import TorchComm, default_comm

SILENT = 3.0
"""Seconds after which a rank counts as silent once one is dead: those that live on are to learn of it."""
AT_ONCE = 4
"""Jobs of which one process is killed, and the others wait for that time."""


def rank_of(rank: int, case: Case, directory: Path) -> str:
    path, log = directory / "run" / step_name(2), directory / f"log{rank}"
    store = Mined(path, log, case.at if rank == case.culprit else None, after=case.after)
    options: dict[str, Any] = {"step": 2, "overwrite": case.what == "overwriting"}
    if case.processes > 1:
        meeting = dist.FileStore(str(directory / "store"), case.processes)
        limit = timedelta(seconds=LONG)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=case.processes, timeout=limit)
        comm = default_comm()
        assert isinstance(comm, TorchComm)
        comm.timeout = LONG
        if case.who == "process":
            met = directory / f"log{case.culprit}.met"
            impatient_once(lambda: met.exists() and gone(json.loads(met.read_text())[0]), comm, seconds=SILENT)
    tree = small_tree(rank, case.processes, seed=2)
    try:
        if case.how == "background":
            tc.save_async(store, tree, **options).result(120)
        else:
            tc.save(store, tree, **options)
    except tc.TreeckptError as error:
        return f"{type(error).__name__} {error}"
    return "saved"


class Job:
    """A case that runs. There is a checkpoint of step 1, and for an overwriting save one of step 2, of other bytes."""

    def __init__(self, case: Case, directory: Path) -> None:
        self.case, self.directory = case, directory
        directory.mkdir()
        for step in (1, 2) if case.what == "overwriting" else (1,):
            tc.save(directory / "run" / step_name(step), small_tree(0, 1, seed=1), step=step)
        self.pids: list[int] = []
        for rank in range(case.processes):
            self.pids.append(os.fork())
            if self.pids[-1] == 0:
                try:
                    (directory / f"told{rank}").write_text(rank_of(rank, case, directory))
                finally:
                    os._exit(0)

    def strike(self) -> None:
        """Waits for the mine to be met, or for the end, and kills."""
        met = self.directory / f"log{self.case.culprit}.met"
        culprit = self.pids[self.case.culprit]
        assert until(lambda: met.exists() or gone(culprit)), "neither met nor ended"
        if not met.exists():
            return
        pid = json.loads(met.read_text())[0]
        victims = [pid] if self.case.who == "process" else self.family()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # nobody sees another one die
            for victim in victims:
                try:
                    os.kill(victim, number)
                except ProcessLookupError:
                    assert gone(victim)
        assert until(lambda: all(gone(victim) for victim in victims)), victims

    def family(self) -> list[int]:
        """The processes and their writers."""
        found: list[int] = []
        for pid in self.pids:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
                    found += [int(child) for child in task.read_text().split()]
        return [*found, *(pid for pid in self.pids if not gone(pid))]

    def end(self) -> None:
        family = self.family()
        status = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        assert until(lambda: all(gone(pid) for pid in family)), "writers end with their parents"
        met = self.directory / f"log{self.case.culprit}.met"
        call = json.loads(met.read_text())[1] if met.exists() else ""
        told = [self.directory / f"told{rank}" for rank in range(self.case.processes)]
        row = {
            "case": self.case.words,
            "path": str(self.directory / "run"),
            "call": call,
            "calls": calls_of(self.directory / f"log{self.case.culprit}"),
            "status": status,
            "told": [file.read_text() if file.exists() else "" for file in told],
        }
        print(json.dumps(row), flush=True)


def run(cases: list[Case], directory: Path) -> None:
    at_once = [cases[at : at + AT_ONCE] for at in range(0, len(cases), AT_ONCE)]
    number = 0
    for group in at_once:
        jobs = []
        for case in group:
            jobs.append(Job(case, directory / f"{number:04d}"))
            number += 1
        for job in jobs:
            job.strike()
        for job in jobs:
            job.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run([Case(*words) for words in json.loads(sys.argv[2])], Path(sys.argv[1]))
