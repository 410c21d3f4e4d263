"""Actions on a step with sidecar files, each killed at one effect after another; see test_plain_names."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import treeckpt as tc
from tests.crash.effects import killed_at
from treeckpt._core.format.files import parse_file_name, parse_stored_name
from treeckpt._core.format.index import INDEX_NAME
from treeckpt._runs.leftovers import clean_checkpoint
from treeckpt._runs.run import RunDirectory
from treeckpt.policy import Last

TREE = {"w": np.arange(100)}
OLD = {"config.json": b"{}", "same": b"same", "gone": b"gone", "empty": b""}
NEW = {"config.json": b"[]", "same": b"same", "more": b"more", "empty": b"no more"}
NEXT = {"config.json": b"{}", "more": b"next"}


def save(path: Path) -> None:
    tc.save(path, TREE, step=1, files=NEW, overwrite=True)


def clean(path: Path) -> None:
    clean_checkpoint(path, grace=0)


ACTIONS: dict[str, tuple[dict[str, bytes] | None, Callable[[Path], None]]] = {
    "save": (None, save),
    "save_again": (OLD, save),
    "delete": (OLD, tc.delete),
    "clean": (OLD, clean),
}
"""What is there before, and what is killed."""


def make(path: Path, action: str) -> None:
    path.parent.mkdir()
    if (files := ACTIONS[action][0]) is not None:
        tc.save(path, TREE, step=1, files=files)
    if action == "clean":
        for name in ("config.json", "empty"):
            (path / name).unlink()


def plain_files(path: Path) -> dict[str, bytes]:
    names = [one.name for one in path.iterdir()] if path.exists() else []
    return {name: (path / name).read_bytes() for name in names if parse_file_name(name) is None}


def check_killed(path: Path, action: str) -> dict[str, bytes] | None:
    """Returns the sidecar files of the checkpoint that a kill has left, None for none; no plain name is of another."""
    plain = plain_files(path)
    if not (path / INDEX_NAME).exists():
        assert action in ("save", "delete"), f"{action} has lost the checkpoint"
        stored = [(of[1], one.read_bytes()) for one in path.glob("file.*") if (of := parse_stored_name(one.name))]
        assert plain.items() <= set(stored), "a clean-up can tell whose they are"
        return None
    assert tc.verify(path).ok, tc.verify(path)
    files = {one.name: tc.read_file(path, one.name) for one in tc.inspect(path).sidecars}
    assert files in (OLD, NEW)
    assert plain.items() <= files.items(), (plain, files)
    return files


def check_cleaned(path: Path, files: dict[str, bytes] | None) -> None:
    RunDirectory(path.parent).clean([Last(1)], grace=0)
    assert plain_files(path) == (files or {})
    assert path.exists() == (files is not None), list(path.iterdir())


def check_saved_again(path: Path) -> None:
    tc.save(path, TREE, step=1, files=NEXT, overwrite=True)
    assert plain_files(path) == NEXT and tc.verify(path).ok
    save_id = tc.inspect(path).save_id
    left = [one for one in path.glob("file.*") if save_id not in one.name]
    assert not left, "the next save removes what is left"


def main(directory: Path, actions: list[str], stride: int) -> None:
    for name in actions:
        number = 0
        while True:
            path = directory / f"{name}-{number}" / "step_00000001"
            make(path, name)
            killed = killed_at(ACTIONS[name][1], path, number)
            files = check_killed(path, name)
            copy = directory / f"{name}-{number}-copy" / path.name
            if path.exists():
                shutil.copytree(path, copy)
            check_cleaned(path, files)
            check_saved_again(copy)
            shutil.rmtree(path.parent)
            shutil.rmtree(copy.parent)
            if not killed:
                break
            number += stride
        print(json.dumps({"action": name, "effects": number}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))
