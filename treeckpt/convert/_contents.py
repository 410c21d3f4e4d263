"""The tree of a conversion, as structure and leaves, with arrays that are still in their files.

`read_contents` has it from a checkpoint of any format. What is left out or changed then is listed (`Finding`), so
that it can be reported before anything is written.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import LazyArray, Storage
from .._arrays.registry import blob_value, decode, resolve
from .._core.format.index import INDEX_NAME
from .._core.format.records import AliasRecord, Leaf, PerRankValues, ValueRecord
from .._core.format.shard_header import BLOCK, parse_shard_name
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.int_runs import decode_runs
from .._core.sharding.region import Region
from .._core.text import count_text
from .._core.tree.flatten import unflatten
from .._core.tree.paths import Globs
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import (
    DefaultDictNode,
    DictNode,
    OrderedDictNode,
    PerRankNode,
    Structure,
    child_path,
    keys_of,
)
from .._foreign.checksums import ArchiveChecksums
from .._foreign.files import elements_of, foreign_at, new_address, store_window, strided_array
from .._foreign.foreign_checkpoint import READERS, ForeignCheckpoint, most_nbytes
from .._foreign.pickle_values import RefusedLeaf, refusal
from .._io.storage.checkpoint import Checkpoint, read_sidecar
from .._io.storage.foreign_formats import HEAD, format_of_head, is_of_format, sidecar_names
from .._io.storage.local_files import read_head
from .._io.storage.open import local_directory, open_store
from .._io.storage.store import Store
from .._io.storage.wrapped_store import CountedStores
from .._loading.match import Claims, LoadOptions
from .._loading.read_batch import read_arrays, read_region
from ..errors import CheckpointNotFound, FormatError, MismatchError, TreeckptError, visible
from ._table_rows import JoinedTables

Source = str | os.PathLike[str] | Store
SOURCES = ["treeckpt", *READERS]
"""Formats that can be read; `register` adds its own."""

ContentsLeaf = tuple[str, Any]


class Finding(msgspec.Struct, frozen=True):
    """One leaf or container that a conversion changes.

    >>> [finding] = tc.convert.convert("run/step_00000100", "model.safetensors", dry_run=True).losses
    >>> print(finding)
    step: ...

    Attributes:
        path: of the leaf or container.
        expected: what the format holds.
        found: what is there.
        becomes: what is written in its place.
        lost: whether a leaf is left out or its values change; else only its form, or that of a container.
    """

    path: str
    expected: str
    found: str
    becomes: str
    lost: bool = False

    def __str__(self) -> str:
        return visible(f"{self.path or '<root>'}: {self.found} becomes {self.becomes}")


class ConvertReport(msgspec.Struct, frozen=True):
    """The result of a conversion, or of a dry run.

    >>> len(tc.convert.convert("run/step_00000100", "model.safetensors", dry_run=True).losses)
    1

    Attributes:
        source: its path.
        destination: its path.
        source_format: one of `SOURCES`.
        format: one of `FORMATS`, that was written.
        leaves: number of leaves that are written; in a dry run, that would be.
        arrays: number of arrays.
        nbytes: bytes of all arrays, each as often as it stands in the tree.
        files: names of the files that were written.
        written_nbytes: bytes of array data that this rank wrote.
        notes: changes of form without loss.
        losses: leaves that are left out or changed: only with `lossy`, and in a dry run.
        dry_run: whether nothing was written.
        seconds: that it took.
    """

    source: str
    destination: str
    source_format: str
    format: str
    leaves: int
    arrays: int
    nbytes: int
    files: tuple[str, ...]
    written_nbytes: int
    notes: tuple[Finding, ...]
    losses: tuple[Finding, ...]
    dry_run: bool
    seconds: float

    def __str__(self) -> str:
        did = "would convert" if self.dry_run else "converted"
        rows = [
            f"{did} {self.source} ({self.source_format}) to {self.destination} ({self.format}): "
            f"{count_text(self.leaves, 'leaf', 'leaves')}, {self.nbytes} bytes, "
            f"{count_text(len(self.files), 'file')}"
        ]
        rows += [f"  lost  {finding}" for finding in self.losses]
        return "\n".join(map(visible, rows + [f"  note  {finding}" for finding in self.notes]))


class Contents(msgspec.Struct, frozen=True):
    """A tree on its way from one format to another."""

    structure: Structure
    leaves: tuple[ContentsLeaf, ...]
    """The leaves with their paths, in the structure's order."""
    label: str
    """The URL of the source, for errors."""
    sums: ArchiveChecksums
    """The checksums of archives that arrays are in; a checkpoint of ours has none of these."""
    format: str = "treeckpt"
    """The format of the source: one of `SOURCES`."""
    step: int | None = None
    metadata: dict[str, Any] = {}
    findings: tuple[Finding, ...] = ()
    refused: tuple[RefusedLeaf, ...] = ()
    """What only its own code could make and is no leaf: a container, or an attribute of one."""
    sidecars: tuple[tuple[str, Callable[[], bytes]], ...] = ()
    """Names of the files that were saved with it, and functions that read them."""
    unread: tuple[str, ...] = ()
    """Names of files beside those of the source that are not read: of another format, or in no index."""
    present: int = 0
    """The bytes that its arrays can take together: those of the files, and as many as views may repeat."""


