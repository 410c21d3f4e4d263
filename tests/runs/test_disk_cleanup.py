"""What ranks do together with a run on one disk, of which they see other states as something is written there."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

import treeckpt as tc
from tests.helpers.world import errors_of, on_ranks
from treeckpt._core.format.files import Owner, step_name
from treeckpt._io.process import this_process
from treeckpt._runs import disk_cleanup

WORLD = 3


@pytest.mark.parametrize("machines", ["one", "several"])
def test_a_disk_that_changes_meanwhile_is_not_taken_for_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machines: str
) -> None:
    """Else several ranks would delete one step, of which one alone can."""
    numbers = itertools.count()

    def another() -> Owner:
        return Owner(f"host{next(numbers)}", 1, "boot")

    # each rank looks at another moment of a save in the background
    monkeypatch.setattr(disk_cleanup, "_disk_digest", lambda run: os.urandom(16))
    monkeypatch.setattr(disk_cleanup, "this_process", this_process if machines == "one" else another)

    def act(comm) -> None:
        with tc.Manager(tmp_path, keep=None, background=False, comm=comm) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"v": step})
            assert disk_cleanup.look_at_disks(comm, manager.directory, "look") is None
            manager.pin(2)
            manager.delete(1)
            manager.unpin(2)
            manager.delete(2)
            assert manager.clean().left == () and manager.steps() == [3]

    assert errors_of(on_ranks(WORLD, act)) == [None] * WORLD
    assert not (tmp_path / step_name(1)).exists() and not (tmp_path / step_name(2)).exists()
