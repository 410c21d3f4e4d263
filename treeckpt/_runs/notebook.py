"""HTML of managers and runs in a notebook: a few facts and a short table."""

from __future__ import annotations

import time

from .._core.columns import bytes_column, seconds_column
from .._core.html import Child, Html, el, facts, joined, table
from .._core.text import bytes_text, time_text
from .._io.storage.store import RunStore
from .active_saves import under_way_text
from .catalog import CheckpointInfo, sum_nbytes
from .discovery import scan

ROWS = 20
COLUMNS = ("checkpoint", "status", "step", "size", "leaves", "ranks", "saved", "took", "blocked")


def checkpoint_rows(found: list[CheckpointInfo]) -> list[tuple[Child, ...]]:
    """Returns a row of `COLUMNS` for each checkpoint."""
    size, took = bytes_column([info.nbytes for info in found]), seconds_column([info.seconds for info in found])
    blocked = seconds_column([info.blocked_seconds for info in found])
    return [
        (
            info.name,
            info.status_and_problem,
            info.step,
            size(info.nbytes) if info.nbytes is not None else None,
            info.leaves,
            info.world,
            time_text(info.created_ns),
            took(info.seconds) if info.seconds is not None else None,
            blocked(info.blocked_seconds) if info.blocked_seconds is not None else None,
        )
        for info in found
    ]


def run_html(run: str | RunStore, summary: str) -> Html:
    """Renders the newest checkpoints of a run as a table."""
    infos = [info for info in scan(run) if info.status != "foreign"]
    saving = [under_way_text(save, time.time_ns()) for info in infos for save in info.saving]
    return joined([
        el("p", el("code", summary)),
        facts([("complete checkpoints", sum(info.status == "complete" for info in infos)),
               ("on disk", bytes_text(sum_nbytes(infos)))]),
        *(el("p", text) for text in saving),
        table(COLUMNS, checkpoint_rows(infos[:ROWS]), right=("step", "size", "leaves", "ranks", "took", "blocked")),
        el("p", f"and {len(infos) - ROWS} older") if len(infos) > ROWS else None,
    ])  # fmt: skip
