"""A save that begins when the interpreter ends is there before the process has ended, or its call says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import ROOT, run_program
from tests.helpers.s3 import S3

STEPS = [f"step_0000000{step}" for step in range(5)]
WAYS = {
    "first_in_the_background": ["1"],
    "first_by_a_thread": ["1"],
    "first_in_the_foreground": ["1"],
    "three_in_a_row": ["1", "2", "3"],
    "with_earlier_saves": ["1", "2", "3"],
    "a_manager": STEPS[2:],
    "a_manager_in_the_foreground": STEPS[3:],
    "a_manager_that_was_closed": STEPS[1:3],
    "a_first_manager": STEPS[1:2],
    "an_exit_in_a_thread": ["1"],
    "running_threads": ["1", "2"],
    "an_executor": ["1", "2", "3"],
    "a_handler_of_threading": ["1", "2"],
    "a_finalizer": ["1"],
    "a_child_of_multiprocessing": ["1", "2", "3"],
    "a_child_that_saves_first_when_it_ends": ["1"],
}
"""The checkpoints that are there at the end."""
ENDS_BADLY = {"an_exception": (1, ["1"]), "a_save_that_is_refused": (0, ["1"])}
OUTLIVES = "an_object_that_outlives_its_module"
QUICK = {"first_in_the_background", "with_earlier_saves", "a_manager", "a_manager_in_the_foreground", "a_finalizer"}
QUICK |= {"a_child_of_multiprocessing", "running_threads", OUTLIVES}
ALL = [*WAYS, *ENDS_BADLY, OUTLIVES]


def complete(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if (path / "index.json").exists() and tc.verify(path).ok)


def ended(path: Path, ways: list[str]) -> dict[str, Any]:
    for way in ways:
        (path / way).mkdir()
    line = json.dumps([(way, str(path / way)) for way in ways])
    command = [sys.executable, "-W", "error", "-m", "tests.saving.ends"]
    done = subprocess.run(command, input=line, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    return json.loads(done.stdout)


def check(path: Path, way: str, code: int, errors: str) -> None:
    if way == OUTLIVES:
        assert code == 0 and complete(path / way) == []
        assert errors.count("Save in the foreground before the interpreter ends") == 1, errors
    elif way in ENDS_BADLY:
        assert (code, complete(path / way)) == ENDS_BADLY[way], errors
        assert ("CheckpointExists" in errors) == (way == "a_save_that_is_refused"), errors
    else:
        said = [line for line in errors.splitlines() if not line.startswith("treeckpt: ")]
        assert (code, said) == (0, []), errors
        # how far a clean-up came when the process ended depends on which save it belonged to
        kept = WAYS[way]
        assert complete(path / way)[-len(kept) :] == kept


def test_a_save_that_begins_at_the_end_is_finished_or_says_what_to_do(tmp_path: Path) -> None:
    for way, (code, errors) in ended(tmp_path, [way for way in ALL if way in QUICK]).items():
        check(tmp_path, way, code, errors)


@pytest.mark.slow
@pytest.mark.parametrize("way", ALL)
def test_each_way_to_save_at_the_end_alone(tmp_path: Path, way: str) -> None:
    for name, (code, errors) in ended(tmp_path, [way]).items():
        check(tmp_path, name, code, errors)


IN_A_BUCKET = """
import atexit
{imports}
@atexit.register
def before():
    tc.Manager({run!r}).save(3, TREE)
import numpy as np
import treeckpt as tc
TREE = {{"w": np.arange(3_000_000), "n": 1}}
{code}
"""


@pytest.mark.parametrize(
    ("imports", "code"),
    [
        ("", "atexit.register(lambda: tc.save_async({run!r} + '/step_00000002', TREE, step=2))"),
        pytest.param(
            "",
            "tc.save({run!r} + '/step_00000001', TREE, step=1)\n"
            "atexit.register(lambda: tc.save({run!r} + '/step_00000002', TREE, step=2))",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_saves_to_an_object_store_begin_at_the_end(s3: S3, imports: str, code: str) -> None:
    run = s3.url()
    done = run_program(IN_A_BUCKET.format(run=run, imports=imports, code=code.format(run=run)))
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    manager = tc.Manager(run)
    assert {2, 3} <= set(manager.steps())
    for step in manager.steps():
        assert tc.verify(manager.path(step)).ok
        assert np.array_equal(tc.load(manager.path(step))["w"], np.arange(3_000_000))
        store = tc.ObjectStore(manager.path(step))
        assert not [name for name in store.sizes() if name.startswith("progress")]
    assert not s3.uploads(run)


WITH_A_LOADER = """
import atexit, os, sys, threading
import torch
from torch.utils.data import DataLoader, TensorDataset
import treeckpt as tc

path = {path!r}
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randn(64, 3))
loader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)
batches = iter(loader)
next(batches)
{code}
atexit.register(lambda: tc.Manager(path).save(1, tc.training.state(model, optimizer)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", ["", "tc.save_async(path + '/other', {'n': 1})"])
def test_workers_of_a_data_loader_still_run(tmp_path: Path, code: str) -> None:
    done = run_program(WITH_A_LOADER.format(path=str(tmp_path / "run"), code=code))
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert tc.Manager(tmp_path / "run").steps() == [1] and tc.verify(tmp_path / "run/step_00000001").ok