def detect(path: Source) -> str:
    """Returns the format of the checkpoint at a path, by its files' names and first bytes: one of `SOURCES`.

    >>> tc.convert.detect("run/step_00000100")
    'treeckpt'

    Raises:
        CheckpointNotFound: there is nothing.
        FormatError: nothing that is known.
    """
    if (files := foreign_at(path)) is not None:
        return files.kind
    _check_own(path)
    return "treeckpt"


def _check_own(path: Source) -> None:
    """Refuses what is neither of another program nor a checkpoint of ours.

    Raises:
        CheckpointNotFound: there is nothing.
        FormatError: nothing that is known.
    """
    hint = f"Known formats are {', '.join(SOURCES)}"
    if (local := local_directory(path)) is not None:
        if not local.exists():
            raise CheckpointNotFound(str(local), expected="a checkpoint", found="nothing", hint="Check the path")
        if local.is_file():
            first = read_head(local, HEAD)
            bare = format_of_head(local.name, first) == "pickle"
            begins = f"the bytes {first[:9].hex(' ')}" if first else "nothing, as it is empty"
            raise FormatError(
                str(local),
                expected="a file of torch.save or safetensors",
                found="a bare pickle, as torch before 1.6 wrote it" if bare else f"one that begins with {begins}",
                hint="Load it with torch, in a place where its code may run, and save it anew" if bare else hint,
            )
    store = open_store(path)
    entries = store.entries()
    if INDEX_NAME not in entries and not any(map(parse_shard_name, entries)):
        names = sorted(name for name, entry in entries.items() if entry.regular)
        raise FormatError(store.url, expected="a checkpoint", found=f"{names[:5] or 'no files'}", hint=hint)


def open_source(path: Source, counted: CountedStores, *, alone: bool) -> Checkpoint:
    """Opens a checkpoint of any format.

    Args:
        counted: counts what is read.
        alone: whether this process reads all of the arrays that it reads.

    Raises:
        CheckpointNotFound, FormatError: as `detect`.
    """
    if (files := foreign_at(path)) is not None:
        # the files are counted, and not the arrays that are computed from them
        files.inner = counted(files.inner)
        return ForeignCheckpoint(files, alone=alone)
    _check_own(path)
    return Checkpoint(counted(open_store(path)), joined=True)


SMALL_NBYTES = 64 << 10
"""Bytes of an array, at most, that is read together with others."""
GROUP_NBYTES = 1 << 20
"""Bytes of arrays that are read together, at most."""


class SavedArray(LazyArray):
    """An array of a checkpoint of ours that no rank has for itself."""

    __slots__ = ("checkpoint", "leaf")

    def __init__(self, checkpoint: Checkpoint, leaf: Leaf, spec: ArraySpec, storage: Storage | None) -> None:
        super().__init__(spec, partial(read_region, checkpoint, leaf), storage)
        self.checkpoint, self.leaf = checkpoint, leaf

    def take(self, group: _Group, number: int) -> None:
        """Reads it from a group from now on."""
        self._read = partial(group.read, number)


class _Group:
    """Small arrays that are read together when the first one is read, and forgotten when each was read once."""

    def __init__(self, arrays: Sequence[SavedArray]) -> None:
        self._arrays = arrays
        self._found: list[np.ndarray | None] = []
        self._left = 0
        self._lock = threading.Lock()
        for number, array in enumerate(arrays):
            array.take(self, number)

    def read(self, number: int, region: Region) -> np.ndarray:
        with self._lock:
            if not self._left:
                self._found = [*read_arrays(self._arrays[0].checkpoint, [array.leaf for array in self._arrays])]
                self._left = len(self._arrays)
            data, self._found[number] = self._found[number], None
            self._left -= data is not None
        if data is None:  # it was read before
            array = self._arrays[number]
            return read_region(array.checkpoint, array.leaf, region)
        return data[region.slices()]


