"""Finds the first step of a run with NaN or infinity: which arrays have it, and where in them.

What is known of a checkpoint comes from a verification that counted such elements in bytes that match their checksums:
what a damaged byte makes NaN is no NaN of the training. A scan verifies the checkpoints that nothing is known of, one
at a time, in an order that answers soon: the newest; by bisection the first with NaN of the present branch; those after
it, from which no run should go on; then those before it, as NaN may come and go. The counts, and the place of the first
such element of each array, are kept where verifications keep theirs, so that a scan that was cancelled goes on, and
`Manager`, `ls` and the dashboard pass over what it found. Damaged and unreadable checkpoints, and abandoned branches,
are counted and not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from .._core.format.byte_map import locate_chunks
from .._core.format.records import Index, Leaf, PerRankArrays
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import decode_runs
from .._core.sharding.region import Region
from .._core.text import count_text, json_number, region_text
from .._io.storage.open import open_store
from .._io.storage.store import Store
from ..errors import TreeckptError, visible
from . import discovery
from .catalog import CheckpointInfo, with_verification
from .statistics_store import LeafStatistics, StatisticsStore
from .verification import Verification, VerificationStore, verify_folder

MAX_ARRAYS = 100
"""Arrays of a step that are listed: the first ones in the tree."""


class ElementPlace(msgspec.Struct, frozen=True):
    """An element of an array, and the bytes that hold it."""

    index: list[int]
    """Of the global array."""
    region: str
    """The chunk that it is in."""
    rank: int
    """The rank that wrote the chunk."""
    file: str
    file_number: int
    """The number of the file in the checkpoint."""
    byte: int
    """The first byte of the element in the file."""


class ArrayFinding(msgspec.Struct, frozen=True):
    """An array with NaN or infinity."""

    leaf: int
    path: str
    dtype: str
    shape: list[int]
    nan: int
    infinite: int
    first_nan: ElementPlace | None
    """The first in C order; of an array for each rank, on the first such rank."""
    first_infinite: ElementPlace | None


class StepFinding(msgspec.Struct, frozen=True):
    """A checkpoint with NaN or infinity."""

    name: str
    step: int | None
    nan: int
    infinite: int
    arrays: int
    """Arrays with NaN or infinity."""
    rows: list[ArrayFinding]
    """The first of them, as many as MAX_ARRAYS; empty if where it is is no longer kept: it has to be read again."""

    @property
    def title(self) -> str:
        """The step, or the name of a checkpoint without one."""
        return _title(self)


class UnreadStep(msgspec.Struct, frozen=True):
    """A checkpoint of which it cannot be known whether it has NaN."""

    name: str
    step: int | None
    why: str


class NanReport(msgspec.Struct, frozen=True):
    """What is known of NaN and infinity in the checkpoints of the present branch of a run."""

    steps: int
    """Checkpoints of the branch."""
    known: int
    """Those of which it is known whether they have some."""
    nan: StepFinding | None
    """The earliest that is known to have NaN."""
    nan_text: str
    """What is proven of it."""
    infinite: StepFinding | None
    """The earliest that is known to have infinity, as masks do."""
    infinite_text: str
    metric_text: str
    """The first checkpoint of the branch whose metrics are not all finite; empty if there is none."""
    unread: list[UnreadStep]
    abandoned: int
    """Checkpoints of abandoned branches, which are not looked at."""
    complete: bool
    """Whether no checkpoint is left that a scan would read."""


# what is known --------------------------------------------------------------------------------------------------------


def count_of(info: CheckpointInfo, what: str) -> int | None:
    """Returns how many elements are `nan` or `infinite`; None if that is not known of the files as they are now."""
    found = info.verification
    if found is None or not found.ok or found.changed:
        return None
    return found.nan if what == "nan" else found.infinite


def known_statistics(info: CheckpointInfo, statistics: StatisticsStore) -> LeafStatistics | None:
    """Returns the statistics of a checkpoint's arrays; None if none are known of its files as they are now."""
    verified = info.verification
    if verified is None or verified.changed or not verified.ok:
        return None
    found = statistics.find(info.path, info.save_id)
    return found if found is not None and found.head.fingerprint == verified.fingerprint else None


