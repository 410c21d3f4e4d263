"""The pages of the files of a checkpoint: extents and checksums of shards, the balance of ranks, and sidecar files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

import msgspec

from treeckpt._core.format.byte_map import Extent, extents_in_file
from treeckpt._core.format.files import Sidecar
from treeckpt._core.format.records import File, Index
from treeckpt._core.text import region_text
from treeckpt._io.os_errors import shows_damage
from treeckpt._io.storage.checkpoint import Checkpoint, read_sidecar
from treeckpt._io.storage.shard_reader import verify_shard
from treeckpt._io.storage.store import Store
from treeckpt._runs.verification import MAX_PROBLEMS, DamagedPart
from treeckpt.errors import LayoutError, TreeckptError, visible

from ..pages.checkpoints import PAGE_ROWS, CheckpointRow, OwnTree, filled, next_start, shorten
from ..store.library import NotFound
from .verify import keep_damage

PART = 64 << 20
"""Bytes whose checksums one request compares."""
MAX_EXTENTS = 1 << 18
"""Extents of one shard that are listed for a page."""
MAX_GROUPS = 7
"""Parts of the tree that have a colour of their own in a strip."""
MAX_SEGMENTS = 2000
"""Segments drawn in one strip."""
MAX_SHOWN = 256 << 10
"""Bytes of a file that are shown."""


FileState = Literal["intact", "not verified", "damaged", "missing", "cut short", "unread"]
"""missing and cut short by the listing of the directory; unread: the last verification could not read all of it."""


class FileRow(msgspec.Struct, frozen=True):
    """One shard."""

    number: int
    name: str
    rank: int
    part: int
    nbytes: int
    header: int
    share: float
    """Its bytes as a share of the largest shard's."""
    directory: str = ""
    """The directory of the checkpoint of the run in which it lies, where that is another one."""
    state: FileState = "not verified"
    problem: str | None = None
    """What the last verification found in it, or the listing of the directory."""


class FilesPage(msgspec.Struct, frozen=True):
    """The shards of a checkpoint."""

    checkpoint: CheckpointRow
    total: int
    start: int
    next: int | None
    nbytes: int
    mean: float
    """Mean bytes of a rank."""
    imbalance: float
    """Bytes of the rank that wrote the most, as a multiple of the mean."""
    largest_rank: int | None
    rows: list[FileRow]
    sidecars: list[Sidecar]
    """Files that were saved with it."""


class ExtentRow(msgspec.Struct, frozen=True):
    """A contiguous byte range of a shard and the leaf it belongs to."""

    leaf: int
    path: str
    region: str
    start: int
    stop: int
    damaged: bool
    """Whether any of these bytes is known to be damaged."""


class FilePage(msgspec.Struct, frozen=True):
    """One shard and a page of its extents."""

    checkpoint: CheckpointRow
    file: FileRow
    total: int
    start: int
    next: int | None
    rows: list[ExtentRow]


class StripPage(msgspec.Struct, frozen=True):
    """A shard as a strip of segments [first byte, byte past the last, group]; neighbours of one group are joined."""

    file: int
    nbytes: int
    groups: list[str]
    segments: list[list[int]]
    damaged: list[list[int]]
    """[first byte, byte past the last] of what is known to be damaged."""


class ChecksumsPage(msgspec.Struct, frozen=True):
    """The result of comparing a part of a shard's data with its checksums."""

    file: int
    name: str
    start: int
    stop: int
    tested: int
    """Where the bytes end of which `problem` names some; `stop` without one."""
    nbytes: int
    """Bytes of all data of the shard."""
    next: int | None
    """The start of the next part; None at the end, or if something is wrong."""
    problem: str | None
    """What is wrong."""


class BalancePage(msgspec.Struct, frozen=True):
    """The bytes that each rank wrote."""

    ranks: list[int]
    nbytes: list[int]
    mean: float


