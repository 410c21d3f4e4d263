"""The command `show`: prints what a checkpoint holds, a part of it, its values, or what load rules make of it."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .. import _api
from .._arrays.base import raw_dtype
from .._core.columns import bytes_column
from .._core.format.byte_map import layout_of, locate_chunks
from .._core.format.records import (
    AliasRecord,
    ArrayRecord,
    DeferredChunks,
    Index,
    Leaf,
    NoChunks,
    PerRankArrays,
    PerRankValues,
    ValueRecord,
)
from .._core.format.table_deltas import count_rows
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import decode_runs, length_of
from .._core.sharding.region import Region
from .._core.text import (
    blob_text,
    bytes_text,
    count_text,
    json_number,
    layout_text,
    number_text,
    ranks_text,
    region_text,
    shape_text,
    time_text,
    value_text,
    value_type,
)
from .._core.tree.paths import similar_paths
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import KeyTextCache, PerRankNode, Structure, TableNode
from .._core.tree.value_codec import Value
from .._inspect.diff import leaf_text, rows_text
from .._inspect.numbers import ElementStats, as_numbers, element_stats
from .._inspect.outline import Outline, OutlineRow
from .._io.storage.checkpoint import NewestIndex, with_shared_files
from .._io.storage.local_files import read_head
from .._io.storage.open import open_store
from .._io.storage.shared_files import needed_files
from .._io.storage.store import Store
from .._loading.peek import Peek, peek, peek_blob
from .._loading.run_load import opened
from .._report.terminal import fail, print_facts, print_json, print_line, print_table
from .._runs import catalog
from .._runs.nan_scan import NanReport, StepFinding, nan_report, scan_for_nan, steps_of_run
from .._runs.progress_bar import stores_bar
from .._runs.statistics_store import StatisticsStore
from .._runs.verification import NO_CACHE, VerificationStore, cache_directory, this_user
from ..errors import CorruptError, FormatError, LayoutError, TreeckptError
from ..rules import decode, parse
from ..rules._rules import Rule
from ..rules._view import View, view_of
from .command import Commands, no_such_run, progress_of, usage_error
from .runs import print_saves_under_way
from .show_reads import MESH, add_reads, show_reads
from .show_row import show_row

MAX_RULES = 16 << 20
"""Bytes of a file of rules that are read, at most."""
MAX_ROWS = 1000
WHOLE = 4 << 20
"""Bytes that are read for the statistics, at most."""
PRINTED = 1000
"""Elements from which numpy prints the corners only."""
EDGE = 3
"""Elements at each end of a dimension that are printed of a larger array, as by numpy."""
DIMS = 4
"""Dimensions that are printed of a larger array: of those before, the first element."""
WIDTH = 100
"""Characters of a line."""
BLOB_SHOWN = 500
"""Bytes of a text or bytes that are printed."""


_STATS = (
    "of a run: in which step the first NaN is, in which arrays and where; reads what no `verify --statistics` has "
    "read, in an order that answers soon"
)


def add_show(commands: Commands) -> None:
    """Adds `show`."""
    show = commands.add("show", _show, "show what a checkpoint holds, or one part of it", progress=True)
    show.add_argument("checkpoint", metavar="CKPT", help="or, with --stats, a RUN")
    show.add_argument("leaf", metavar="PATH", nargs="?", default="", help="of a leaf or of a node of the tree")
    what = show.add_mutually_exclusive_group()
    what.add_argument("--rules", metavar="FILE", help="show what load rules (JSON, or statements) make of it")
    what.add_argument("--structure", action="store_true", help="print the whole tree: values, and shapes of arrays")
    what.add_argument("--stats", action="store_true", help=_STATS)
    what.add_argument("--id", metavar="N", help="show the row of an id in the keyed table at PATH")
    what.add_argument("--mesh", metavar="SIZES", help=MESH)
    add_reads(show)
    show.add_argument("--depth", type=int, default=2, help="levels of the tree to print (default: 2)")


def _show(options: argparse.Namespace) -> int:
    if options.leaf and (options.stats or options.mesh is not None):
        return usage_error(f"{'--stats' if options.stats else '--mesh'} is about all of it, and takes no PATH")
    if (options.names or options.place) and options.mesh is None:
        return usage_error(f"{'--names' if options.names else '--place'} goes with --mesh")
    if options.stats:
        return _show_first_nan(options)
    if options.mesh is not None:
        return show_reads(options)
    if options.id is not None:
        return show_row(options)
    with stores_bar("reading the index", shown=progress_of(options)) as counted:
        # It gets the index that `read_info` decodes, which then is not read again.
        read, folder = NewestIndex(local=True), counted(open_store(options.checkpoint))
        info = catalog.read_info(folder, follow=True, newest=read)
        info = catalog.with_verification(info, folder, VerificationStore(cache_directory()))
        if info.files == "partial" and not options.json:
            print_saves_under_way(info)
        needed = _needed_by(folder)
        index = read.found.index if read.found is not None else _api.inspect(options.checkpoint)
    if options.rules:
        return _show_rules(index, options)
    outline = Outline.of(index)
    row = outline.node_at(options.leaf)
    if options.structure and row is not None:
        return _show_structure(index, options)
    if row is None:
        fail(f"treeckpt: {options.leaf}: no such path in {options.checkpoint}")
        similar = similar_paths(options.leaf, (leaf.path for leaf in index.entries))
        hits = [leaf.path for leaf in outline.search(options.leaf.rpartition("/")[2], count=5)[0]]
        for path in dict.fromkeys(similar + hits):
            fail(f"  there is {path}")
        return 2
    if row.kind == "leaf":
        return _show_leaf(index, index.entries[row.first], options)
    rows, left_out = _rows_below(outline, row, options.depth)
    if options.json:
        shown = [{name: part for name, part in msgspec.structs.asdict(row).items() if name != "number"} for row in rows]
        state = {"status": info.status, "intact": info.intact, "unhealthy": info.unhealthy}
        print_json(
            {
                **state,
                **index_summary(index),
                **needed,
                "pinned": info.pinned,
                "saving": info.saving,
                "rows": shown,
                "left_out": left_out,
            }
        )
        return 0
    if not options.leaf:
        _print_summary(info, index, needed)
    depth = options.leaf.count("/") + bool(options.leaf)
    texts = [_row_texts(index, r, r.node.count(".") + 1 - depth) for r in rows]
    print_table(("path", "is", "leaves", "size"), texts, right=("leaves", "size"))
    if left_out:
        print_line(f"and {left_out} more of these levels; name a PATH to see what is below it", "dim")
    return 0


def _show_first_nan(options: argparse.Namespace) -> int:
    """Prints where the first NaN of a run is, after a scan of what is not known yet."""
    if problem := no_such_run(options.checkpoint):
        return usage_error(problem)
    if (cache := cache_directory()) is None:
        raise OSError(f"the statistics could not be kept: {NO_CACHE}")
    known, statistics = VerificationStore(cache), StatisticsStore(cache)
    infos, failed = steps_of_run(options.checkpoint, known), dict[str, str]()
    code = 0
    try:
        with stores_bar("looking for NaN", shown=progress_of(options)) as counted:
            by = this_user("treeckpt show")
            infos, failed = scan_for_nan(infos, known, statistics, by, lambda _, folder: counted(folder))
    except KeyboardInterrupt:  # what it has found by then is kept: the next scan goes on
        infos, code = steps_of_run(options.checkpoint, known), 130
    report = nan_report(infos, statistics, lambda info: _api.inspect(info.path), failed)
    if options.json:
        print_json(report)
    else:
        _print_first_nan(report)
    return code or (1 if report.unread else 0)


def _print_first_nan(report: NanReport) -> None:
    print_line(report.nan_text, "red" * (report.nan is not None))
    if report.metric_text:
        print_line(report.metric_text)
    if report.nan is not None:
        _print_finding(report.nan)
    print_line(report.infinite_text)
    if report.infinite is not None and report.infinite != report.nan:
        _print_finding(report.infinite)
    for one in report.unread:
        print_line(f"not known of {one.name}: {one.why}", "yellow")
    if report.abandoned:
        print_line(f"{count_text(report.abandoned, 'checkpoint')} of abandoned branches: not looked at", "dim")
    print_line(f"{report.known} of {count_text(report.steps, 'step')} read, by this command or before", "dim")


def _print_finding(found: StepFinding) -> None:
    """Prints the arrays of a step with NaN or infinity, and where the first such element of each is."""
    rows: list[tuple[str, str, str, str, str]] = []
    for one in found.rows:
        for count, name, place in ((one.nan, "NaN", one.first_nan), (one.infinite, "Inf", one.first_infinite)):
            at = where = "-"
            if place is not None:
                at = f"{place.index}"
                where = f"{place.region} of rank {place.rank}, byte {place.byte} of {place.file}"
            rows += [(one.path, f"{count:,}", name, at, where)] * bool(count)
    print_table((found.title, "elements", "are", "the first at", "in"), rows, right=("elements",))
    if found.arrays > len(found.rows):
        print_line(f"and {found.arrays - len(found.rows):,} more arrays: treeckpt verify --statistics", "dim")


def _show_structure(index: Index, options: argparse.Namespace) -> int:
    rows = structure_rows(index, options.leaf)
    if options.json:
        print_json(rows)
        return 0
    for line in structure_lines(rows):
        print_line(line)
    return 0


def _print_summary(info: catalog.CheckpointInfo, index: Index, needed: Mapping[str, Any]) -> None:
    facts = [("status", info.status_and_problem), *_summary_texts(index)] + [("pinned", "yes")] * info.pinned
    if needed:
        nbytes, others = bytes_text(needed["needed_nbytes"]), ", ".join(needed["needed_by"])
        facts.append(("freed", f"{nbytes} of its files only with {others}, which share them"))
    print_facts([(name, str(fact)) for name, fact in facts])
    print_saves_under_way(info)
    print_line("")


def _needed_by(folder: Store) -> dict[str, Any]:
    """Returns the bytes of files that other checkpoints of the run share, and which these are; empty for none."""
    needed = needed_files(folder, sizes := folder.sizes())
    return {"needed_nbytes": sum(sizes[name] for name in needed.names), "needed_by": needed.by} if needed.by else {}


def index_summary(index: Index) -> dict[str, Any]:
    """Returns the facts about a checkpoint that `--json` prints."""
    return {
        "save_id": index.save_id,
        "step": index.step,
        "created_ns": index.created_ns,
        "world": index.world,
        "leaves": len(index.leaves),
        "nbytes": index.nbytes,
        "files": len(index.file_list),
        "sidecars": index.sidecars,
        "metadata": index.metadata,
        **({"shared_nbytes": index.shared_nbytes, "shared_with": index.shared_with} if index.shared_names else {}),
        **({"disks": [{"host": disk.host, "ranks": disk.ranks} for disk in index.disks]} if index.disks else {}),
    }


def _summary_texts(index: Index) -> list[tuple[str, object]]:
    return [
        ("step", index.step),
        ("saved", time_text(index.created_ns)),
        ("save id", index.save_id),
        ("ranks", index.world),
        ("leaves", len(index.leaves)),
        ("size", f"{bytes_text(index.nbytes)} in {count_text(len(index.file_list), index.file_kind)}"),
        *(
            [("shared", f"{bytes_text(index.shared_nbytes)} with {', '.join(index.shared_with)}")]
            if index.shared_names
            else []
        ),
        *((f"disk of host {disk.host}", ranks_text(disk.ranks)) for disk in index.disks),
        *((f"file {one.name}", bytes_text(one.nbytes)) for one in index.sidecars),
        *((f"metadata {name}", value_text(value)) for name, value in index.metadata.items()),
    ]


def _rows_below(outline: Outline, row: OutlineRow, depth: int) -> tuple[list[OutlineRow], int]:
    """Returns the nodes below one in the order of the tree, and how many children of these levels are left out.

    There are MAX_ROWS at most, the upper levels first.
    """
    rows, level, left_out = list[OutlineRow](), [row], 0
    for _ in range(max(depth, 1)):
        parents, level = level, []
        for node in parents:
            level += outline.children(node.node, count=MAX_ROWS - len(rows) - len(level))
        left_out += sum(node.children for node in parents) - len(level)
        rows += level
    return sorted(rows, key=lambda row: [int(number) for number in row.node.split(".")]), left_out


def _row_texts(index: Index, row: OutlineRow, level: int) -> tuple[str, str, str, str]:
    is_leaf, rows = row.kind == "leaf", rows_text(index, row.path) if row.kind == "table" else ""
    what = leaf_text(index, index.entries[row.first]) if is_leaf else (row.cls or row.kind) + rows
    size = bytes_text(row.nbytes) if row.nbytes else ""
    return "  " * max(0, level - 1) + row.key, what, "" if is_leaf else f"{row.leaves}", size


def _show_leaf(index: Index, leaf: Leaf, options: argparse.Namespace) -> int:
    chunks, values = locate_chunks(index, leaf), None
    problem: TreeckptError | None = None
    try:
        with stores_bar("reading values", shown=progress_of(options)) as counted, opened(options.checkpoint) as found:
            values = read_values(counted(with_shared_files(found.place, index)), index, leaf)
    except TreeckptError as error:
        problem = error
    _print_leaf(index, leaf, chunks, values, options)
    if problem is not None:
        fail(f"treeckpt: {problem}")
    # a LayoutError says that the values cannot be read in part, not that anything is wrong with them
    return 0 if problem is None or isinstance(problem, LayoutError) else 1


def _print_leaf(
    index: Index, leaf: Leaf, chunks: Sequence[Any], values: LeafValues | None, options: argparse.Namespace
) -> None:
    if options.json:
        layout = layout_of(index, leaf)
        record = leaf.record
        if isinstance(record, ArrayRecord) and isinstance(record.chunks, DeferredChunks):
            record = msgspec.structs.replace(record, chunks=NoChunks())
        known = {"path": leaf.path, "record": record, "spec": leaf.spec, "layout": layout, "chunks": chunks}
        statistics = values.statistics if values else None
        if values and statistics:
            numbers = {name: json_number(value) for name, value in msgspec.structs.asdict(statistics).items()}
            known["values"] = msgspec.structs.asdict(values) | {"statistics": numbers}
        print_json({"values": values, **known})
        return
    print_facts(_leaf_facts(index, leaf) + (_value_facts(values) if values else []))
    for line in values.text.splitlines() if values else ():
        print_line(line)
    if chunks:
        print_line("")
        shown = chunks[:MAX_ROWS]
        size = bytes_column([c.stop - c.start for c in shown])
        rows = [
            (region_text(c.region), f"{c.rank}", c.file.name, f"{c.start}:{c.stop}", size(c.stop - c.start))
            for c in shown
        ]
        print_table(("region", "rank", "file", "bytes", "size"), rows, right=("rank", "size"))
        if len(chunks) > MAX_ROWS:
            print_line(f"... and {len(chunks) - MAX_ROWS} more; --json gives all")


def _value_facts(values: LeafValues) -> list[tuple[str, str]]:
    found, part, facts = values.statistics, values.sampled < values.elements, list[tuple[str, str]]()
    if found is not None:
        of = f"of the first {values.sampled:,} of {values.elements:,} elements: " if part else ""
        numbers = ("minimum", "maximum", "mean", "deviation", "norm")
        known = [(name, number) for name in numbers if (number := getattr(found, name)) is not None]
        texts = [f"{name} {number_text(number, 6)}" for name, number in known]
        texts += [
            f"{n} {name}" for name, n in (("NaN", found.nan), ("infinite", found.infinite), ("zero", found.zero)) if n
        ]
        facts.append(("numbers", of + ", ".join(texts)))
    where = f" of rank {values.rank}" * (values.rank is not None) + f" at {[*values.at]}" * bool(values.at)
    checked = "match their checksums" if values.verified else "not compared with checksums"
    return [*facts, ("values", f"{checked}{where}")]


def _leaf_facts(index: Index, leaf: Leaf) -> list[tuple[str, str]]:
    facts = [("path", leaf.path)]
    record = leaf.record
    if isinstance(record, ValueRecord):
        return [*facts, ("type", value_type(record.value)), ("value", value_text(record.value, 2000))]
    if isinstance(record, PerRankValues):
        ranks = count_text(len(record.values), "rank")
        return [*facts, ("values", f"one for each of {ranks}: {leaf_text(index, leaf)}")]
    if leaf.spec is None:
        assert leaf.stored is not None, "all other values are in the index"
        kinds = {"type": leaf.stored.kind, "length": count_text(leaf.stored.nbytes, "byte")}
        if isinstance(record, PerRankArrays):
            kinds["length"] += f", on each of {count_text(length_of(leaf.ranks or ()), 'rank')}"
        return [*facts, *kinds.items()]
    facts += [("dtype", leaf.spec.dtype), ("shape", shape_text(leaf.spec.shape)), ("kind", leaf.spec.kind)]
    if leaf.spec.order is not None:
        order = ", ".join(map(str, leaf.spec.order))
        facts.append(("memory", f"dimensions {order}, from the outermost to the innermost"))
    if isinstance(record, AliasRecord):
        return [*facts, ("shares", f"the storage of {index.entries[record.of].path}")]
    if isinstance(record, PerRankArrays):
        return [*facts, ("layout", f"one for each of {count_text(length_of(leaf.ranks or ()), 'rank')}")]
    return [*facts, ("layout", layout_text(layout_of(index, leaf)))]


def _read_rules(path: str) -> tuple[Rule, ...]:
    """Reads the rules of a file: JSON, or statements.

    Raises:
        FormatError: it cannot be read, or contains neither.
    """
    try:
        # a shell gives what a command prints as a pipe of this directory
        data = Path(path).read_bytes() if path.startswith("/dev/fd/") else read_head(Path(path), MAX_RULES)
        text = data.decode()
    except (OSError, UnicodeDecodeError, CorruptError) as error:
        raise FormatError(path, expected="a file of rules", found=f"{error}"[:200]) from error
    return decode(text) if text.lstrip()[:1] in ("[", "{") else parse(text)


def _show_rules(index: Index, options: argparse.Namespace) -> int:
    """Prints the leaves that rules produce from an index on rank 0, at and below a path."""
    with stores_bar("applying the rules", shown=progress_of(options)):
        view = view_of(index, _read_rules(options.rules), source_rank=0, rank=0)
    below = options.leaf.rstrip("/")
    rows = [
        _rule_row(view, path) for path in view.by_path if not below or path == below or path.startswith(below + "/")
    ]
    dropped = list(view.transformed.dropped)
    if options.json:
        print_json({"leaves": rows, "dropped": dropped})
        return 0
    specs = [f"{row['dtype']} {shape_text(row['shape'])}" if row["dtype"] else "value" for row in rows]
    print_table(("path", "is", "how"), [(row["path"], spec, row["how"]) for row, spec in zip(rows, specs, strict=True)])
    for path in dropped:
        print_line(f"dropped  {path}", "dim")
    return 0


def _rule_row(view: View, path: str) -> dict[str, Any]:
    spec = view.by_path[path][0].spec
    array = spec if isinstance(spec, ArraySpec) else None
    # the chain ends in the path itself, which is printed beside it
    how = view.chain(path).removesuffix(path).rstrip()
    return {"path": path, "dtype": array and array.dtype, "shape": array and array.shape, "how": how}


INDENT = "  "
VALUE_CHARS = 400
"""Characters of a value that are shown."""


class StructureRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A container, or a leaf."""

    path: str
    kind: str
    """"dict", "list", "namedtuple", "per_rank" and so on; of a leaf "array", "value", or "values" of each rank."""
    depth: int
    cls: str = ""
    """The class of a namedtuple, dataclass or registered node."""
    children: int = 0
    ranks: int = 0
    """Below `PerRank`: how many ranks it stands for."""
    spec: ArraySpec | None = None
    shares: str = ""
    """Of an array: the path of the one whose memory it shares."""
    value: Value | tuple[Value, ...] = None
    blob: ArraySpec | None = None
    """Of a text or bytes whose content is in shards: its type and length."""
    rows: int | None = None
    """Of a keyed table: the number of rows that a load gives."""

    def text(self) -> str:
        """Describes the row in one line, without its key."""
        if self.spec is not None:
            kind = "" if self.spec.kind == "tensor" else f"{self.spec.kind} "
            return f"{kind}{self.spec.dtype}{shape_text(self.spec.shape)}" + self._shares()
        if self.blob is not None:
            text = blob_text(self.blob.kind, self.blob.nbytes)
            return text if self.kind == "value" else f"{count_text(self.ranks, 'rank')}: {text}"
        if self.kind == "values":
            assert isinstance(self.value, tuple), "one for each rank"
            shown = ", ".join(value_text(one, 40) for one in self.value[:4])
            return f"{count_text(self.ranks, 'rank')}: {shown}" + (", ..." if len(self.value) > 4 else "")
        if self.kind == "value":
            value: Any = self.value
            return value_text(value, VALUE_CHARS)
        rows = "" if self.rows is None else f" of {count_text(self.rows, 'row')}"
        return f"{self.kind} {self.cls}".rstrip() + rows + ("" if self.children else ", empty")

    def _shares(self) -> str:
        return f", shares the memory of {self.shares}" if self.shares else ""


