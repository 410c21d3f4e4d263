"""The table of crashes: how many processes save, how, over what, and who is killed where."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

__all__ = ["AFTER_COMMIT", "AFTER_RESULT", "CALLS", "Case", "all_cases", "some_cases"]


class Case(NamedTuple):
    processes: int
    how: str
    """"sync" or "background"."""
    what: str
    """"new" or "overwriting"."""
    who: str
    """What is killed: the "process" that made the call, or the whole "job"."""
    culprit: int
    """The rank that has the mine."""
    at: int | None
    """At which of its store calls; None nowhere."""
    after: bool = False
    """Behind its effect."""

    @property
    def words(self) -> list[Any]:
        return list(self)


_WRITING = ("create shard", "write shard", "write shard", "commit shard")
CALLS: dict[tuple[bool, str], tuple[str, ...]] = {
    (True, "new"): (
        *("prepare", "sizes", *_WRITING, "publish timings", "publish index", "sizes", "publish timings"),
        *("delete progress", "sizes"),
    ),
    (True, "overwriting"): (
        *("prepare", "sizes", "read index", *_WRITING, "publish timings", "read index", "publish index"),
        *("sizes", "publish timings", "sizes", "delete shard", "delete timings", "delete progress", "sizes"),
    ),
    (False, "new"): _WRITING,
    (False, "overwriting"): _WRITING,
}
"""What a save asks of its store, on rank 0 or on another one."""
AFTER_COMMIT = "publish index"
AFTER_RESULT = "delete progress"
"""The first call after all ranks were told that the save has succeeded."""


def _cases(processes: int, how: str, what: str, who: str, culprits: tuple[int, ...]) -> list[Case]:
    found: list[Case] = []
    for culprit in culprits:
        count = len(CALLS[culprit == 0, what])
        # what is left behind one call is what is found before the next, but for what others do meanwhile
        found += [Case(processes, how, what, who, culprit, at, after) for at in range(count) for after in (False, True)]
    return found


def all_cases(processes: int, how: str) -> list[Case]:
    """Every call of each kind of rank, before and after, with the process or the job killed."""
    found: list[Case] = []
    for what, who in itertools.product(("new", "overwriting"), ("job", "process")):
        if processes == 1 and who == "process" and how == "sync":
            continue  # that is the job
        found += [Case(processes, how, what, who, 0, None)] * (who == "job")
        found += _cases(processes, how, what, who, (0, processes - 1) if processes > 1 else (0,))
    return found


def some_cases() -> list[Case]:
    """A few of them, where it matters most: around the commits of shards and of the save."""
    publish = {what: CALLS[True, what].index(AFTER_COMMIT) for what in ("new", "overwriting")}
    over, new = publish["overwriting"], publish["new"]
    return [
        Case(4, "sync", "overwriting", "job", 0, None),
        Case(4, "sync", "overwriting", "job", 0, over),
        Case(4, "sync", "overwriting", "job", 0, over, True),
        Case(4, "sync", "new", "process", 3, 3, True),
        Case(4, "background", "new", "job", 0, new),
        Case(1, "background", "overwriting", "job", 0, over),
    ]