def _file_rows(tree: OwnTree, numbers: range) -> list[FileRow]:
    """Returns the rows of the shards with these numbers."""
    files = tree.index.file_list
    largest = max((file.nbytes for file in files), default=0)
    sizes, found = tree.sizes, tree.checkpoint.info.verification
    damaged = {part.file: visible(part.text) for part in reversed(found.problems)} if found is not None else {}
    unread = {part.file: visible(part.text) for part in reversed(found.unread)} if found is not None else {}
    # of very many problems only the first are kept
    all_known = (
        found is not None
        and not found.changed
        and found.total <= len(found.problems)
        and len(found.unread) < MAX_PROBLEMS
    )
    rows: list[FileRow] = []
    for number in numbers:
        file = files[number]
        state: FileState = "not verified"
        problem = damaged.get(file.name)
        size, wanted = sizes.get(file.name), file.header + file.nbytes
        if size is None or size < wanted:
            state = "missing" if size is None else "cut short"
            problem = (
                f"there is no such file in {file.directory or tree.row.name}"
                if size is None
                else f"{size} of {wanted} bytes"
            )
        elif problem is not None:
            state = "damaged"
        elif (text := unread.get(file.name)) is not None:
            state, problem = "unread", text
        elif found is not None and all_known and (found.complete or found.unread):
            # every shard was compared: those that no problem names are intact
            state = "intact"
        share = file.nbytes / largest if largest else 0.0
        rows.append(filled(FileRow, file, number=number, share=share, state=state, problem=problem))
    return rows


def _rank_nbytes(files: Sequence[File]) -> tuple[dict[int, int], float]:
    """Returns the bytes that each rank wrote, and their mean."""
    by_rank: dict[int, int] = {}
    for file in files:
        by_rank[file.rank] = by_rank.get(file.rank, 0) + file.nbytes
    return by_rank, sum(by_rank.values()) / len(by_rank) if by_rank else 0.0


def files_page(tree: OwnTree, start: int = 0) -> FilesPage:
    """The shards."""
    files = tree.index.file_list
    by_rank, mean = _rank_nbytes(files)
    most = max(by_rank, key=lambda rank: (by_rank[rank], -rank), default=None)
    return FilesPage(
        checkpoint=tree.row,
        total=len(files),
        start=start,
        next=next_start(start, len(files)),
        nbytes=tree.index.nbytes,
        mean=mean,
        imbalance=by_rank[most] / mean if most is not None and mean else 1.0,
        largest_rank=most,
        rows=_file_rows(tree, range(start, min(start + PAGE_ROWS, len(files)))),
        sidecars=list(tree.index.sidecars),
    )


def _file_of(index: Index, number: int) -> File:
    if not 0 <= number < len(index.file_list):
        raise NotFound("There is no such shard in this checkpoint.")
    return index.file_list[number]


def _extents(index: Index, file: File) -> list[Extent]:
    try:
        return extents_in_file(index, file, most=MAX_EXTENTS)
    except LayoutError as error:
        raise NotFound(f"This shard has more than {MAX_EXTENTS:,} chunks.") from error


def file_page(tree: OwnTree, number: int, start: int = 0) -> FilePage:
    """One shard, with a page of its extents.

    Raises:
        NotFound: there is no such shard.
    """
    index = tree.index
    file = _file_of(index, number)
    extents = _extents(index, file)
    damage = tree.damage
    rows = [
        ExtentRow(
            e.leaf,
            shorten(index.entries[e.leaf].path),
            region_text(e.region),
            e.start,
            e.stop,
            damage.of_bytes(file.name, e.start, e.stop),
        )
        for e in extents[start : start + PAGE_ROWS]
    ]
    following = next_start(start, len(extents))
    [row] = _file_rows(tree, range(number, number + 1))
    return FilePage(tree.row, row, len(extents), start, following, rows)


def strip_page(tree: OwnTree, number: int) -> StripPage:
    """The extents of a shard as few segments, to be drawn.

    First is its header, then its byte ranges by the part of the tree that they belong to.

    Raises:
        NotFound: there is no such shard.
    """
    index = tree.index
    file = _file_of(index, number)
    parts = tree.outline.children(count=10_000)
    # those with the most bytes have a colour of their own
    largest = [row for row in sorted(parts, key=lambda row: -row.nbytes)[:MAX_GROUPS] if row.nbytes]
    groups = ["header", *dict.fromkeys(shorten(row.key) for row in largest), "other parts", "padding"]
    # From 1 on, because a part of the tree may be called "header" too.
    groups_of = {row.node: groups.index(shorten(row.key), 1) for row in largest}
    starts = [row.first for row in parts] + [row.first + row.leaves for row in parts[-1:]]
    kinds = [*(groups_of.get(row.node, len(groups) - 2) for row in parts), len(groups) - 2]
    extents = _extents(index, file)
    segments = _join_neighbours([(extent, kinds[bisect_right(starts, extent.leaf) - 1]) for extent in extents])
    return StripPage(
        number,
        file.header + file.nbytes,
        groups,
        [[0, file.header, 0], *segments, *_unused(file, extents, len(groups) - 1)],
        [[one.start, one.stop] for one in tree.damage.bad if one.file == file.name][:MAX_SEGMENTS],
    )


