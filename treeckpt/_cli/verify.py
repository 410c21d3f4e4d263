"""The commands `verify`, `rebuild-index` and `flatten`: compare checkpoints with their checksums, and repair one."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Collection, Sequence

import msgspec

from .. import _api
from .._core.columns import numbers_column
from .._core.format.files import is_step_name
from .._core.format.index import INDEX_NAME
from .._core.text import bytes_text, count_text, json_number, seconds_text
from .._inspect.ranking import reason_of
from .._io.storage.checkpoint import read_index_bytes
from .._io.storage.open import open_store
from .._io.storage.store import Store
from .._loading.flatten import flatten_store
from .._loading.verify import SHOWN_LEAVES
from .._report.terminal import print_json, print_line, print_table
from .._runs import catalog, discovery
from .._runs.catalog import CheckpointInfo
from .._runs.progress_bar import counting_bar, stores_bar
from .._runs.repair_advice import repair_advice
from .._runs.statistics_store import StatisticsStore
from .._runs.step_names import has_steps
from .._runs.verification import (
    NO_CACHE,
    VerificationStore,
    cache_directory,
    fingerprint_of,
    this_user,
    verification_of,
    verify_folder,
)
from ..errors import CheckpointNotFound, CorruptError, FormatError, StoreError
from ..reports import Problem, VerifyReport
from .command import UNREAD, Commands, progress_of
from .show import index_summary

SHOWN_LINES = 20
_LEFT_OUT = {
    "no index": "have no index",
    "symbolic link": "are symbolic links",
    "deleted meanwhile": "were deleted meanwhile",
}
"""Why a step of a run is not verified: in JSON, and of several in a sentence."""
_STATISTICS = "NaN, infinity, norm, mean, deviation and range of every array, from the same bytes; unusual ones first"


def add_verify(commands: Commands) -> None:
    """Adds `verify`."""
    verify = commands.add("verify", _verify, "read everything and compare it with its checksums", progress=True)
    verify.add_argument("checkpoint", metavar="CKPT", help="or a RUN: each of its checkpoints, newest first")
    verify.set_defaults(unread_code=UNREAD)
    also = verify.add_mutually_exclusive_group()
    also.add_argument(
        "--repair", action="store_true", help="of one checkpoint: make again what can be, and say what is lost"
    )
    also.add_argument("--statistics", action="store_true", help=f"of one checkpoint: {_STATISTICS}")


def add_flatten(commands: Commands) -> None:
    """Adds `flatten`."""
    text = "give a checkpoint files of its own in the place of those that it shares with others of its run"
    flatten = commands.add("flatten", _flatten, text)
    flatten.add_argument("checkpoint", metavar="CKPT")


def _flatten(options: argparse.Namespace) -> int:
    made = flatten_store(open_store(options.checkpoint))
    if options.json:
        print_json({"checkpoint": options.checkpoint, "files": made})
    elif made:
        print_line(f"{options.checkpoint}: {count_text(len(made), 'shard')} copied; it needs no other checkpoint now")
    else:
        print_line(f"{options.checkpoint}: shares no files with other checkpoints")
    return 0


def _verify(options: argparse.Namespace) -> int:
    shown, path = progress_of(options), options.checkpoint
    alone = options.repair or options.statistics
    if not alone and (not discovery.is_checkpoint(path) or has_steps(open_store(path))):
        found = discovery.scan(path) if discovery.run_exists(path) else []
        if any(info.files not in ("partial", "foreign") for info in found):
            return _verify_run(options, found)
    # Only the bar needs it, for the total.
    info = None if shown is False else catalog.read_info(path, follow=True, or_unread=True)
    with stores_bar("verifying", info.nbytes if info else None, shown=shown) as counted:
        report = _verified(path, options, counted)
    rows = _statistics(path) if options.statistics and report.ok and not report.elsewhere else None
    if options.json:
        print_json(_row_of(report) | ({} if rows is None else {"statistics": _json_of(rows)}))
        return _exit_code([report])
    print_line(_line(path, report))
    for repair in report.repairs:
        print_line(f"  repaired {repair}", "yellow")
    for problem in report.problems:
        print_line(f"  {problem.file}: {problem.text}", "red")
    if (most := max((len(problem.leaves) for problem in report.problems), default=0)) > SHOWN_LEAVES:
        print_line(f"  up to {most:,} leaves are damaged by one problem; --json names all of them", "dim")
    for problem in report.unread:
        print_line(f"  {problem.file}: {problem.text}", "yellow")
    for note in report.notes:
        print_line(f"  {note}", "yellow")
    for disk in report.elsewhere[:SHOWN_LINES]:
        print_line(f"  not here: {disk}")
    for one in report.leftovers[:SHOWN_LINES]:
        print_line(f"  {one.file}: {bytes_text(one.nbytes)} {one.why}", "yellow")
    if report.leftovers:
        nbytes = sum(one.nbytes for one in report.leftovers)
        files = count_text(len(report.leftovers), "file")
        also = "" if report.problems else f", and so does treeckpt gc {path}"
        text = f"{files} of {bytes_text(nbytes)}: the next save there removes what is dead{also}"
        print_line(f"  left over: {text}", "yellow")
    if report.problems and not options.repair:
        info = catalog.read_info(path, follow=True, or_unread=True)
        known = VerificationStore(cache_directory())
        if (advice := repair_advice(catalog.with_verification(info, open_store(path), known))) is not None:
            print_line(f"  {advice.text}")
    if options.repair and report.lost:
        more = f" and {len(report.lost) - SHOWN_LINES} more; --json gives all" if len(report.lost) > SHOWN_LINES else ""
        print_line(f"  lost: {', '.join(path or '<root>' for path in report.lost[:SHOWN_LINES])}{more}", "red")
    if rows is not None:
        _print_statistics(rows)
    return _exit_code([report])


def _exit_code(reports: Collection[VerifyReport]) -> int:
    verdicts = {report.verdict for report in reports}
    return 1 if "damaged" in verdicts else UNREAD if "unread" in verdicts else 0


def _row_of(report: VerifyReport) -> dict[str, object]:
    """Returns a report for JSON; `ok` is null where that is not known, as something could not be read."""
    return {"ok": None if report.verdict == "unread" else report.ok, "verdict": report.verdict, "report": report}


def _line(path: str, report: VerifyReport) -> str:
    amount = bytes_text(report.nbytes) + " intact" * (not report.ok)
    return f"{path}: {count_text(report.files, 'shard')}, {amount} in {seconds_text(report.seconds)}: {report.state}"


def _verify_run(options: argparse.Namespace, infos: Sequence[CheckpointInfo]) -> int:
    """Verifies the checkpoints of a run that have an index, and prints a line for each."""
    whole = [info for info in infos if info.files not in ("partial", "foreign")]
    reports: dict[str, VerifyReport] = {}
    total = sum(info.nbytes or 0 for info in whole)
    what = f"verifying {count_text(len(whole), 'checkpoint')}"
    with stores_bar(what, total, shown=progress_of(options)) as counted:
        for info in whole:
            with contextlib.suppress(CheckpointNotFound):  # it was deleted meanwhile
                try:
                    reports[info.path] = _verified(info.path, options, counted)
                except (CorruptError, FormatError) as error:
                    reports[info.path] = VerifyReport(info.path, 0, 0, (Problem(INDEX_NAME, f"{error}"),), 0.0)
    left_out = _left_out(infos, reports)
    if options.json:
        rows = [_row_of(report) for report in reports.values()]
        others = [(info.path, why) for why, some in left_out.items() for info in some]
        print_json(rows + [{"ok": None, "path": path, "not_verified": why} for path, why in others])
        return _exit_code(reports.values())
    for path, report in reports.items():
        parts = (*report.problems, *report.unread)
        first = "".join(f"; {one.file}: {one.text}" for one in parts[:1])
        first += f"; and {len(parts) - 1:,} more, which treeckpt verify {path} prints" * (len(parts) > 1)
        print_line(_line(path, report) + first, {"intact": "", "damaged": "red", "unread": "yellow"}[report.verdict])
    for note in dict.fromkeys(note for report in reports.values() for note in report.notes):
        print_line(f"  {note}", "yellow")
    for why, some in left_out.items():
        if some:
            print_line(f"not verified, as they {_LEFT_OUT[why]}: {', '.join(info.name for info in some)}", "yellow")
    for info in left_out["no index"][:SHOWN_LINES]:
        advice = repair_advice(info)
        print_line(f"  {info.name}: {info.error}{f'. {advice.text}' if advice is not None else ''}", "yellow")
    return _exit_code(reports.values())


def _left_out(infos: Sequence[CheckpointInfo], verified: Collection[str]) -> dict[str, list[CheckpointInfo]]:
    """Returns the steps of a run that were not verified, by the reason."""
    steps = [(info, open_store(info.path)) for info in infos if is_step_name(info.name)]
    links = [info for info, folder in steps if folder.is_link and not folder.traits.follow_links]
    whole = [info for info in infos if info.files not in ("partial", "foreign")]
    return {
        "no index": [info for info in infos if info.files == "partial"],
        "symbolic link": links,
        "deleted meanwhile": [info for info in whole if info.path not in verified],
    }


def _verified(path: str, options: argparse.Namespace, counted: Callable[[Store], Store]) -> VerifyReport:
    """Verifies a checkpoint, and keeps the result for the dashboard and for `ls`, damage also for clean-ups."""
    by, folder = this_user("treeckpt verify"), open_store(path)
    store = counted(folder)
    try:
        if options.repair:
            report = _api.verify(store, repair=True)
            save_id, index = _api.inspect(path).save_id, read_index_bytes(folder)
            entries = folder.listed().entries()  # as the repair left them
            verification = verification_of(report, save_id, fingerprint_of(entries, save_id), by, index=index)
        else:
            cache = cache_directory() if options.statistics else None
            statistics = StatisticsStore(cache) if cache is not None else None
            report, verification = verify_folder(store, by, statistics=statistics)
    except StoreError as error:
        return VerifyReport(path, 0, 0, (), 0.0, unread=(Problem(INDEX_NAME, f"{error}"),))
    failed = VerificationStore(cache_directory()).record(folder, verification, beside=True)
    return msgspec.structs.replace(report, notes=(*report.notes, *failed))


class StatisticsRow(msgspec.Struct, frozen=True):
    """The statistics of one array, as `verify --statistics --json` prints them; None where no element is finite."""

    path: str
    unusual: str
    count: int
    nan: int
    infinite: int
    norm: float | None
    mean: float | None
    deviation: float | None
    low: float | None
    """The smallest value; in JSON a text for an integer beyond 2**53, as `high`."""
    high: float | None


def _statistics(checkpoint: str) -> list[StatisticsRow]:
    """Returns what the verification has kept; raises OSError if it could not be kept."""
    index, cache = _api.inspect(checkpoint), cache_directory()
    if cache is None:
        raise OSError(f"the statistics could not be kept: {NO_CACHE}")
    statistics = StatisticsStore(cache).find(open_store(checkpoint).place, index.save_id)
    if statistics is None:
        raise OSError(f"the statistics could not be written to {cache}; name another directory in TREECKPT_CACHE")
    rows: list[StatisticsRow] = []
    for at in statistics.ranking.order.tolist():
        one, path = statistics.row(at), index.entries[int(statistics.columns["leaf"][at])].path
        reason = reason_of(statistics.ranking, at, one.nan, one.infinite)
        numbers = (one.norm, one.mean, one.deviation, one.low, one.high) if one.finite else (None,) * 5
        rows.append(StatisticsRow(path, reason, one.count, one.nan, one.infinite, *numbers))
    return rows


def _json_of(rows: list[StatisticsRow]) -> list[dict[str, object]]:
    return [{name: json_number(value) for name, value in msgspec.structs.asdict(row).items()} for row in rows]


def _texts(column: list[float | None]) -> list[str]:
    text = numbers_column(column)
    return ["-" if number is None else text(number) for number in column]


def _print_statistics(rows: list[StatisticsRow]) -> None:
    columns = ("array", "unusual", "NaN", "Inf", "norm", "mean", "std", "min", "max")
    shown = rows[:SHOWN_LINES]
    numbers = [_texts([getattr(row, name) for row in shown]) for name in ("norm", "mean", "deviation", "low", "high")]
    shown = [
        (row.path, row.unusual, f"{row.nan:,}", f"{row.infinite:,}", *texts)
        for row, *texts in zip(shown, *numbers, strict=True)
    ]
    print_table(columns, shown, right=columns[2:])
    if len(rows) > SHOWN_LINES:
        print_line(f"  and {count_text(len(rows) - SHOWN_LINES, 'more array')}; --json gives all", "dim")


def add_rebuild_index(commands: Commands) -> None:
    """Adds `rebuild-index`."""
    rebuild = commands.add(
        "rebuild-index", _rebuild_index, "make a lost index.json again from the shards", progress=True
    )
    rebuild.add_argument("checkpoint", metavar="CKPT")
    rebuild.add_argument("--replace", action="store_true", help="even where there is an index")


def _rebuild_index(options: argparse.Namespace) -> int:
    with counting_bar("reading the shards", shown=progress_of(options)) as count:
        index = _api.rebuild_index(options.checkpoint, replace=options.replace, on_read=count)
    if options.json:
        print_json(index_summary(index))
    else:
        leaves = count_text(len(index.leaves), "leaf", "leaves")
        print_line(f"{options.checkpoint}: index.json made again, {leaves}, {bytes_text(index.nbytes)}")
    return 0
