"""Whatever the order of their file operations: processes that save, delete, clean up and repair lose no committed save.

Nor does one of them tell another error than one of treeckpt, a reader get wrong values, or anything of a killed one
stay behind the next clean-up. `interleaved_checks` says exactly what must hold; it knows nothing of how that is done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
LOCAL, REMOTE = 500, 100
"""Cases of a slow test."""
SHARING = ("", "sharing:")
"""Before a place: whether the checkpoints of the run share files."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the scheduler reads /proc")


def played(place: str, first: int, count: int, *actions: str) -> list[dict[str, Any]]:
    """The cases of which something does not hold."""
    command = [sys.executable, "-m", "tests.crash.interleavings", place, f"{first}-{first + count}", *actions]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120 + 6 * count, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    *failed, counts = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(counts["cases"].values()) == count and sum(counts["failed"].values()) == len(failed)
    return failed


def text_of(failed: list[dict[str, Any]]) -> str:
    """How they went, each with the number by which it is played again."""
    rows = [{**case, "trace": "\n".join(case["trace"][-200:])} for case in failed[:3]]
    numbers = [case["number"] for case in failed]
    return "\n\n".join([f"cases {numbers}", *("\n".join(f"{k}: {v}" for k, v in row.items()) for row in rows)])


@pytest.mark.parametrize(("place", "count"), [(MEMORY, 30), ("s3", 3), (f"sharing:{MEMORY}", 40), ("sharing:s3", 2)])
def test_no_committed_save_is_lost_in_any_order_of_operations(place: str, count: int) -> None:
    failed = played(place, 0, count)
    assert not failed, text_of(failed)


def test_the_loss_is_seen_where_a_deletion_removes_an_index_that_it_did_not_look_at() -> None:
    # in this case the deletion stops between its look and the removal until the save has succeeded
    (case,) = played(MEMORY, 28, 1, "careless", "overwrite")
    assert case["violations"][0].startswith("lost: the save ")


@pytest.mark.slow
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("shard", range(32))
def test_many_orders_of_file_operations(sharing: str, shard: int) -> None:
    failed = played(sharing + MEMORY, 100_000 + shard * LOCAL, LOCAL)
    assert not failed, text_of(failed)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("shard", range(16))
def test_many_orders_of_requests(sharing: str, shard: int) -> None:
    failed = played(f"{sharing}s3", 200_000 + shard * REMOTE, REMOTE)
    assert not failed, text_of(failed)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("shard", range(4))
def test_many_orders_of_processes_on_hosts_of_their_own(sharing: str, shard: int) -> None:
    failed = played(f"{sharing}far:{MEMORY}", 300_000 + shard * LOCAL, LOCAL)
    assert not failed, text_of(failed)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("shard", range(4))
def test_many_orders_of_requests_from_hosts_of_their_own(sharing: str, shard: int) -> None:
    failed = played(f"{sharing}far:s3", 400_000 + shard * REMOTE, REMOTE)
    assert not failed, text_of(failed)