def structure_rows(index: Index, below: str = "") -> list[StructureRow]:
    """Returns the rows of a tree, each container before what is in it.

    Args:
        below: a path, of a container or a leaf: only that is given.
    """
    texts, leaves, rows = KeyTextCache(), iter(index.entries), list[StructureRow]()

    def walk(node: Structure, path: str, depth: int, ranks: int) -> None:
        if node is None:
            rows.append(_leaf_row(index, next(leaves), depth, ranks))
            return
        kind, count = str(node.__struct_config__.tag), len(node.children)
        of_table = count_rows(index, path) if isinstance(node, TableNode) else None
        rows.append(StructureRow(path, kind, depth, getattr(node, "cls", ""), count, ranks, rows=of_table))
        groups = [length_of(group) for group in node.ranks] if isinstance(node, PerRankNode) else [ranks] * count
        for step, child, group in zip(texts.of(node, path), node.children, groups, strict=True):
            walk(child, f"{path}/{step}" if depth else step, depth + 1, group)

    walk(index.structure, "", 0, 0)
    prefix = f"{below}/"
    return [row for row in rows if not below or row.path == below or row.path.startswith(prefix)]


def _leaf_row(index: Index, leaf: Leaf, depth: int, ranks: int) -> StructureRow:
    record = leaf.record
    if isinstance(record, ValueRecord):
        return StructureRow(leaf.path, "value", depth, ranks=ranks, value=record.value)
    if isinstance(record, PerRankValues):
        return StructureRow(leaf.path, "values", depth, ranks=ranks, value=record.values)
    if leaf.spec is None:
        kind = "value" if leaf.ranks is None else "values"
        return StructureRow(leaf.path, kind, depth, ranks=ranks, blob=leaf.stored)
    shares = index.entries[record.of].path if isinstance(record, AliasRecord) else ""
    return StructureRow(leaf.path, "array", depth, ranks=ranks, spec=leaf.spec, shares=shares)


