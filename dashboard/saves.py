"""The queries of how a checkpoint was written: its shards and their extents."""

from __future__ import annotations

from collections.abc import Sequence

from treeckpt.core.analysis.outline import Outline
from treeckpt.core.format.byte_map import Extent, extents_in_file
from treeckpt.core.format.records import File, Index
from treeckpt.core.text import region_text
from treeckpt.errors import LayoutError

from .library import Missing
from .pages import (
    CheckpointRow,
    ExtentRow,
    FilePage,
    FileRow,
    FilesPage,
    StripPage,
)
from .queries import PAGE, short

__all__ = ["file_page", "files_page", "strip_page"]

MAX_EXTENTS = 1 << 18
"""Chunks of one shard that are made for a page."""
MAX_GROUPS = 7
MAX_SEGMENTS = 2000


def _file_row(number: int, file: File, largest: int) -> FileRow:
    share = file.nbytes / largest if largest else 0.0
    return FileRow(number, file.name, file.rank, file.part, file.nbytes, file.header, share)


def files_page(checkpoint: CheckpointRow, outline: Outline, start: int) -> FilesPage:
    """The shards of a checkpoint from number `start` on."""
    files = outline.index.file_list
    by_rank: dict[int, int] = {}
    for file in files:
        by_rank[file.rank] = by_rank.get(file.rank, 0) + file.nbytes
    mean = sum(by_rank.values()) / len(by_rank) if by_rank else 0.0
    most = max(by_rank, key=lambda rank: (by_rank[rank], -rank), default=None)
    largest = max((file.nbytes for file in files), default=0)
    rows = [_file_row(n, file, largest) for n, file in enumerate(files[start : start + PAGE], start)]
    return FilesPage(
        checkpoint=checkpoint,
        total=len(files),
        start=start,
        next=start + PAGE if start + PAGE < len(files) else None,
        nbytes=outline.index.nbytes,
        mean=mean,
        imbalance=by_rank[most] / mean if most is not None and mean else 1.0,
        largest_rank=most,
        rows=rows,
    )


def _file_of(index: Index, number: int) -> File:
    if not 0 <= number < len(index.file_list):
        raise Missing("There is no such shard in this checkpoint.")
    return index.file_list[number]


def _extents(index: Index, file: File) -> list[Extent]:
    try:
        return extents_in_file(index, file, most=MAX_EXTENTS)
    except LayoutError as error:
        raise Missing(f"This shard has more than {MAX_EXTENTS:,} chunks.") from error


def file_page(checkpoint: CheckpointRow, outline: Outline, number: int, start: int) -> FilePage:
    """One shard, with its extents from `start` on.

    Raises:
        Missing: there is none.
    """
    index = outline.index
    file = _file_of(index, number)
    extents = _extents(index, file)
    rows = [
        ExtentRow(e.leaf, short(index.entries[e.leaf].path), region_text(e.region), e.start, e.stop)
        for e in extents[start : start + PAGE]
    ]
    following = start + PAGE if start + PAGE < len(extents) else None
    largest = max(f.nbytes for f in index.file_list)
    return FilePage(checkpoint, _file_row(number, file, largest), len(extents), start, following, rows)


def strip_page(outline: Outline, number: int) -> StripPage:
    """A shard as a strip: its header, then stretches by the part of the tree that they belong to.

    Raises:
        Missing: there is none.
    """
    index = outline.index
    file = _file_of(index, number)
    names = _group_names(outline)
    groups = ["header", *dict.fromkeys(names.values()), "other parts", "padding"]
    where = {name: at for at, name in enumerate(groups)}
    extents = _extents(index, file)
    segments = _joined(
        [(e, where.get(names.get(index.entries[e.leaf].path.partition("/")[0], ""), len(groups) - 2)) for e in extents]
    )
    return StripPage(
        number,
        file.header + file.nbytes,
        groups,
        [[0, file.header, 0], *segments, *_unused(file, extents, len(groups) - 1)],
    )


def _unused(file: File, extents: Sequence[Extent], group: int) -> list[list[int]]:
    """Bytes of the data area that are no leaf's: none in what treeckpt writes, but an index may leave some out."""
    found: list[list[int]] = []
    reach = file.header
    for extent in extents:
        if extent.start > reach:
            found.append([reach, extent.start, group])
        reach = max(reach, extent.stop)
    end = file.header + file.nbytes
    return [*found, [reach, end, group]] if reach < end else found


def _group_names(outline: Outline) -> dict[str, str]:
    """The first steps of paths that get a colour of their own: those with the most bytes."""
    rows = sorted(outline.children(count=10_000), key=lambda row: -row.nbytes)
    return {row.key: short(row.key) for row in rows[:MAX_GROUPS] if row.nbytes}


def _joined(extents: Sequence[tuple[Extent, int]]) -> list[list[int]]:
    segments: list[list[int]] = []
    for extent, group in extents:
        if segments and segments[-1][2] == group and segments[-1][1] == extent.start:
            segments[-1][1] = extent.stop
        else:
            segments.append([extent.start, extent.stop, group])
    if len(segments) <= MAX_SEGMENTS:
        return segments
    # too fine to be seen: the largest stay, the rest shows as the background
    kept = sorted(segments, key=lambda s: s[0] - s[1])[:MAX_SEGMENTS]
    return sorted(kept)
