"""Ranks of one machine that torchrun's agent forks from itself: each would else import torch anew, which takes 4 s."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import uuid
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import torch._dynamo  # noqa: F401  an optimizer or DTensor imports it when it is made: in each rank, if not here
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

START_TIMEOUT = 120.0  # seconds in which all ranks are forked
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def fork_ranks(function: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Calls a function on each of several ranks, with the environment that torchrun gives them.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed; the others were ended.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_endpoint="localhost:0",
        rdzv_backend="c10d",
        max_restarts=0,
        start_method="fork" if sys.platform == "linux" else "spawn",
    )
    # The agent's store looks up the name of each rank that connects, in a thread. A rank that is forked meanwhile
    # inherits glibc's lock of the resolver, held, and waits for it for ever when it connects (seen once in 36 starts).
    started = multiprocessing.get_context(config.start_method).Barrier(ranks)
    gc.freeze()  # no rank's collector then copies what all share
    elastic_launch(config, _run_rank)(function, os.getpid(), started, *arguments)


def _run_rank(function: Callable[..., None], agent: int, started: Barrier, *arguments: Any) -> None:
    die_with_parent(agent)
    started.wait(START_TIMEOUT)
    function(*arguments)
    # DTensor's caches keep the mesh after destroy_process_group, and so gloo's threads: one of them that frees a
    # tensor while the interpreter ends aborts the process. A forked rank has no such end.
    atexit.register(os._exit, 0)


def die_with_parent(parent: int) -> None:
    """Has the kernel end this process when the one that started it ends (Linux; elsewhere its next print does).

    Raises:
        SystemExit: the parent has ended already.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)
