"""A process that converts a checkpoint back and forth and tells by how much its memory grew at each step.

    python memory_child.py DIRECTORY MEBIBYTES BUDGET

The source, a file of torch.save of that many MiB, is written without tensors in memory either.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import treeckpt as tc


def resident() -> int:
    """Bytes of this process's own memory: not of files that are mapped."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def growth(act: Callable[[], Any]) -> int:
    """By how many bytes memory grew while something was done, at the worst of many moments."""
    before, peak = resident(), [0]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        act()
    finally:
        done.set()
        thread.join()
    return peak[0] - before


def write_source(path: Path, mebibytes: int) -> None:
    """Three large tensors, one of which is a transposed view, and a few small ones."""
    rows = mebibytes * 1024 // 3 // 4
    tree = {"a": torch.empty(rows, 1024), "b": torch.empty(rows * 1024), "c": torch.empty(1024, rows)}
    for number, tensor in enumerate(tree.values()):
        tensor.fill_(number + 1)
        tensor.view(-1)[:: 1 << 10] = torch.arange(len(tensor.view(-1)[:: 1 << 10]), dtype=torch.float32)
    tree["c"] = tree["c"].t()
    torch.save({"model": tree, "step": 3}, path)


def main() -> None:
    directory, mebibytes, budget = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    convert = tc.convert.convert
    source, one = directory / "source.pt", directory / "one"
    write_source(source, mebibytes)
    small = directory / "small.pt"
    torch.save({"a": torch.ones(3)}, small)
    for number, to in enumerate(("treeckpt", "dcp", "torch", "safetensors")):  # what is imported and kept
        convert(small, directory / f"warm{number}", to=to, memory=budget)
    part: dict[str, Any] = {"memory": budget}
    steps: dict[str, Callable[[], Any]] = {
        "torch to treeckpt": lambda: convert(source, one, **part),
        "treeckpt to safetensors": lambda: convert(one, directory / "m.safetensors", subtree="model", **part),
        "safetensors to dcp": lambda: convert(directory / "m.safetensors", directory / "dcp", to="dcp", **part),
        "dcp to torch": lambda: convert(directory / "dcp", directory / "back.pt", dtype="bfloat16", **part),
    }
    print(json.dumps({name: growth(act) for name, act in steps.items()}))


if __name__ == "__main__":
    main()
