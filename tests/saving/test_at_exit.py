"""What belongs to a process is not waited for, nor spoken for, in a child that was forked from it."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.background import run_program

HELD = """
import os, sys, threading
import msgspec
import numpy as np
import treeckpt as tc
from treeckpt._io.comm.comm import SoloComm

path = sys.argv[1]
gate = threading.Event()

class Held(tc.LocalStore):
    def create(self, name, nbytes):
        gate.wait()
        return super().create(name, nbytes)

def in_child(act):
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException as error:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def _run(code: str, path: Path) -> None:
    done = run_program(HELD.replace("sys.argv[1]", repr(str(path))) + code)
    assert done.returncode == 0, done.stderr


def test_a_save_under_way_is_not_waited_for_in_a_forked_child(tmp_path: Path) -> None:
    _run(
        """
lazy = tc.BackgroundOptions(writer="thread", staging="lazy")
pending = tc.save_async(Held(path + "/c"), {"w": np.ones(5)}, background=lazy)
pending.wait_staged(60)
other = tc.save_async(path + "/other", {"w": np.ones(5)}, comm=SoloComm())
other.result(60)

def act():
    pending.wait_staged()  # done before the fork
    assert "Pending" in repr(pending) and other.done() and other.result().world == 1
    for ask in (pending.result, pending.done, lambda: pending.result(5), lambda: pending.wait(5)):
        try:
            ask()
        except tc.TreeckptError as error:
            assert str(os.getppid()) in str(error) and "forked" in str(error), error
        else:
            raise AssertionError("no error")

in_child(act)
gate.set()
assert pending.result(60).nbytes == 40
""",
        tmp_path,
    )


def test_a_manager_goes_on_in_a_forked_child(tmp_path: Path) -> None:
    _run(
        """
manager = tc.Manager(path + "/run", keep=2)
manager.save(1, {"w": np.ones(5)})
manager.wait()
real = manager.directory.store.folder
manager.directory.store.folder = lambda name: Held(real(name).url)
manager.options = msgspec.structs.replace(manager.options, background=tc.BackgroundOptions(writer="thread"))
held = manager.save(2, {"w": np.ones(5)})
manager.directory.store.folder = real

def act():
    assert manager.latest() == 1
    manager.save(3, {"w": np.zeros(5)})
    manager.wait(60)
    manager.close()
    assert tc.load(path + "/run/step_00000003")["w"].tolist() == [0.0] * 5

in_child(act)
gate.set()
assert held.result(60).step == 2
manager.close()
assert tc.Manager(path + "/run").steps() == [2, 3]
""",
        tmp_path,
    )


def test_a_forked_child_does_not_speak_for_the_rank_that_forked_it(tmp_path: Path) -> None:
    _run(
        """
import torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", store=dist.FileStore(path + "/store", 1), rank=0, world_size=1)
from treeckpt._io.comm.comm import TorchComm
comm = TorchComm(dist.HashStore(), 0, 2)

def act():
    for ask in (
        lambda: tc.save(path + "/c", {"n": 1}, comm=comm),
        lambda: tc.save_async(path + "/c", {"n": 1}, comm=comm),
        lambda: tc.Manager(path + "/run", comm=comm).latest(),
    ):
        try:
            ask()
        except tc.RankError as error:
            assert "forked" in str(error) and 'comm="alone"' in str(error), error
        else:
            raise AssertionError("no error")
    tc.save(path + "/own", {"n": 1}, comm="alone")

in_child(act)
assert tc.load(path + "/own") == {"n": 1}
""",
        tmp_path,
    )


def test_the_writer_process_that_is_kept_is_ended_and_its_socket_closed() -> None:
    code = """
import tempfile, warnings
import numpy as np
import treeckpt as tc
from treeckpt._io.comm.comm import SoloComm

warnings.simplefilter("always")
with tempfile.TemporaryDirectory() as path:
    comm = SoloComm()
    tc.save_async(path + "/c", {"w": np.ones(1 << 20)}, comm=comm).result(60)
"""
    done = run_program(code)
    assert done.returncode == 0 and "ResourceWarning" not in done.stderr, done.stderr