def read_together(leaves: Iterable[ContentsLeaf]) -> None:
    """Has small arrays of a checkpoint of ours read many at a time; the leaves are read in their order, each once."""
    arrays = dict.fromkeys(leaf for _, leaf in leaves if isinstance(leaf, SavedArray) and leaf.nbytes <= SMALL_NBYTES)
    group: list[SavedArray] = []
    left = GROUP_NBYTES
    for array in arrays:
        if array.nbytes > left:
            _Group(group)
            group, left = [], GROUP_NBYTES
        group.append(array)
        left -= array.nbytes
    _Group(group)


class _NativeReader:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._claims = Claims(checkpoint, whole=True)
        self._tables = JoinedTables(checkpoint)
        self._bases: dict[tuple[int, int | None], LazyArray] = {}

    def leaf(self, number: int, rank: int | None) -> Any:
        """Returns a leaf, that of a rank under `PerRank`; a `RefusedLeaf` for a value that cannot be decoded."""
        leaf = self.checkpoint.index.entries[number]
        record = leaf.record
        if isinstance(record, AliasRecord):
            return self._alias(leaf, record, rank)
        if leaf.spec is not None:
            return self._whole(leaf, rank)
        if leaf.stored is not None:
            self._claims.take(leaf.path, leaf)
            whole = Region.whole(leaf.stored.shape)
            data = read_region(self.checkpoint, leaf.as_array, whole, rank=rank or 0)
            return blob_value(data.data, leaf.stored.kind, leaf.path)
        assert isinstance(record, (ValueRecord, PerRankValues)), "all other leaves have specs"
        if isinstance(record, PerRankValues):
            value = record.values[int(np.flatnonzero(decode_runs(leaf.ranks or ()) == rank)[0])]
        else:
            value = record.value
        try:
            return decode(value, leaf.path, allow_pickle=False)
        except TreeckptError as error:
            return RefusedLeaf(leaf.path, error.found)

    def _whole(self, leaf: Leaf, rank: int | None) -> LazyArray:
        key = (leaf.number, rank if leaf.ranks is not None else None)
        if key not in self._bases:
            spec = _plain_spec(leaf)
            if (column := self._tables.column(leaf, spec)) is not None:
                self._bases[key] = column
                return column
            nbytes = math.prod(spec.shape) * dtype_of(spec.dtype).itemsize
            storage = Storage(new_address(nbytes), nbytes, None) if nbytes else None
            if leaf.ranks is None:
                self._bases[key] = SavedArray(self.checkpoint, leaf, spec, storage)
            else:
                read = partial(read_region, self.checkpoint, leaf, rank=rank or 0)
                self._bases[key] = LazyArray(spec, read, storage)
        return self._bases[key]

    def _alias(self, leaf: Leaf, record: AliasRecord, rank: int | None) -> LazyArray:
        base, spec, view = self._whole(self.checkpoint.index.entries[record.of], rank), _plain_spec(leaf), record.view
        if view is None:
            return LazyArray(spec, base.read, base.storage)
        address = base.storage.address if base.storage is not None else None
        # a part of a block costs all of it, to compare its checksum
        return strided_array(spec, elements_of(base), view.offset, view.strides, address, narrow=BLOCK)


def _plain_spec(leaf: Leaf) -> ArraySpec:
    """Returns the spec of an array without its regions and device."""
    assert leaf.spec is not None, "an array has a spec"
    return msgspec.structs.replace(leaf.spec, regions=None, device=None)


def read_contents(checkpoint: Checkpoint) -> Contents:
    """Returns the contents of a checkpoint, with its arrays left in the files.

    Of a checkpoint of ours, specs come from the index, and checksums are compared when arrays are read. State that each
    rank has of its own becomes a dict by rank. A leaf that only its own code could make is a `RefusedLeaf`.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: the state of the files.
    """
    if not isinstance(checkpoint, ForeignCheckpoint):
        return _read_native(checkpoint)
    read = checkpoint.contents
    sidecars = [] if checkpoint.is_file else sidecar_names(checkpoint.sizes, checkpoint.kind)
    known = {*sidecars, *(name for name in checkpoint.sizes if is_of_format(name, checkpoint.kind))}
    others = [name for name in checkpoint.sizes if name not in known and name[0] != "."]
    refused = {leaf.path: leaf for leaf in read.refused}
    leaves = tuple((path, refused.pop(path)) if leaf is ... else (path, leaf) for path, leaf in read.leaves)
    return Contents(
        read.structure,
        leaves,
        label=checkpoint.url,
        sums=checkpoint.sums,
        format=checkpoint.kind,
        metadata=read.metadata,
        refused=tuple(refused.values()),
        sidecars=tuple((name, partial(_content, checkpoint.store, name)) for name in sidecars),
        unread=(*read.unread, *(() if checkpoint.is_file else others)),
        present=most_nbytes(sum(checkpoint.sizes.values())),
    )


