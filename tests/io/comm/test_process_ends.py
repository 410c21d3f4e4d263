"""The end of a process is told to the other ranks once none of its saves runs, and not while it may still call."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import treeckpt as tc
from tests.helpers.background import run_program
from tests.helpers.interrupted_ranks import World, clock, save
from treeckpt._io.comm import rounds, waiting

__all__ = ["clock"]

PROGRAM = """
import atexit, multiprocessing, os, sys, time
from pathlib import Path
handlers = []
atexit.register(lambda: [handler() for handler in handlers])  # before the import, so after the handlers of the package
import numpy as np
import treeckpt as tc
from treeckpt._io.comm import rounds
from treeckpt._io.comm.comm import TorchComm
from treeckpt._saving import shard_writer

class Files:
    def __init__(self, path):
        self.path = path
        self.path.mkdir(parents=True, exist_ok=True)
    def _file(self, key):
        return self.path / key.replace("/", ":")
    def set(self, key, data):
        part = self._file(f"{key} of {os.getpid()}")
        part.write_bytes(data)
        part.rename(self._file(key))
    def check(self, keys):
        return all(self._file(key).exists() for key in keys)
    def get(self, key):
        return self._file(key).read_bytes()
    def delete_key(self, key):
        self._file(key).unlink(missing_ok=True)

def act(job, rank):
    run, real = Path(sys.argv[1]) / job, shard_writer.write_files
    comm = TorchComm(Files(run / "store"), rank, 2, timeout=60.0)
    tree = {"x": np.arange(10), "of": tc.PerRank(rank)}

    def noted():
        return comm.wait([f"ended/{rank}"], 0)[0] is not None

    def write(*arguments, **options):
        time.sleep(0.8 * rank)
        assert not noted(), "while it saves"
        return real(*arguments, **options)

    def at_the_end():
        assert noted(), "the end has been told"
        time.sleep(0.8 * rank)
        shard_writer.write_files = write
        try:
            tc.save(run / "c", tree, comm=comm)
            assert noted(), "it is told again"
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)

    if job == "background":
        rounds.RETURN_TIMEOUT, shard_writer.write_files = 0.1, write
        tc.save_async(run / "c", tree, comm=comm, background=tc.BackgroundOptions(writer="thread", timeout=40.0))
    else:
        rounds.RETURN_TIMEOUT = 60.0
        handlers.append(at_the_end)
        tc.save(run / "first", tree, comm=comm)

children = []
for place in [(job, rank) for job in sys.argv[3:] for rank in range(2)]:
    if sys.argv[2] == "multiprocessing":
        children.append(multiprocessing.get_context("fork").Process(target=act, args=place))
        children[-1].start()
    elif child := os.fork():
        children.append(child)
    else:
        act(*place)
        sys.exit()
if sys.argv[2] == "multiprocessing":
    for child in children:
        child.join()
    sys.exit(any(child.exitcode for child in children))
sys.exit(any([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""


@pytest.mark.parametrize(
    ("way", "jobs"),
    [
        ("os", ["background", "handler"]),
        pytest.param("multiprocessing", ["background"], marks=pytest.mark.slow),  # it ends without handlers of atexit
    ],
)
def test_a_save_at_the_end_of_the_processes_is_committed_and_then_their_ends_are_told(
    tmp_path: Path, way: str, jobs: list[str]
) -> None:
    done = run_program(PROGRAM, arguments=[str(tmp_path), way, *jobs])
    assert done.returncode == 0, done.stderr
    for job in jobs:
        assert tc.verify(tmp_path / job / "c").ok
        noted = {path.name for path in (tmp_path / job / "store").iterdir()}
        assert {"treeckpt:ended:0", "treeckpt:ended:1"} <= noted


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("in_time", [True, False])
def test_a_rank_that_has_told_its_end_has_some_seconds_to_call(
    late: int, in_time: bool, clock: SimpleNamespace
) -> None:
    def act(comm: Any) -> str:
        if comm.rank == late:
            waiting.note_end(comm)
            comm.pause(rounds.RETURN_TIMEOUT + (-1 if in_time else 60))
            if not in_time:
                return "it never calls"
        return save(comm, "late")

    clock.world = World(2, 1, {})
    found = clock.world.run(act)
    if in_time:
        assert found[0] == found[1] and isinstance(found[0], str), found
    else:
        assert isinstance(found[1 - late], tc.RankError) and "its process has ended" in str(found[1 - late]), found
        assert clock.world.now > 60
