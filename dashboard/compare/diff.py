"""The page of the difference of two checkpoints: by index, by checksums, and element by element on demand.

The difference of two indexes stays in memory while both files stay the same. Contents are compared by the checksums in
the headers of shards, only for the arrays that a page shows; small ones of which these cannot tell are read, and others
only by `delta`, up to a limit.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

from treeckpt._core.format.byte_map import chunk_count
from treeckpt._core.format.records import Index
from treeckpt._core.text import json_number
from treeckpt._inspect.diff import Added, Change, Changed, Moved, Removed, comparable, diff
from treeckpt._inspect.outline import words_in
from treeckpt._io.storage.checkpoint import Checkpoint
from treeckpt._io.storage.open import open_store
from treeckpt._loading.compare import delta_of, verdict_of
from treeckpt._loading.read_batch import read_arrays
from treeckpt.errors import TreeckptError, visible

from ..pages.checkpoints import PAGE_ROWS, CheckpointRow, checkpoint_row, filled, shorten
from ..store.library import Library, NotFound, OpenCheckpoint

MAX_READ = 64 << 20
"""Bytes of both checkpoints that one request reads to compare elements."""
MAX_COMPARED = 2000
"""Arrays whose checksums are compared for one page."""
MAX_CHUNKS = 4096
"""Chunks of an array; with more of them it has too many headers to read for a page."""
MAX_READ_NBYTES = 256 << 10
"""Bytes of an array that is read where checksums cannot compare it."""
AHEAD = 64
"""Pairs of arrays that are compared at once."""
Show = Literal["different", "structure", "content", "equal", "all"]


class DeltaRow(msgspec.Struct, frozen=True):
    """How two arrays differ, element by element."""

    path: str
    elements: int
    compared: int
    changed: int
    max_abs: float | str | None
    """None where no two elements are finite; "Infinity" where the difference overflows, as `mean_abs`."""
    mean_abs: float | str | None
    not_finite: int


class DiffRow(msgspec.Struct, frozen=True):
    """One difference of two checkpoints."""

    what: str
    """added, removed or moved; kind, shape, dtype, layout or value; content for the bytes of an array."""
    path: str
    before: str
    after: str
    verdict: str
    """What is known of content: equal, changed, unknown (checksums cannot decide) or unreadable; else empty."""
    pair: int | None
    """The number of the pair of arrays whose contents can be compared."""
    leaf_a: int | None
    leaf_b: int | None
    nbytes: int
    delta: DeltaRow | None
    """How the elements differ, where they were read."""


class DiffPage(msgspec.Struct, frozen=True):
    """The differences of two checkpoints."""

    a: CheckpointRow
    b: CheckpointRow
    show: str
    q: str
    start: int
    next: int | None
    counts: dict[str, int]
    """Differences of the indexes by kind."""
    same: int
    """Leaves without a difference in the indexes."""
    also: list[str]
    """What differs beside the leaves: custom metadata and files by name, and containers; the first `PAGE_ROWS`."""
    more: int
    """How many more metadata, files and containers differ than `also` lists."""
    arrays: int
    """Pairs of arrays whose contents can be compared."""
    known: dict[str, int]
    """Pairs compared so far, by result."""
    rows: list[DiffRow]
    read: bool
    """Whether contents were read that checksums cannot compare."""
    delta: DeltaRow | None
    problem: str | None
    """Why elements could not be compared."""


class Comparison:
    """Two checkpoints side by side."""

    def __init__(self, a: Checkpoint, b: Checkpoint) -> None:
        self.a, self.b = a, b
        self.found = diff(a.index, b.index)
        self.pairs = comparable(a.index, b.index, self.found)
        self._verdicts: dict[int, str] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Locks the comparison while shards are read, and closes them at the end: there may be thousands."""
        with self._lock:
            try:
                yield
            finally:
                self.a.store.close()
                self.b.store.close()

    def verdict(self, number: int, *, ahead: int = 1) -> str:
        """Returns equal, changed, unknown or unreadable for a pair of arrays.

        Args:
            ahead: how many pairs from this one on are compared at once: small arrays are read many at a time.
        """
        if number not in self._verdicts:
            window = range(number, min(number + ahead, len(self.pairs)))
            self._verdicts |= {one: self._by_checksums(one) for one in window if one not in self._verdicts}
            small = [one for one in window if self._verdicts[one] == "unknown" and self._is_small(one)]
            self._verdicts |= self._by_bytes(small) if small else {}
        return self._verdicts[number]

    def _by_checksums(self, number: int) -> str:
        x, y = self.pairs[number]
        if max(chunk_count(x), chunk_count(y)) > MAX_CHUNKS:
            return "unknown"
        try:
            return verdict_of(self.a, x, self.b, y)
        except (TreeckptError, OSError):
            return "unreadable"

    def _is_small(self, number: int) -> bool:
        x, y = self.pairs[number]
        return x.ranks is None and x.nbytes <= MAX_READ_NBYTES and max(chunk_count(x), chunk_count(y)) <= MAX_CHUNKS

    def _by_bytes(self, numbers: Sequence[int]) -> dict[int, str]:
        """Reads small arrays: they share their blocks of checksums with others, which therefore cannot tell."""
        pairs = [self.pairs[number] for number in numbers]
        try:
            before, after = read_arrays(self.a, [x for x, _ in pairs]), read_arrays(self.b, [y for _, y in pairs])
        except (TreeckptError, OSError):
            return {}
        same = [x.tobytes() == y.tobytes() for x, y in zip(before, after, strict=True)]
        return {number: "equal" if one else "changed" for number, one in zip(numbers, same, strict=True)}

    @property
    def known(self) -> dict[str, int]:
        """Pairs compared so far, by result."""
        return dict(Counter(self._verdicts.values()))

    @cached_property
    def counts(self) -> dict[str, int]:
        """Differences of the indexes by kind."""
        return dict(Counter(_kind_of(change) for change in self.found.changes))

    @cached_property
    def numbers(self) -> tuple[dict[str, int], dict[str, int]]:
        """The numbers of the leaves of both checkpoints by path; of several leaves with one path, the first."""
        sides = (self.a.index, self.b.index)
        before, after = ({p: leaves[0].number for p, leaves in index.by_path.items()} for index in sides)
        return before, after