def _content(store: Store, name: str) -> bytes:
    """Returns the content of a file that another program wrote."""
    window = store_window(store, name)
    return window.read(0, window.size).tobytes()


def _read_native(checkpoint: Checkpoint) -> Contents:
    """Returns the contents of a checkpoint of ours."""
    index = checkpoint.index
    for file in index.file_list:
        if file.directory and file.name not in checkpoint.sizes:
            checkpoint.shard(file)  # raises the error that names the directories that are to be beside it
    checkpoint.check_against_files()
    for disk in index.disks_elsewhere(checkpoint.sizes):
        checkpoint.shard(index.disk_files(disk)[0])  # raises the error that names the disk
    structure, leaves, findings = _spread_ranks(index.structure, _NativeReader(checkpoint).leaf)
    return Contents(
        structure,
        leaves,
        label=checkpoint.url,
        sums=ArchiveChecksums(alone=True),
        step=index.step,
        metadata={
            key: decode(value, f"custom_metadata/{key}", allow_pickle=False) for key, value in index.metadata.items()
        },
        findings=findings,
        sidecars=tuple((one.name, partial(read_sidecar, checkpoint.store, index, one.name)) for one in index.sidecars),
        present=sum(checkpoint.sizes.get(file.name, 0) for file in index.file_list),
    )


def _spread_ranks(
    structure: Structure, leaf: Callable[[int, int | None], Any]
) -> tuple[Structure, tuple[ContentsLeaf, ...], tuple[Finding, ...]]:
    """Replaces each `PerRank` by a dict by rank; returns the structure, its leaves, and the changes.

    Args:
        leaf: returns leaf number i, as of a rank where it is under a `PerRank`.
    """
    numbers = itertools.count()
    rows: list[tuple[str, int, int | None]] = []
    findings: list[Finding] = []

    def walk(node: Structure, path: str) -> Structure:
        if node is None:
            rows.append((path, next(numbers), None))
            return None
        if not isinstance(node, PerRankNode):
            children: list[Structure] = []
            for key, child in zip(keys_of(node, path), node.children, strict=True):
                children.append(walk(child, child_path(path, key)))
            return msgspec.structs.replace(node, children=tuple(children))
        by_rank: list[tuple[int, Structure]] = []
        for group, child in zip(node.ranks, node.children, strict=True):
            first = len(rows)
            made = walk(child, path)
            # one walk for all ranks of a group: its rows are repeated for each
            shared, rows[first:] = rows[first:], []
            for rank in decode_runs(group).tolist():
                by_rank.append((rank, made))
                rows.extend((_with_rank(below, path, rank), number, rank) for below, number, _ in shared)
        found = f"state of its own for each of {count_text(len(by_rank), 'rank')}"
        findings.append(Finding(path, "one tree", found, "a dict by rank"))
        return DictNode(tuple(rank for rank, _ in by_rank), tuple(child for _, child in by_rank))

    spread = walk(structure, "")
    return spread, tuple((path, leaf(number, rank)) for path, number, rank in rows), tuple(findings)


def _with_rank(path: str, above: str, rank: int) -> str:
    """Inserts a rank into a path, below `above`."""
    rest = path[len(above) :].removeprefix("/")
    return "/".join(part for part in (above, str(rank), rest) if part)


def tree_of(contents: Contents) -> Any:
    """Returns the tree of some contents."""
    return unflatten(contents.structure, iter([leaf for _, leaf in contents.leaves]), resolve=resolve)


