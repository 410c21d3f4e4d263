"""Reads checkpoints of any format in forks with limits of memory and time: python -m tests.helpers.limited_reads.

It reads lines of JSON, [path, directory for what is written, acts], forks for each from a process that has imported
everything, and prints one line of JSON: by act its outcome, a text, and the seconds of computing. An outcome is "ok",
"ours" for an error of ours, "bare" for any other, or "killed" with the signal. Memory may grow by `GROWTH` in each
fork, and each act takes `SECONDS` of computing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GROWTH = 1 << 30
SECONDS = 5
ACTS = ("load", "inspect", "convert", "dcp", "show", "verify")


class LimitedReads:
    """The process that forks, and its answers."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.helpers.limited_reads"]
        environment = os.environ | {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def outcomes(self, path: Path, out: Path, acts: tuple[str, ...] = ACTS) -> dict[str, tuple[str, str, float]]:
        """Returns what came out of each act."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(path), str(out), acts]) + "\n")
        self._process.stdin.flush()
        return {act: tuple(found) for act, found in json.loads(self._process.stdout.readline()).items()}

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def limited_reads() -> Iterator[LimitedReads]:
    """Starts the process for a while."""
    reads = LimitedReads()
    try:
        yield reads
    finally:
        reads.close()


def address_space() -> int:
    """Returns the bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _acts(path: str, out: Path) -> dict[str, Callable[[], Any]]:
    import treeckpt as tc
    from treeckpt._cli.main import main

    def show() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main(["show", path])
            main(["show", path, "--json"])

    def verify() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main(["verify", path])

    def convert() -> None:
        tc.convert.convert(path, out / "new")
        _assert_equal(tc.load(out / "new"), tc.load(path))

    return {
        "load": lambda: tc.load(path),
        "inspect": lambda: tc.inspect(path),
        "convert": convert,
        "dcp": lambda: tc.convert.to_dcp(path, out / "dcp", lossy=True),
        "torch": lambda: tc.convert.to_torch(path, out / "new.pt", lossy=True),
        "safetensors": lambda: tc.convert.to_safetensors(path, out / "new.safetensors", lossy=True),
        "show": show,
        "verify": verify,
    }


def _assert_equal(one: Any, other: Any) -> None:
    import numpy as np
    import torch

    from treeckpt._core.tree.flatten import flatten

    pairs = [flatten(tree)[1] for tree in (one, other)]
    assert [path for path, _ in pairs[0]] == [path for path, _ in pairs[1]], "a conversion keeps the paths"
    for (path, a), (_, b) in zip(*pairs, strict=True):
        if isinstance(a, torch.Tensor):
            a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for t in (a, b))
        same = np.array_equal(a, b) if isinstance(a, np.ndarray) else repr(a) == repr(b)
        assert same, f"a conversion keeps {path}"


def _fork(path: str, out: str, acts: list[str]) -> dict[str, list[Any]]:
    """Runs acts in a fork; one that is killed is followed by the others in another fork."""
    found: dict[str, list[Any]] = {}
    while rest := [act for act in acts if act not in found]:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read)
            _run(path, Path(out), rest, write)
        os.close(write)
        with os.fdopen(read) as lines:
            for line in lines:
                act, *told = json.loads(line)
                found[act] = told
        _, status = os.waitpid(pid, 0)
        if left := [act for act in rest if act not in found]:
            found[left[0]] = ["killed", signal.Signals(os.WTERMSIG(status)).name if status & 127 else f"{status}", 0.0]
    return found


def _run(path: str, out: Path, acts: list[str], write: int) -> None:
    import treeckpt as tc

    most = address_space() + GROWTH
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    made = _acts(path, out)
    for act in acts:
        begin = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(begin) + 1 + SECONDS, resource.RLIM_INFINITY))
        try:
            made[act]()
            told = ["ok", ""]
        except tc.TreeckptError as error:
            told = ["ours", f"{type(error).__name__}: {error}"]
        except BaseException as error:
            told = ["bare", f"{type(error).__name__}: {error!s:.300}"]
        os.write(write, json.dumps([act, *told, time.process_time() - begin]).encode() + b"\n")
    os._exit(0)


def main() -> None:
    """Answers each line."""
    import torch.distributed.checkpoint  # noqa: F401  (in the parent, once)

    import treeckpt._cli.main
    import treeckpt._cli.show
    import treeckpt._foreign.foreign_checkpoint
    import treeckpt._loading.load
    import treeckpt.convert._conversion  # noqa: F401

    for line in sys.stdin:
        path, out, acts = json.loads(line)
        print(json.dumps(_fork(path, out, acts)), flush=True)


if __name__ == "__main__":
    main()
