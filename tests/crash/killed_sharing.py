"""Actions on a run of checkpoints that share files, each killed at one effect after another; see test_sharing.

Every action runs in a fork of this process, which has all imported, see `effects`. What is left is checked here.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import treeckpt as tc
from tests.crash.effects import killed_at
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.comm.comm import thread_comms
from treeckpt._loading.flatten import flatten_store
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import Last

STEPS = 3
COMM = thread_comms(1)[0]
"""Its state goes to the forks, so that a save there writes the rows of a table alone that have changed."""


def tree_of(step: int) -> dict[str, Any]:
    frozen = np.arange(200_000, dtype=np.int64)
    rows = np.zeros((6000, 2))
    rows[: 10 * step] = step
    table = tc.KeyedTable(np.arange(6000), {"x": rows}, buckets=1)
    return {"frozen": frozen, "trained": np.full(1000, step), "step": step, "table": table}


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def make_run(run: Path) -> None:
    """Steps 1 to `STEPS` and what is frozen in files of step 4's home; a step that is saved so is the last one."""
    for step in range(1, STEPS + 3):
        base = {"base": run / name_of(step - 1)} if step > 1 else {}
        tc.save(run / name_of(step), tree_of(step), step=step, comm=COMM, **base)


LAST = STEPS + 2
"""The newest step of `make_run`, which shares with the one before."""


def save(run: Path) -> None:
    tc.save(run / name_of(LAST + 1), tree_of(LAST + 1), step=LAST + 1, comm=COMM, base=run / name_of(LAST))


def save_again(run: Path) -> None:
    """Replaces the step whose files the last one shares."""
    options: Any = {"overwrite": True, "comm": COMM, "base": run / name_of(LAST)}
    tc.save(run / name_of(LAST - 1), tree_of(LAST - 1), step=LAST - 1, **options)


def delete_origin(run: Path) -> None:
    tc.Manager(run, keep=None, background=False).delete(LAST - 1)


def clean(run: Path) -> None:
    RunDirectory(run).clean([Last(1)], grace=0)


def flatten(run: Path) -> None:
    flatten_store(tc.LocalStore(run / name_of(LAST)))


ACTIONS: dict[str, Callable[[Path], None]] = {
    "save": save,
    "save_again": save_again,
    "delete_origin": delete_origin,
    "clean": clean,
    "flatten": flatten,
}


def holds(run: Path, step: int) -> bool:
    """Whether a step is committed; then it must be whole."""
    path = run / name_of(step)
    if not (path / INDEX_NAME).exists():
        return False
    assert tc.verify(path).ok, tc.verify(path)
    loaded = tc.load(path)
    table = loaded.pop("table")
    for key, value in tree_of(step).items():
        found = table.slots["x"][table.ids.argsort()] if key == "table" else loaded[key]
        assert np.array_equal(found, value.slots["x"] if key == "table" else value), (step, key)
    return True


def named(run: Path) -> set[Path]:
    indexes = {path.parent.name: tc.inspect(path.parent) for path in run.glob(f"*/{INDEX_NAME}")}
    return {run / (f.directory or name) / f.name for name, index in indexes.items() for f in index.file_list}


def check(action: str, run: Path) -> None:
    kept = {"save": range(1, LAST + 1), "save_again": range(1, LAST + 1), "flatten": range(1, LAST + 1)}
    must = kept.get(action, [LAST] if action == "clean" else [1, 2, LAST])
    assert all(holds(run, step) for step in must), f"{action} has lost a checkpoint"
    for step in range(1, LAST + 2):
        holds(run, step)
    if action == "save" and holds(run, LAST + 1):
        assert "table/deltas/2/rows/ids" in tc.inspect(run / name_of(LAST + 1)).by_path, "it shares rows of the table"
    # the next training goes on, and its clean-ups leave nothing that no index names
    with tc.Manager(run, keep=2, incremental=True, background=False, grace=0) as manager:
        for step in range(LAST + 2, LAST + 5):
            manager.save(step, tree_of(step))
        manager.clean()
        manager.clean()
    assert manager.steps() == [LAST + 3, LAST + 4]
    assert holds(run, LAST + 3) and holds(run, LAST + 4)
    assert set(run.rglob("shard-*")) == named(run), "files that no index names"


def main(directory: Path, actions: list[str], stride: int) -> None:
    whole, run = directory / "whole", directory / "run"
    make_run(run)  # what is known of its tables goes by this path
    run.rename(whole)
    last = tc.inspect(whole / name_of(LAST))
    assert last.shared_names and "table/deltas/1/rows/ids" in last.by_path, "it shares files, and rows of a table"
    for name in actions:
        number = 0
        while True:
            shutil.copytree(whole, run)
            killed = killed_at(ACTIONS[name], run, number)
            check(name, run)
            shutil.rmtree(run)
            if not killed:
                break
            number += stride
        print(json.dumps({"action": name, "effects": number}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))
