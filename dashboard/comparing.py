"""The queries of what differs between two checkpoints: by their indexes, by checksums, and number by number on demand.

The difference of two indexes is kept while both files stay the same. Verdicts on contents are made as far as a page
needs them, from the headers of shards; only `delta` reads arrays, up to a cap.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from functools import cached_property
from typing import Literal

from treeckpt.core.analysis.diff import Added, Change, Changed, Moved, Removed, comparable, diff
from treeckpt.core.analysis.outline import leaf_nbytes
from treeckpt.core.format.byte_map import chunk_count
from treeckpt.core.format.records import Index, Leaf
from treeckpt.core.text import visible
from treeckpt.errors import TreeckptError
from treeckpt.io.storage.open import open_store
from treeckpt.loading.compare import Side, delta_of, verdict_of
from treeckpt.runs.catalog import CheckpointInfo

from .library import Library, Missing
from .pages import CheckpointRow
from .pages_time import DeltaRow, DiffPage, DiffRow
from .queries import PAGE, checkpoint_row

__all__ = ["Comparison", "Comparisons", "Show", "diff_page", "previous_of"]

CAP = 64 << 20
"""Bytes of both checkpoints that one comparison of numbers reads."""
MAX_LOOK = 2000
"""Arrays whose checksums are compared for one page."""
MAX_CHUNKS = 4096
"""An array in more chunks has too many headers to open for a page."""
Show = Literal["different", "structure", "content", "equal", "all"]


class Comparison:
    """Two checkpoints side by side."""

    def __init__(self, a: Side, b: Side) -> None:
        self.a, self.b = a, b
        self.found = diff(a.index, b.index)
        self.pairs = comparable(a.index, b.index, self.found)
        self._verdicts: dict[int, str] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While shards are read: by one thread at a time, and closed at the end, for there may be thousands."""
        with self._lock:
            try:
                yield
            finally:
                self.a.store.close()
                self.b.store.close()

    def verdict(self, number: int) -> str:
        """Of a pair of arrays: equal, changed, unknown or unreadable."""
        if number not in self._verdicts:
            self._verdicts[number] = self._compare(*self.pairs[number])
        return self._verdicts[number]

    def _compare(self, x: Leaf, y: Leaf) -> str:
        if max(chunk_count(x), chunk_count(y)) > MAX_CHUNKS:
            return "unknown"
        try:
            return verdict_of(self.a, x, self.b, y)
        except (TreeckptError, OSError):
            return "unreadable"

    @property
    def known(self) -> dict[str, int]:
        """How many pairs got which verdict so far."""
        return dict(Counter(self._verdicts.values()))

    @cached_property
    def counts(self) -> dict[str, int]:
        """Differences of the indexes by kind."""
        return dict(Counter(_what(change) for change in self.found.changes))

    @cached_property
    def numbers(self) -> tuple[dict[str, int], dict[str, int]]:
        """The leaves of both by path; of several under one path, the first."""
        sides = (self.a.index, self.b.index)
        before, after = ({p: leaves[0].number for p, leaves in index.by_path.items()} for index in sides)
        return before, after


class Comparisons:
    """Comparisons that were asked for lately."""

    def __init__(self, library: Library, entries: int = 4) -> None:
        self._library, self._entries = library, entries
        self._kept: OrderedDict[tuple[str, str], tuple[Index, Index, Comparison]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, a: CheckpointInfo, b: CheckpointInfo) -> Comparison:
        """Two checkpoints that have an index.

        Raises:
            CheckpointError: an index is not to be read.
        """
        key, one, two = (a.path, b.path), self._library.outline(a).index, self._library.outline(b).index
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept[0] is one and kept[1] is two:
                self._kept.move_to_end(key)
                return kept[2]
        made = Comparison(Side(open_store(a.path), one), Side(open_store(b.path), two))
        with self._lock:
            self._kept[key] = (one, two, made)
            while len(self._kept) > self._entries:
                self._kept.popitem(last=False)
        return made


def previous_of(library: Library, checkpoint_id: str) -> str | None:
    """The complete checkpoint of the same run with the next smaller step, or the next older one."""
    run, info = library.checkpoint(checkpoint_id)
    found = [(i, c) for i, c in library.checkpoints(run) if c.status == "complete" and i != checkpoint_id]
    if info.step is None:
        return found[0][0] if found else None
    older = [(c.step, i) for i, c in found if c.step is not None and c.step < info.step]
    return max(older)[1] if older else None