def structure_lines(rows: list[StructureRow]) -> Iterator[str]:
    """Yields a line for each row, indented, with the last step of its path; the first row has its whole path."""
    for number, row in enumerate(rows):
        key = row.path.rpartition("/")[2] if number else row.path
        yield f"{INDENT * (row.depth - rows[0].depth)}{key}{': ' if key else ''}{row.text()}"


class LeafValues(msgspec.Struct, frozen=True):
    """Values of an array, or the first bytes of a text or bytes in shards."""

    text: str
    """The values as numpy, or Python, prints them; `...` stands for what is left out."""
    rank: int | None
    """Whose array it is, of one for each rank."""
    at: tuple[int, ...]
    """Indices of the leading dimensions of which `text` shows one element."""
    statistics: ElementStats | None
    """The statistics of the first `sampled` elements, in C order; None for elements that are no numbers."""
    sampled: int
    elements: int
    read: int
    """Bytes that were read, checksums included."""
    verified: bool
    """Whether all that was read matches its checksums."""


def read_values(store: Store, index: Index, leaf: Leaf) -> LeafValues | None:
    """Reads values of a leaf; None for one without elements, and for a view of another leaf.

    Raises:
        TreeckptError: the bytes are missing or damaged, or do not lie in a file as they are.
    """
    record = leaf.record
    if isinstance(record, AliasRecord) and record.view is None:
        leaf = index.entries[record.of]
    if leaf.spec is None and leaf.stored is not None:
        rank = int(decode_runs(leaf.ranks)[0]) if leaf.ranks is not None else None
        text, read = peek_blob(store, index, leaf, BLOB_SHOWN, rank=rank)
        return LeafValues(
            text,
            rank,
            at=(),
            statistics=None,
            sampled=read.region.size,
            elements=leaf.stored.nbytes,
            read=read.read,
            verified=read.verified,
        )
    if leaf.spec is None or not math.prod(leaf.spec.shape) or isinstance(leaf.record, AliasRecord):
        return None
    rank = int(decode_runs(leaf.ranks or ())[0]) if isinstance(leaf.record, PerRankArrays) else None
    shape, dtype = leaf.spec.shape, leaf.spec.dtype
    itemsize, elements = dtype_of(dtype).itemsize, math.prod(shape)
    sample = _first_rows(shape, max(1, WHOLE // itemsize))
    reads = [peek(store, index, leaf, sample, rank=rank)]
    at = (0,) * (len(shape) - DIMS if elements > PRINTED else 0)
    if sample.size == elements:
        raw = _raw(reads[0], itemsize)[at]
    else:
        corners = _corners(shape, len(at))
        reads += [peek(store, index, leaf, region, rank=rank) for region, _ in corners]
        raw = np.zeros([min(n, 2 * EDGE + 1) for n in shape[len(at) :]], raw_dtype(itemsize))
        for (_, place), found in zip(corners, reads[1:], strict=True):
            raw[place] = _raw(found, itemsize)[at]
    return LeafValues(
        _text(raw, dtype, threshold=PRINTED if sample.size == elements else 0),
        rank,
        at=at,
        statistics=element_stats(reads[0].data, dtype),
        sampled=sample.size,
        elements=elements,
        read=sum(found.read for found in reads),
        verified=all(found.verified for found in reads),
    )


def _first_rows(shape: Sequence[int], most: int) -> Region:
    """Returns the region of the first elements in C order, at most so many; whole where they all fit."""
    sizes = list(shape)
    for dim in range(len(sizes)):
        below = math.prod(shape[dim + 1 :])
        sizes[dim] = min(sizes[dim], max(1, most // below))
    return Region((0,) * len(sizes), tuple(sizes))


def _corners(shape: Sequence[int], leading: int) -> list[tuple[Region, tuple[slice, ...]]]:
    """Returns the regions that numpy prints of an array, and where each lies in an array of the corners."""
    ends: list[list[tuple[int, int, slice]]] = [[(0, 1, slice(None))]] * leading
    for n in shape[leading:]:
        if n <= 2 * EDGE:
            ends.append([(0, n, slice(None))])
        else:
            ends.append([(0, EDGE, slice(0, EDGE)), (n - EDGE, EDGE, slice(-EDGE, None))])
    return [
        (Region(tuple(p[0] for p in parts), tuple(p[1] for p in parts)), tuple(p[2] for p in parts[leading:]))
        for parts in itertools.product(*ends)
    ]


def _raw(found: Peek, itemsize: int) -> np.ndarray:
    return found.data.reshape(-1).view(raw_dtype(itemsize)).reshape(found.region.shape)


def _text(raw: np.ndarray, dtype: str, *, threshold: int) -> str:
    kind = dtype_of(dtype).numpy
    values = np.ascontiguousarray(raw).view(kind).reshape(raw.shape) if kind is not None else as_numbers(raw, dtype)
    assert values is not None, "elements without a numpy dtype are numbers"
    if kind is None and values.dtype.kind == "f":
        values = values.astype(np.float32)  # exact: these have fewer bits
    return np.array2string(values, threshold=threshold, edgeitems=EDGE, max_line_width=WIDTH)