class Comparisons:
    """The most recently used comparisons."""

    def __init__(self, library: Library, entries: int = 4) -> None:
        self.library, self._entries = library, entries
        self._kept: OrderedDict[tuple[str, str], tuple[Index, Index, Comparison]] = OrderedDict()
        self._lock = threading.Lock()

    def compare(self, a: OpenCheckpoint, b: OpenCheckpoint) -> Comparison:
        """Returns the comparison of two checkpoints that have an index.

        Raises:
            CheckpointError: an index cannot be read.
        """
        key, one, two = (a.info.path, b.info.path), self.library.outline(a).index, self.library.outline(b).index
        with self._lock:
            kept = self._kept.get(key)
            # The library gives another object where the file has changed.
            if kept is not None and kept[0] is one and kept[1] is two:
                self._kept.move_to_end(key)
                return kept[2]
        comparison = Comparison(Checkpoint(open_store(key[0]), one), Checkpoint(open_store(key[1]), two))
        with self._lock:
            self._kept[key] = (one, two, comparison)
            while len(self._kept) > self._entries:
                self._kept.popitem(last=False)
        return comparison


def previous_of(library: Library, checkpoint: OpenCheckpoint) -> str | None:
    """Returns the complete checkpoint of a run with the next smaller step; without a step, the newest other one."""
    info = checkpoint.info
    listed = library.checkpoints(checkpoint.run)
    others = [(i, c) for i, c in listed if c.files == "complete" and i != checkpoint.id]
    if info.step is None:
        return others[0][0] if others else None
    older = [(c.step, i) for i, c in others if c.step is not None and c.step < info.step]
    return max(older)[1] if older else None


class OpenPair(NamedTuple):
    """Two checkpoints that a request has opened, and their rows."""

    a: OpenCheckpoint
    b: OpenCheckpoint
    row_a: CheckpointRow
    row_b: CheckpointRow


def open_pair(a: OpenCheckpoint, b: OpenCheckpoint) -> OpenPair:
    """Returns both checkpoints with their rows.

    Raises:
        NotFound: one has no index.
    """
    row_a, row_b = (checkpoint_row(one.id, one.run, one.info) for one in (a, b))
    for row in (row_a, row_b):
        if not row.readable:
            raise NotFound(f"{row.name} is {row.status}: {row.error}")
    return OpenPair(a, b, row_a, row_b)