def _sides(library: Library, a: str, b: str) -> tuple[list[CheckpointRow], list[CheckpointInfo]]:
    """Both checkpoints.

    Raises:
        Missing: there is no such checkpoint, or it has no index.
    """
    rows: list[CheckpointRow] = []
    infos: list[CheckpointInfo] = []
    for checkpoint_id in (a, b):
        run, info = library.checkpoint(checkpoint_id)
        rows.append(checkpoint_row(checkpoint_id, run, info))
        infos.append(info)
        if not rows[-1].readable:
            raise Missing(f"{rows[-1].name} is {rows[-1].status}: {rows[-1].error}")
    return rows, infos


def diff_page(
    library: Library,
    comparisons: Comparisons,
    a: str,
    b: str,
    *,
    show: Show,
    q: str,
    start: int,
    pair: int | None,
    read: bool,
) -> DiffPage:
    """In what two checkpoints differ, from position `start` on: first the indexes, then the contents.

    Args:
        show: which rows.
        q: words that a path must hold.
        pair: whose contents are to be compared number by number.
        read: reads the contents that a page shows, up to a cap, where checksums do not call them equal.

    Raises:
        Missing: there is no such checkpoint, or it has no index.
    """
    rows, infos = _sides(library, a, b)
    comparison = comparisons.of(*infos)
    delta, problem = None, None
    with comparison.reading():
        reader = _Reader(comparison) if read else None
        found, following = _page(comparison, show, q.casefold().split(), start, reader)
        if pair is not None:
            try:
                delta = _delta_row(comparison, pair)
            except (TreeckptError, OSError) as error:
                problem = visible(str(error))
    return DiffPage(
        a=rows[0],
        b=rows[1],
        show=show,
        q=q,
        start=start,
        next=following,
        counts=comparison.counts,
        same=comparison.found.same,
        arrays=len(comparison.pairs),
        known=comparison.known,
        rows=found,
        read=read,
        delta=delta,
        problem=problem,
    )


class _Reader:
    """Measures the differences of a page's arrays until as many bytes are read as one page may."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison, self._left = comparison, CAP

    def delta(self, pair: int) -> DeltaRow | None:
        """None where an array is too large for what is left, or cannot be read."""
        nbytes = 2 * leaf_nbytes(self._comparison.pairs[pair][0])
        if nbytes > self._left:
            return None
        self._left -= nbytes
        try:
            return _delta_row(self._comparison, pair)
        except (TreeckptError, OSError):
            return None


def _delta_row(comparison: Comparison, pair: int) -> DeltaRow:
    """How the arrays of a pair differ, by reading them.

    Raises:
        Missing: there is no such pair.
        CheckpointError: they cannot be read.
    """
    if not 0 <= pair < len(comparison.pairs):
        raise Missing("There is no such pair of arrays.")
    x, y = comparison.pairs[pair]
    found = delta_of(comparison.a, x, comparison.b, y, cap=CAP)
    return DeltaRow(
        x.path, found.elements, found.compared, found.changed, found.max_abs, found.mean_abs, found.not_finite
    )


def _page(
    comparison: Comparison, show: Show, words: list[str], start: int, reader: _Reader | None
) -> tuple[list[DiffRow], int | None]:
    """A page of rows, and the position of the next one. Changes of the indexes come first, then pairs of arrays."""
    changes, pairs = comparison.found.changes, comparison.pairs
    rows: list[DiffRow] = []
    looked = 0
    for at in range(start, len(changes) + len(pairs)):
        if len(rows) == PAGE or looked == MAX_LOOK:
            return rows, at
        if at < len(changes):
            row = _change_row(comparison, changes[at]) if show in ("different", "structure", "all") else None
        elif show == "structure":
            return rows, None
        else:
            number = at - len(changes)
            if not _has(pairs[number][0].path, words):
                continue
            looked += 1
            verdict = comparison.verdict(number)
            delta = reader.delta(number) if reader and verdict in ("changed", "unknown") else None
            if delta is not None and (delta.changed or delta.compared == delta.elements):
                verdict = "changed" if delta.changed else "equal"
            wanted = {"equal": verdict == "equal", "all": True}.get(show, verdict != "equal")
            row = _content_row(comparison, number, verdict, delta) if wanted else None
        if row is not None and _has(row.path, words):
            rows.append(row)
    return rows, None


def _has(path: str, words: list[str]) -> bool:
    return all(word in path.casefold() for word in words)


def _what(change: Change) -> str:
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
    return DiffRow(_what(change), path, *texts, "", None, x, y, leaf_nbytes(leaf) if leaf is not None else 0, None)


def _content_row(comparison: Comparison, number: int, verdict: str, delta: DeltaRow | None) -> DiffRow:
    x, y = comparison.pairs[number]
    return DiffRow("content", x.path, "", "", verdict, number, x.number, y.number, leaf_nbytes(x), delta)