def _unused(file: File, extents: Sequence[Extent], group: int) -> list[list[int]]:
    """Returns segments of bytes of no leaf. treeckpt writes none, but an index may omit some bytes."""
    segments: list[list[int]] = []
    reach = file.header
    for extent in extents:
        if extent.start > reach:
            segments.append([reach, extent.start, group])
        reach = max(reach, extent.stop)
    end = file.header + file.nbytes
    return [*segments, [reach, end, group]] if reach < end else segments


def _join_neighbours(extents: Sequence[tuple[Extent, int]]) -> list[list[int]]:
    segments: list[list[int]] = []
    for extent, group in extents:
        if segments and segments[-1][2] == group and segments[-1][1] == extent.start:
            segments[-1][1] = extent.stop
        else:
            segments.append([extent.start, extent.stop, group])
    if len(segments) <= MAX_SEGMENTS:
        return segments
    # too small to be seen: the largest are drawn, the rest stays background
    kept = sorted(segments, key=lambda s: s[0] - s[1])[:MAX_SEGMENTS]
    return sorted(kept)


def checksums_page(tree: OwnTree, number: int, start: int = 0) -> ChecksumsPage:
    """Compares a part of a shard with its checksums; `next` is the start of the next part.

    A part has up to PART bytes of data. What is damaged is kept as by a verification.

    Raises:
        NotFound: there is no such shard.
        StoreError, OSError: it could not be read, which says nothing of the bytes.
    """

    def compare(store: Store, index: Index) -> ChecksumsPage:
        file = _file_of(index, number)
        low = min(start, file.nbytes)
        high, problem = min(low + PART, file.nbytes), None
        try:
            verify_shard(store, Checkpoint(store, index).shard(file), low, high)
        except (TreeckptError, OSError) as error:
            if not shows_damage(error):
                raise
            problem = visible(str(error))
        following = high if problem is None and high < file.nbytes else None
        stop = high if problem is None else low
        return ChecksumsPage(
            number, file.name, start=low, stop=stop, tested=high, nbytes=file.nbytes, next=following, problem=problem
        )

    page = tree.read(compare, problem_of=attrgetter("problem"))
    if page.problem:
        header = _file_of(tree.index, number).header
        keep_damage(tree, DamagedPart(page.name, page.problem, header + page.start, header + page.tested))
    return page


def balance_page(tree: OwnTree) -> BalancePage:
    """The bytes that each rank wrote."""
    by_rank, mean = _rank_nbytes(tree.index.file_list)
    return BalancePage(list(by_rank), list(by_rank.values()), mean)


class SidecarPage(msgspec.Struct, frozen=True):
    """One file that was saved with a checkpoint."""

    checkpoint: CheckpointRow
    number: int
    file: Sidecar
    text: str | None
    """The first MAX_SHOWN bytes of it; None if they are no UTF-8 text."""
    shown: int
    """How many bytes the text stands for."""


def sidecar_file(tree: OwnTree, number: int) -> tuple[Sidecar, bytes]:
    """Returns a sidecar file, of 64 MiB at most, and its content, which matches its checksum.

    Raises:
        NotFound: there is no such file.
        CheckpointError: it is missing or damaged.
    """

    def read(store: Store, index: Index) -> tuple[Sidecar, bytes]:
        if not 0 <= number < len(index.sidecars):
            raise NotFound("There is no such file in this checkpoint.")
        return index.sidecars[number], read_sidecar(store, index, index.sidecars[number].name)

    return tree.read(read)


def sidecar_page(tree: OwnTree, number: int) -> SidecarPage:
    """A file that was saved with the checkpoint: its name, its checksum, and its text, if it is one.

    Raises:
        NotFound, CheckpointError: as `sidecar_file`.
    """
    sidecar, data = sidecar_file(tree, number)
    first = data[:MAX_SHOWN]
    try:
        # the cut may be inside a character
        text = first.decode("utf-8", "strict" if len(first) == len(data) else "ignore")
    except UnicodeDecodeError:
        text = None
    return SidecarPage(tree.row, number, sidecar, None if text is None or "\0" in text else text, len(first))
