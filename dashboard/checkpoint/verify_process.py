"""The process that verifies one checkpoint: it reads every byte without holding up the server, and can be killed.

It prints how many bytes it has read, what it found in each shard, and its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from treeckpt._io.storage.local_store import for_reading
from treeckpt._io.storage.wrapped_store import CountingStore
from treeckpt._runs.statistics_store import StatisticsStore
from treeckpt._runs.verification import DamagedPart, Verification, shown_parts, this_user, verify_folder
from treeckpt.reports import Problem

from ..store.jobs import Failed, JobProgress, ReadPrinter, folder_at, send


class Found(msgspec.Struct, tag="found"):
    """Problems of one shard."""

    problems: list[DamagedPart]
    total: int


class Result(msgspec.Struct, tag="result"):
    """The verification has ended."""

    verification: Verification


Message = JobProgress | Found | Result | Failed


class _Printer(ReadPrinter):
    def add_shard(self, problems: Sequence[Problem]) -> None:
        self.shards += 1
        if problems:
            send(Found(shown_parts(problems), len(problems)))
        self.print()


def main(arguments: Sequence[str]) -> None:
    """Verifies a checkpoint.

    Args:
        arguments: the URL of a run, empty for a local folder; the name of the folder in it, or its path; the cache
            directory, in which the statistics of all arrays are kept.
    """
    run, name, cache = arguments
    printer = _Printer()
    folder = folder_at(run, name)
    folder = CountingStore(for_reading(folder), printer.add)
    by, statistics = this_user("dashboard"), StatisticsStore(Path(cache))
    report, verification = verify_folder(folder, by, on_shard=printer.add_shard, statistics=statistics)
    send(Result(verification))
    if report.unread:
        first, more = report.unread[0], ". ".join(report.notes)
        send(Failed(f"{report.state}, first {first.file}: {first.text}. {more}"))
    if verification.ok and statistics.find(folder.place, verification.save_id) is None:
        send(Failed("the statistics of its arrays could not be written to the cache"))
