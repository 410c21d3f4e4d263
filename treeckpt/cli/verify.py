"""The commands `verify` and `rebuild-index`: compare a checkpoint with its checksums, and repair it."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import msgspec

from .. import api
from ..core.numbers.unusual import reason_of
from ..core.text import bytes_text, seconds_text
from ..io.storage.open import open_folder, open_store
from ..io.storage.store import Store
from ..report.terminal import print_json, print_line, print_table
from ..reports import VerifyReport
from ..runs import catalog
from ..runs.progress_bar import stores_bar
from ..runs.statistics_store import StatisticsStore
from ..runs.verification import (
    VerificationStore,
    cache_directory,
    fingerprint_of,
    this_user,
    verification_of,
    verify_folder,
)
from .command import Commands, progress_of
from .show import index_summary

SHOWN = 20
_STATISTICS = "NaN, infinity, norm, mean, deviation and range of every array, from the same bytes; unusual ones first"


def add_verify(commands: Commands) -> None:
    """Adds `verify`."""
    verify = commands.add("verify", _verify, "read everything and compare it with its checksums", progress=True)
    verify.add_argument("checkpoint", metavar="CKPT")
    also = verify.add_mutually_exclusive_group()
    also.add_argument("--repair", action="store_true", help="make again what can be, and say what is lost")
    also.add_argument("--statistics", action="store_true", help=_STATISTICS)


def _verify(options: argparse.Namespace) -> int:
    shown = progress_of(options)
    nbytes = None if shown is False else catalog.read_info(options.checkpoint, follow=True).nbytes
    with stores_bar("verifying", nbytes, shown=shown) as counted:
        report = _verified(options, counted)
    rows = _statistics(options.checkpoint) if options.statistics and report.ok else None
    if options.json:
        print_json({"ok": report.ok, "report": report} | ({} if rows is None else {"statistics": rows}))
        return 0 if report.ok else 1
    state = "intact" if report.ok else f"{len(report.problems)} problem{'s' * (len(report.problems) > 1)}"
    took = seconds_text(report.seconds)
    amount = bytes_text(report.nbytes) + " intact" * (not report.ok)
    print_line(f"{options.checkpoint}: {report.files} shards, {amount} in {took}: {state}")
    for repair in report.repairs:
        print_line(f"  repaired {repair}", "yellow")
    for problem in report.problems:
        print_line(f"  {problem.file}: {problem.text}", "red")
    for one in report.leftovers[:SHOWN]:
        print_line(f"  {one.file}: {bytes_text(one.nbytes)} {one.why}", "yellow")
    if report.leftovers:
        nbytes = sum(one.nbytes for one in report.leftovers)
        text = f"{len(report.leftovers)} files of {bytes_text(nbytes)}: the next save there removes what is dead"
        print_line(f"  left over: {text}, and so does treeckpt gc {options.checkpoint}", "yellow")
    if options.repair and report.lost:
        more = f" and {len(report.lost) - SHOWN} more; --json gives all" if len(report.lost) > SHOWN else ""
        print_line(f"  lost: {', '.join(path or '<root>' for path in report.lost[:SHOWN])}{more}", "red")
    if rows is not None:
        _print_statistics(rows)
    return 0 if report.ok else 1


def _verified(options: argparse.Namespace, counted: Callable[[Store], Store]) -> VerifyReport:
    """Verifies a checkpoint, and keeps the result for the dashboard and for `ls`."""
    by, folder = this_user("treeckpt verify"), open_folder(options.checkpoint)
    store = counted(open_store(options.checkpoint))
    if options.repair:
        report = api.verify(store, repair=True)
        save_id = api.inspect(options.checkpoint).save_id
        entries = folder.listed().entries()  # as the repair left them
        verification = verification_of(report, save_id, fingerprint_of(entries, save_id), by)
    else:
        statistics = StatisticsStore(cache_directory()) if options.statistics else None
        report, verification = verify_folder(folder, store, by, statistics=statistics)
    VerificationStore(cache_directory()).record(folder, verification)
    return report


class StatisticsRow(msgspec.Struct, frozen=True):
    """The statistics of one array, as `verify --statistics --json` prints them."""

    path: str
    unusual: str
    count: int
    nan: int
    infinite: int
    norm: float
    mean: float
    deviation: float
    low: float
    high: float


def _statistics(checkpoint: str) -> list[StatisticsRow]:
    """Returns what the verification has kept; raises OSError if it could not be kept."""
    index, cache = api.inspect(checkpoint), cache_directory()
    found = StatisticsStore(cache).find(open_folder(checkpoint).url, index.save_id)
    if found is None:
        raise OSError(f"the statistics could not be written to {cache}; name another directory in TREECKPT_CACHE")
    rows: list[StatisticsRow] = []
    for at in found.ranking.order.tolist():
        one, path = found.row(at), index.entries[int(found.columns["leaf"][at])].path
        reason = reason_of(found.ranking, at, one.nan, one.infinite)
        numbers = (one.norm, one.mean, one.deviation, one.low, one.high)
        rows.append(StatisticsRow(path, reason, one.count, one.nan, one.infinite, *numbers))
    return rows


def _print_statistics(rows: list[StatisticsRow]) -> None:
    columns = ("array", "unusual", "NaN", "Inf", "norm", "mean", "std", "min", "max")
    shown = [
        (
            row.path,
            row.unusual,
            str(row.nan),
            str(row.infinite),
            *(f"{n:.5g}" for n in (row.norm, row.mean, row.deviation, row.low, row.high)),
        )
        for row in rows[:SHOWN]
    ]
    print_table(columns, shown, right=columns[2:])
    if len(rows) > SHOWN:
        print_line(f"  and {len(rows) - SHOWN} more arrays; --json gives all", "dim")


def add_rebuild_index(commands: Commands) -> None:
    """Adds `rebuild-index`."""
    rebuild = commands.add(
        "rebuild-index", _rebuild_index, "make a lost index.json again from the shards", progress=True
    )
    rebuild.add_argument("checkpoint", metavar="CKPT")
    rebuild.add_argument("--replace", action="store_true", help="even where there is an index")


def _rebuild_index(options: argparse.Namespace) -> int:
    with stores_bar("reading the shards", shown=progress_of(options)) as counted:
        index = api.rebuild_index(counted(open_store(options.checkpoint)), replace=options.replace)
    if options.json:
        print_json(index_summary(index))
    else:
        print_line(
            f"{options.checkpoint}: index.json made again, {len(index.leaves)} leaves, {bytes_text(index.nbytes)}"
        )
    return 0