def next_to_read(has_nan: Sequence[bool | None]) -> int | None:
    """Returns the number of the checkpoint that is read next; None if all are known.

    Args:
        has_nan: of each checkpoint, the oldest first; None where it is not known.
    """
    unknown = [at for at, known in enumerate(has_nan) if known is None]
    if True not in has_nan:
        return unknown[-1] if unknown else None
    bad = has_nan.index(True)
    clean = max((at for at in range(bad) if has_nan[at] is False), default=-1)
    between = [at for at in unknown if clean < at < bad]
    if between:
        return between[len(between) // 2]
    # those after it come first: they have larger numbers
    return unknown[-1] if unknown else None


def nan_report(
    infos: Iterable[CheckpointInfo],
    statistics: StatisticsStore,
    index_of: Callable[[CheckpointInfo], Index],
    failed: Mapping[str, str] | None = None,
) -> NanReport:
    """Returns what is known of the checkpoints of a run.

    Args:
        infos: newest first, with their verifications.
        index_of: returns the index of one.
        failed: why checkpoints could not be read, by name.
    """
    listed, failed = list(infos), failed or {}
    branch = _branch(listed)
    why = {info.name: text for info in branch if (text := _why_unread(info, failed))}
    counts = {what: [count_of(info, what) for info in branch] for what in ("nan", "infinite")}

    def finding(what: str) -> StepFinding | None:
        at = next((at for at, count in enumerate(counts[what]) if count), None)
        return None if at is None else _step_finding(branch[at], statistics, index_of)

    unread = [UnreadStep(visible(info.name), info.step, why[info.name]) for info in branch if info.name in why]
    readable = [count for info, count in zip(branch, counts["nan"], strict=True) if info.name not in why]
    return NanReport(
        steps=len(branch),
        known=len(branch) - counts["nan"].count(None),
        nan=finding("nan"),
        nan_text=_proof("NaN", branch, counts["nan"], why),
        infinite=finding("infinite"),
        infinite_text=_proof("infinity", branch, counts["infinite"], why),
        metric_text=_metric_text(branch),
        unread=unread,
        abandoned=sum(info.abandoned and info.status == "complete" for info in listed),
        complete=next_to_read(_flags(readable)) is None,
    )


def _branch(infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Returns the checkpoints of the present branch, the oldest first."""
    kinds = ("complete", "damaged", "unread")
    return [info for info in reversed(infos) if info.status in kinds and not info.abandoned]


def _why_unread(info: CheckpointInfo, failed: Mapping[str, str]) -> str:
    if info.status == "complete":
        return visible(failed.get(info.name, ""))
    state = "could not be read" if info.status == "unread" else "damaged"
    return visible(f"{state}: {info.problem}" if info.problem else state)


def _flags(counts: Iterable[int | None]) -> list[bool | None]:
    return [None if count is None else count > 0 for count in counts]


def _title(info: CheckpointInfo | StepFinding) -> str:
    return f"step {info.step:,}" if info.step is not None else f"checkpoint {visible(info.name)}"


def _proof(what: str, branch: Sequence[CheckpointInfo], counts: Sequence[int | None], why: Mapping[str, str]) -> str:
    """Returns what is proven, and what is not, of the first checkpoint with NaN or infinity."""
    flags, total = _flags(counts), len(branch)
    if not total:
        return "There is no checkpoint."
    at = flags.index(True) if True in flags else total
    unreadable = sum(info.name in why for info in branch[:at])
    missing = flags[:at].count(None) - unreadable
    left = [f"{count_text(missing, 'step')} not read yet"] * bool(missing)
    left += [f"{unreadable:,} damaged or unreadable"] * bool(unreadable)
    if at == total:
        known = total - flags.count(None)
        if not known:
            return f"Whether there is {what} is not known: {', '.join(left)}."
        if left:
            return f"No {what} in {known:,} of {count_text(total, 'step')}: {', '.join(left)}."
        return f"No {what} in {'any of the ' * (total > 1)}{count_text(total, 'step')}."
    title = _title(branch[at])
    first = title[0].upper() + title[1:]
    if not at:
        return f"{first} has {what}, and is the oldest."
    if not left:
        return f"{first} is the first with {what}: {_none_of(at)} before it has any."
    before = f", and {_title(branch[at - 1])} before it has none" if flags[at - 1] is False else ""
    return f"{first} has {what}{before}. Not known of earlier ones: {', '.join(left)}."


def _none_of(count: int) -> str:
    return f"none of the {count:,} steps" if count > 1 else "no step"


def _metric_text(branch: Iterable[CheckpointInfo]) -> str:
    for info in branch:
        for name, value in info.metrics.items():
            if not math.isfinite(value):
                return f"{visible(name[:200])} is {json_number(value)} in {_title(info)}, the first such metric."
    return ""


def _step_finding(
    info: CheckpointInfo, statistics: StatisticsStore, index_of: Callable[[CheckpointInfo], Index]
) -> StepFinding:
    found, rows, arrays = known_statistics(info, statistics), list[ArrayFinding](), 0
    if found is not None:
        index, columns = index_of(info), found.columns
        bad = np.flatnonzero((columns["nan"] > 0) | (columns["infinite"] > 0))
        arrays = len(bad)
        rows = [
            _array_finding(index, leaf, found, row)
            for row in bad[:MAX_ARRAYS].tolist()
            if 0 <= (leaf := int(columns["leaf"][row])) < len(index.entries)
        ]
    nan, infinite = (count_of(info, what) or 0 for what in ("nan", "infinite"))
    return StepFinding(visible(info.name), info.step, nan, infinite=infinite, arrays=arrays, rows=rows)


def _array_finding(index: Index, number: int, found: LeafStatistics, row: int) -> ArrayFinding:
    leaf, moments = index.entries[number], found.row(row)
    assert leaf.spec is not None, "statistics are those of arrays"
    places = [element_place(index, leaf, at) for at in (moments.first_nan, moments.first_infinite)]
    return ArrayFinding(
        number, leaf.path, leaf.spec.dtype, list(leaf.spec.shape), moments.nan, moments.infinite, *places
    )


def element_place(index: Index, leaf: Leaf, position: int) -> ElementPlace | None:
    """Returns where an element lies; None if there is none.

    Args:
        position: in C order, as in `Moments`: of an array for each rank, those of the first rank come first.
    """
    assert leaf.spec is not None, "a leaf with elements is an array"
    shape, size = leaf.spec.shape, math.prod(leaf.spec.shape)
    ranks = decode_runs(leaf.ranks or ()).tolist() if isinstance(leaf.record, PerRankArrays) else [None]
    if not 0 <= position < size * len(ranks):
        return None
    nth, flat = divmod(position, size)
    at = tuple(int(n) for n in np.unravel_index(flat, shape)) if shape else ()
    for chunk in locate_chunks(index, leaf, Region(at, (1,) * len(at))):
        if ranks[nth] in (None, chunk.rank):
            inside = 0
            for n, low, extent in zip(at, chunk.region.offset, chunk.region.shape, strict=True):
                inside = inside * extent + n - low
            byte = chunk.start + inside * dtype_of(leaf.spec.dtype).itemsize
            number = next(number for number, file in enumerate(index.file_list) if file.name == chunk.file.name)
            return ElementPlace(list(at), region_text(chunk.region), chunk.rank, chunk.file.name, number, byte)
    return None


# the scan -------------------------------------------------------------------------------------------------------------

OnStep = Callable[[CheckpointInfo, Store], Store]
"""Takes the checkpoint that is read next; returns its store, which may count what is read."""


def steps_of_run(run: str, known: VerificationStore) -> list[CheckpointInfo]:
    """Returns the checkpoints of a run, or the one at a path, newest first, with what is known of their bytes."""
    return [with_verification(info, open_store(info.path), known) for info in discovery.scan(run)]


def scan_for_nan(
    infos: Iterable[CheckpointInfo],
    known: VerificationStore,
    statistics: StatisticsStore,
    by: str,
    on_step: OnStep = lambda _, store: store,
) -> tuple[list[CheckpointInfo], dict[str, str]]:
    """Reads the checkpoints of which it is not known whether they have NaN, and keeps what it finds.

    Args:
        infos: of a run, newest first, as `steps_of_run` gives them.
        by: as in `Verification`.

    Returns:
        The checkpoints with what is known of them now, and why some could not be read, by name.
    """
    by_name = {info.name: info for info in infos}
    failed: dict[str, str] = {}
    while (info := _next(list(by_name.values()), statistics, failed)) is not None:
        folder = open_store(info.path)
        try:
            verification, why = _read(on_step(info, folder), by, statistics)
            kept = known.record(folder, verification, beside=False)
        except (TreeckptError, OSError) as error:
            failed[info.name] = f"{error}"
            continue
        by_name[info.name] = info = msgspec.structs.replace(info, verification=verification)
        if why or (kept and not verification.total) or known_statistics(info, statistics) is None:
            failed[info.name] = why or "; ".join(kept) or "its statistics could not be kept"
    return list(by_name.values()), failed


def _next(
    infos: Sequence[CheckpointInfo], statistics: StatisticsStore, failed: Mapping[str, str]
) -> CheckpointInfo | None:
    """Returns the checkpoint that is read next: at last the one with the first NaN, if it is not kept where that is."""
    branch = [info for info in _branch(infos) if not _why_unread(info, failed)]
    flags = _flags(count_of(info, "nan") for info in branch)
    if (at := next_to_read(flags)) is not None:
        return branch[at]
    first = branch[flags.index(True)] if True in flags else None
    return first if first is not None and known_statistics(first, statistics) is None else None


def _read(folder: Store, by: str, statistics: StatisticsStore) -> tuple[Verification, str]:
    """Verifies a checkpoint; returns what is kept of it, and why not all of it could be read."""
    report, verification = verify_folder(folder, by, statistics=statistics)
    parts = [f"{part.file}: {part.text}" for part in report.unread] + list(report.elsewhere)
    return verification, parts[0] if parts and not verification.total else ""