def diff_page(
    comparisons: Comparisons,
    pair: OpenPair,
    *,
    show: Show,
    q: str,
    start: int,
    number: int | None,
    read: bool,
) -> DiffPage:
    """Returns the differences of two checkpoints from position `start` on: first of the indexes, then of contents.

    Args:
        show: which rows.
        q: words that a path must contain.
        number: of the pair of arrays to compare element by element.
        read: reads contents that are not equal by their checksums, up to MAX_READ bytes a page.
    """
    comparison = comparisons.compare(pair.a, pair.b)
    also = comparison.found.also
    delta, problem = None, None
    with comparison.reading():
        rows, following = _page(comparison, show, q, start, MAX_READ if read else 0)
        if number is not None:
            try:
                delta = _delta_row(comparison, number)
            except (TreeckptError, OSError) as error:
                problem = visible(str(error))
    return DiffPage(
        a=pair.row_a,
        b=pair.row_b,
        show=show,
        q=q,
        start=start,
        next=following,
        counts=comparison.counts,
        same=comparison.found.same,
        also=[shorten(name) for name in also[:PAGE_ROWS]],
        more=max(0, len(also) - PAGE_ROWS),
        arrays=len(comparison.pairs),
        known=comparison.known,
        rows=rows,
        read=read,
        delta=delta,
        problem=problem,
    )


def _delta_row(comparison: Comparison, pair: int) -> DeltaRow:
    """Reads the arrays of a pair and compares their elements.

    Raises:
        NotFound: there is no such pair.
        CheckpointError: they cannot be read.
    """
    if not 0 <= pair < len(comparison.pairs):
        raise NotFound("There is no such pair of arrays.")
    x, y = comparison.pairs[pair]
    delta = delta_of(comparison.a, x, comparison.b, y, cap=MAX_READ)
    largest, mean = json_number(delta.max_abs), json_number(delta.mean_abs)
    return filled(DeltaRow, delta, path=x.path, max_abs=largest, mean_abs=mean)


def _page(comparison: Comparison, show: Show, q: str, start: int, readable: int) -> tuple[list[DiffRow], int | None]:
    """Returns a page of rows and the next position. Changes of the indexes come first, then pairs of arrays.

    Args:
        readable: bytes that may be read to compare elements.
    """
    changes, pairs = comparison.found.changes, comparison.pairs
    holds = words_in(q)
    rows: list[DiffRow] = []
    compared = 0
    for at in range(start, len(changes) + len(pairs)):
        if len(rows) == PAGE_ROWS or compared == MAX_COMPARED:
            return rows, at
        if at < len(changes):
            row = _change_row(comparison, changes[at]) if show in ("different", "structure", "all") else None
        elif show == "structure":
            return rows, None
        else:
            number = at - len(changes)
            if not holds(pairs[number][0].path.casefold()):
                continue
            compared += 1
            # Of the pairs after this one, a search by words may show none.
            verdict = comparison.verdict(number, ahead=1 if q.strip() else AHEAD)
            delta, nbytes = None, 2 * pairs[number][0].nbytes
            if verdict in ("changed", "unknown") and nbytes <= readable:
                readable -= nbytes
                with contextlib.suppress(TreeckptError, OSError):
                    delta = _delta_row(comparison, number)
            # Equal elements of a part of the array say nothing of the rest.
            if delta is not None and (delta.changed or delta.compared == delta.elements):
                verdict = "changed" if delta.changed else "equal"
            wanted = {"equal": verdict == "equal", "all": True}.get(show, verdict != "equal")
            row = None
            if wanted:
                x, y = pairs[number]
                row = DiffRow(
                    "content",
                    x.path,
                    before="",
                    after="",
                    verdict=verdict,
                    pair=number,
                    leaf_a=x.number,
                    leaf_b=y.number,
                    nbytes=x.nbytes,
                    delta=delta,
                )
        if row is not None and holds(row.path.casefold()):
            rows.append(row)
    return rows, None


def _kind_of(change: Change) -> str:
    return change.aspect if isinstance(change, Changed) else str(change.__struct_config__.tag)


def _change_row(comparison: Comparison, change: Change) -> DiffRow:
    before, after = comparison.numbers
    path, other = change.path, change.path
    texts = ("", "")
    if isinstance(change, Added):
        texts = ("", change.leaf)
    elif isinstance(change, Removed):
        texts = (change.leaf, "")
    elif isinstance(change, Moved):
        other, texts = change.to, (change.path, change.to)
    else:
        texts = (change.before, change.after)
    x = None if isinstance(change, Added) else before.get(path)
    y = None if isinstance(change, Removed) else after.get(other)
    leaf = comparison.a.index.entries[x] if x is not None else comparison.b.index.entries[y] if y is not None else None
    return DiffRow(_kind_of(change), path, *texts, "", None, x, y, leaf.nbytes if leaf is not None else 0, None)
