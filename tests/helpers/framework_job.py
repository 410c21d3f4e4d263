"""What jobs share in which a framework trains on several ranks, and the tests that start them.

python -m torch.distributed.run --nproc-per-node 2 -m tests.dcp.FRAMEWORK_job DIRECTORY STEPS [--kill-at STEP] [...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

ASIDE = os.path.join(sys.prefix, "aside")
"""Where `make test-frameworks` installs what would disturb other frameworks: see requirements_aside.txt."""


def launch(module: str, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Starts a job on so many ranks; returns it when it has ended, with what it has printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{ranks}"]
    command += ["-m", module, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out, err, root = subprocess.PIPE, subprocess.STDOUT, Path(__file__).parents[2]
    return subprocess.run(
        command, cwd=root, env=environment, timeout=300, check=False, text=True, stdout=out, stderr=err
    )


def arguments() -> argparse.Namespace:
    """Returns the arguments of a job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--kill-at", type=int, help="the step at whose start each rank kills itself")
    parser.add_argument("--async-mode", default="disabled", help="of torchtitan")
    parser.add_argument("--options", type=json.loads, default={}, help="of the checkpointer, as JSON")
    return parser.parse_args()


def network(*, dropout: float = 0.0) -> nn.Sequential:
    """Returns a network that takes batches of (8, 16); its sizes do not divide by the number of ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Dropout(dropout), nn.Linear(33, 5))


def numbers(position: int) -> torch.Tensor:
    """Returns the input of shape (8, 16) at a position of this rank's data."""
    seed = 2 * position + int(os.environ["RANK"])
    return torch.rand(8, 16, generator=torch.Generator().manual_seed(seed))


def kill_at(step: int, last: int | None) -> None:
    """Ends the process at once when the step is the one at which it is to be killed."""
    if step == last:
        os.kill(os.getpid(), signal.SIGKILL)


def write_outcome(directory: Path, net: nn.Module, losses: dict[int, float], *, resumed_from: int) -> None:
    """Writes a rank's weights, its losses by step, and the step from which it has resumed."""
    weights: dict[str, Any] = net.state_dict()
    outcome = {
        "weights": {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in weights.items()},
        "losses": losses,
        "resumed_from": resumed_from,
    }
    torch.save(outcome, directory / f"outcome-{dist.get_rank()}.pt")


@contextlib.contextmanager
def writers_stopped() -> Iterator[list[int]]:
    """Stops the processes that write for this one, which begins a save in the body."""
    children: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            children += map(int, (task / "children").read_text().split())
    assert children, "no process writes for this one"
    for pid in children:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield children
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):  # killed in the body
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def killed_in_save() -> Iterator[None]:
    """Kills the processes that write for this one, and this one, after the body, which begins a save."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, once another rank is gone: writers would stay
    with writers_stopped() as children:
        yield
        for pid in (*children, os.getpid()):
            os.kill(pid, signal.SIGKILL)
