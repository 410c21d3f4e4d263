"""What a killed save leaves, without a process that is killed."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from treeckpt._core.format.files import Progress, encode_progress, progress_name, step_name
from treeckpt._core.format.shard_header import shard_name
from treeckpt._io.process import this_process
from treeckpt._io.storage.open import open_run

DEAD = "d" * 16


def leave_killed(run: Any, step: int = 7, *, save_id: str = DEAD, ago: int = 100) -> None:
    """Leaves in a run what a killed save of two ranks leaves, of which one had reported."""
    folder, now = open_run(run).folder(step_name(step)), time.time_ns() - ago * 10**9
    folder.prepare()
    ended = msgspec.structs.replace(this_process(), started=this_process().started + 1)
    record = Progress(save_id, 0, 2, step, "write", 250, 1000, now - 5 * 10**9, now, owner=ended)
    folder.publish(progress_name(0, save_id), encode_progress(record), replace=True)
    folder.publish(shard_name(save_id, 0, 2), b"x", replace=True)