def subtree(contents: Contents, root: str) -> Contents:
    """Returns the subtree at a path, with paths from there.

    Raises:
        MismatchError: there is no such path.
    """
    if not root:
        return contents
    node, path = contents.structure, ""
    while path != root:
        keys = keys_of(node, path) if node is not None else ()
        paths = [child_path(path, key) for key in keys]
        step = next((i for i, text in enumerate(paths) if f"{root}/".startswith(text + "/")), None)
        if step is None or node is None:
            raise MismatchError(
                f"{root}: {contents.label}",
                expected="a path of the tree",
                found=f"only {', '.join(paths[:8]) or 'a leaf'}{' ...' if len(paths) > 8 else ''}",
                hint="treeckpt show lists the paths of a checkpoint",
            )
        path, node = paths[step], node.children[step]
    cut, above = len(root) + 1, root + "/"
    leaves = tuple((path[cut:], leaf) for path, leaf in contents.leaves if f"{path}/".startswith(above))
    findings, refused = (
        tuple(msgspec.structs.replace(one, path=one.path[cut:]) for one in noted if f"{one.path}/".startswith(above))
        for noted in (contents.findings, contents.refused)
    )
    return msgspec.structs.replace(contents, structure=node, leaves=leaves, findings=findings, refused=refused)


def choose(contents: Contents, wanted: LoadOptions) -> Contents:
    """Keeps the leaves that are wanted; an element of a sequence that is not, and cannot be read, becomes None.

    Raises:
        MismatchError: a glob of `select` names nothing.
        TreeError: a leaf is wanted that only its own code could make.
    """
    if wanted.exclude:
        left_out = Globs(wanted.exclude)
        contents = _kept(contents, lambda path: not left_out.match(path))
    if wanted.select:
        chosen = Globs(wanted.select)
        for glob in chosen.unused([path for path, _ in contents.leaves]):
            raise MismatchError(
                f"{glob}: {contents.label}", expected="a glob that names some leaf", found="none of that name"
            )
        contents = _kept(contents, chosen.match)
    unread = {path: leaf for path, leaf in contents.leaves if isinstance(leaf, RefusedLeaf)}
    for path, leaf in (*unread.items(), *((leaf.path, leaf) for leaf in contents.refused)):
        if wanted.selects(path):
            raise refusal(msgspec.structs.replace(leaf, path=path), contents.label)
    if not unread:
        return contents
    gone = [Finding(path, "sequences without gaps", "what cannot be read", "None") for path in unread]
    kept = map_leaves(contents, lambda path, leaf: None if path in unread else leaf)
    return msgspec.structs.replace(kept, findings=(*kept.findings, *gone))


def _kept(contents: Contents, keep: Callable[[str], bool]) -> Contents:
    kept = [keep(path) for path, _ in contents.leaves]
    if all(kept):
        return contents
    marks = iter(kept)
    structure, whole = _pruned(contents.structure, marks)
    leaves = tuple(leaf for leaf, mark in zip(contents.leaves, whole, strict=True) if mark)
    paths = {path for path, _ in leaves}
    findings = tuple(f for f in contents.findings if f.path in paths or keep(f.path))
    return msgspec.structs.replace(contents, structure=structure, leaves=leaves, findings=findings)


_MAPPINGS = (DictNode, OrderedDictNode, DefaultDictNode)


def _pruned(node: Structure, marks: Iterator[bool]) -> tuple[Structure, list[bool]]:
    """Returns a structure without unmarked leaves, and for each leaf whether it is kept.

    Entries of mappings go; other containers keep all their elements or go as a whole.
    """
    if node is None:
        return None, [next(marks)]
    parts: list[tuple[Structure, list[bool]]] = []
    for child in node.children:
        part: tuple[Structure, list[bool]] = _pruned(child, marks)
        parts.append(part)
    flags = [mark for _, part in parts for mark in part]
    if isinstance(node, _MAPPINGS):
        chosen = [(key, child) for key, (child, part) in zip(node.keys, parts, strict=True) if not part or any(part)]
        keys, children = tuple(key for key, _ in chosen), tuple(child for _, child in chosen)
        return msgspec.structs.replace(node, keys=keys, children=children), flags
    if not any(flags):
        return node, flags
    elements = [
        (pruned, part) if isinstance(pruned, _MAPPINGS) or any(part) else (child, [True] * len(part))
        for child, (pruned, part) in zip(node.children, parts, strict=True)
    ]
    made = msgspec.structs.replace(node, children=tuple(child for child, _ in elements))
    return made, [mark for _, part in elements for mark in part]


def map_leaves(contents: Contents, change: Callable[[str, Any], Any]) -> Contents:
    """Replaces each leaf."""
    return msgspec.structs.replace(contents, leaves=tuple((path, change(path, leaf)) for path, leaf in contents.leaves))
