"""The load: match what is wanted with what was saved, plan the reads, fill, and put the tree together.

Everything that can be checked is checked before memory is touched: keys, kinds, shapes, dtypes, layouts, and the sizes of all
files that are needed. Ranks do not talk: each reads the ranges that it wants.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from .core.dtypes import dtype_of
from .core.errors import CorruptError, FormatError, MismatchError
from .core.plan import Want, plan_load
from .core.records import AliasRecord, Index, Leaf, PerRankValues, ValueRecord
from .core.region import Region
from .core.runs import decode_runs, encode_runs
from .core.spec import ArraySpec
from .core.structure import PerRankNode, Structure, rank_key
from .core.tree import flatten, graft, own_child, replace_leaves, unflatten
from .io.codec import read_index
from .io.engine import Opened, run_load
from .io.record import Recorder
from .io.store import Store
from .leaves.base import HostArray, Target, TargetPiece, raw_dtype
from .leaves.registry import decode, encode, library_of, like_of, new_array, resolve, target_of
from .reports import LoadReport

__all__ = ["LoadOptions", "load_into_tree", "load_tree"]

Verify = bool | Literal["stream"]


class LoadOptions(msgspec.Struct, frozen=True):
    """The knobs of a load; see `treeckpt.load`."""

    select: tuple[str, ...] | None = None
    strict: bool = True
    cast: bool = False
    device: str | None = None
    verify: Verify = True
    per_rank: Literal["error", "take"] = "error"
    allow_pickle: bool = False
    namespace: str = ""


class _Casting:
    """A target of another dtype than was saved."""

    def __init__(self, inner: Any, spec: ArraySpec, saved: str) -> None:
        self.inner, self.spec, self.saved = inner, spec, saved

    def write(self, box: tuple[slice, ...], data: np.ndarray) -> None:
        self.inner.write(box, library_of(self.spec).cast(data, self.saved, self.spec.dtype))


class _Load:
    """One load on one rank."""

    def __init__(self, store: Store, rank: int, options: LoadOptions) -> None:
        self.store, self.options, self.rank = store, options, rank
        self.recorder = Recorder(rank)
        self.index: Index = read_index(store)
        self.source_rank = rank % self.index.world if options.per_rank == "take" else rank
        self.wants: list[Want] = []
        self.pieces: list[TargetPiece] = []
        self.itemsizes: list[int] = []
        self.paths: list[str] = []
        self.after: list[Callable[[], None]] = []
        self.read_nbytes = 0
        self.loaded = 0
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    # matching ------------------------------------------------------------------------------------------------

    def selected(self, path: str) -> bool:
        """Whether `select` asks for a path, itself or something above it."""
        select = self.options.select
        if select is None:
            return True
        return any(fnmatch.fnmatchcase(path, g) or path.startswith(g.rstrip("/") + "/") for g in select)

    def find(self, path: str) -> Leaf | None:
        """The saved leaf at a path; under `PerRank` the one of the rank that is wanted."""
        found = self.index.by_path.get(path)
        if found is None:
            return None
        if found[0].ranks is None:
            return found[0]
        for leaf in found:
            if self.source_rank in decode_runs(leaf.ranks or ()):
                return leaf
        raise MismatchError(
            path,
            expected=f"state of rank {self.source_rank}",
            found=f"state saved by a world of {self.index.world}",
            hint="The world size changed: leave this leaf out with `...` in like, or pass per_rank='take'",
        )

    def match(self, path: str, leaf: Leaf, target: Target) -> None:
        """Checks a target against what was saved, and wants it.

        Raises:
            MismatchError: of shape or dtype.
        """
        spec = leaf.spec
        assert spec is not None, "values are decoded, not read"
        if target.spec.shape != spec.shape:
            raise MismatchError(
                path,
                expected=f"shape {target.spec.shape}",
                found=f"{spec.shape} in the checkpoint",
                hint="Ask for the saved shape, or leave the leaf out with `...`",
            )
        if target.spec.dtype != spec.dtype and not self.options.cast:
            raise MismatchError(
                path,
                expected=target.spec.dtype,
                found=f"{spec.dtype} in the checkpoint",
                hint="Pass cast=True to convert",
            )
        self.want(path, leaf, target)

    def want(self, path: str, leaf: Leaf, target: Target) -> None:
        """Plans to read a target's regions."""
        spec = leaf.spec
        assert spec is not None, "values are decoded, not read"
        pieces = list(target.pieces)
        if target.spec.dtype != spec.dtype:
            pieces = [TargetPiece(p.region, _Casting(p.data, target.spec, spec.dtype)) for p in pieces]
        self.loaded += 1
        record = leaf.record
        if isinstance(record, AliasRecord) and record.view is not None:
            self._want_view(path, leaf, record, pieces)
            return
        for piece in pieces:
            self._want_piece(path, leaf, piece, dtype_of(spec.dtype).itemsize)

    def _want_piece(self, path: str, leaf: Leaf, piece: TargetPiece, itemsize: int) -> None:
        if not piece.region.size:
            return
        chunks = self.index.chunks_of(leaf, piece.region, rank=self.source_rank)
        covered = sum(_overlap(chunk.region, piece.region) for chunk in chunks)
        if covered != piece.region.size:
            raise FormatError(
                path,
                expected=f"chunks that hold each of {piece.region.size} elements once",
                found=f"{covered} elements",
                hint="The index does not describe the whole array; try treeckpt rebuild-index",
            )
        self.wants.append(Want(piece.region, itemsize, chunks))
        self.pieces.append(piece)
        self.itemsizes.append(itemsize)
        self.paths.append(path)

    def _want_view(self, path: str, leaf: Leaf, record: AliasRecord, pieces: Sequence[TargetPiece]) -> None:
        """A view is cut out of its base, which is read whole."""
        base, view, spec = self.index.entries[record.of], record.view, leaf.spec
        assert base.spec is not None and view is not None and spec is not None, "checked when the index was read"
        raw = raw_dtype(dtype_of(spec.dtype).itemsize)
        memory = np.empty(base.spec.shape, raw)
        self._want_piece(path, base, TargetPiece(Region.whole(base.spec.shape), HostArray(memory)), raw.itemsize)
        strides = tuple(s * raw.itemsize for s in view.strides)

        def cut() -> None:
            window = np.ndarray(spec.shape, raw, memory, view.offset * raw.itemsize, strides)
            for piece in pieces:
                box = tuple(slice(0, n) for n in piece.region.shape)
                piece.data.write(box, window[piece.region.slices()])

        self.after.append(cut)

    # reading -------------------------------------------------------------------------------------------------

    def check_memory(self) -> None:
        """Refuses an index that claims more array bytes than its files hold, before anything is allocated by its word."""
        sizes = self.store.sizes()
        for file in self.index.file_list:
            if file.nbytes and sizes.get(file.name) != file.header + file.nbytes:
                found = sizes.get(file.name)
                raise CorruptError(
                    f"{self.store.url}/{file.name}",
                    expected=f"a shard of {file.header + file.nbytes} bytes",
                    found="no such file" if found is None else f"{found} bytes",
                    hint="The file was lost, changed or cut short; restore it from a copy",
                )

    def run(self) -> None:
        """Reads everything that is wanted."""
        borders = {rank: [f.stream for f in self.index.files_of(rank)][1:] for rank in self._split_ranks()}
        plan = plan_load(self.wants, borders=borders)
        opened: dict[str, Opened] = {}

        def read(targets: Callable[[int], TargetPiece | None], verify: bool) -> int:
            return run_load(
                self.store,
                self.index,
                plan,
                targets,
                itemsize=self.itemsizes.__getitem__,
                paths=self.paths.__getitem__,
                verify=verify,
                opened=opened,
                recorder=self.recorder,
            )

        if self.options.verify is True and self.in_place:
            read(lambda want: None, True)
            self.read_nbytes = read(self.pieces.__getitem__, False)
        else:
            self.read_nbytes = read(self.pieces.__getitem__, self.options.verify is not False)
        for action in self.after:
            action()

    in_place = False

    def _split_ranks(self) -> set[int]:
        return {file.rank for file in self.index.file_list if file.part}

    def report(self) -> LoadReport:
        nbytes = sum(w.region.size * n for w, n in zip(self.wants, self.itemsizes, strict=True))
        return LoadReport(
            self.store.url,
            nbytes,
            self.read_nbytes,
            self.loaded,
            tuple(self.missing),
            tuple(self.unexpected),
            self.recorder.seconds,
        )

    def value(self, leaf: Leaf, path: str) -> object:
        """A saved value."""
        record = leaf.record
        if isinstance(record, PerRankValues):
            position = int(np.flatnonzero(decode_runs(leaf.ranks or ()) == self.source_rank)[0])
            return decode(record.values[position], path, allow_pickle=self.options.allow_pickle)
        assert isinstance(record, ValueRecord), "arrays are read, not decoded"
        return decode(record.value, path, allow_pickle=self.options.allow_pickle)

    def check_keys(self, asked: set[str]) -> None:
        """Compares what was asked for with what is there.

        Raises:
            MismatchError: under `strict`, naming what is missing and what is unexpected.
        """
        self.unexpected = [path for path in self.index.by_path if path not in asked and self.selected(path)]
        if self.options.strict and (self.missing or self.unexpected):
            first = (self.missing or self.unexpected)[0]
            raise MismatchError(
                first,
                expected="the leaves of like and of the checkpoint to be the same",
                found=f"{_some('missing in the checkpoint', self.missing)}"
                f"{'; ' if self.missing and self.unexpected else ''}"
                f"{_some('not asked for', self.unexpected)}",
                hint="Pass strict=False to load what both have, or `...` in like for what you do not want",
            )


def _some(what: str, paths: Sequence[str]) -> str:
    if not paths:
        return ""
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return f"{len(paths)} {what}: {', '.join(paths[:5])}{more}"


def _overlap(a: Region, b: Region) -> int:
    return math.prod(
        max(0, min(o1 + n1, o2 + n2) - max(o1, o2))
        for o1, n1, o2, n2 in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )


# without like ----------------------------------------------------------------------------------------------------


def _as_saved(job: _Load) -> object:
    """The whole tree, or what `select` leaves of it; unselected leaves are `...`."""
    job.check_memory()
    index, made = job.index, dict[int, Any]()
    order = list(_own_leaves(job))
    for leaf in order:
        if not job.selected(leaf.path):
            made[leaf.number] = ...
        elif leaf.spec is None:
            made[leaf.number] = job.value(leaf, leaf.path)
            job.loaded += 1
        elif not _is_tied(leaf, job):
            target = new_array(msgspec.structs.replace(leaf.spec, regions=None), leaf.path, job.options.device)
            job.want(leaf.path, leaf, target)
            made[leaf.number] = target.leaf
    job.run()
    for leaf in order:
        if leaf.number not in made:
            made[leaf.number] = _tied(leaf, made, job)
    leaves = iter([made[leaf.number] for leaf in order])
    structure = index.structure
    if any(leaf.ranks is not None for leaf in order):
        structure = _own_structure(structure, job)
    return unflatten(structure, leaves, resolve=resolve, rank=job.rank, namespace=job.options.namespace)


def _is_tied(leaf: Leaf, job: _Load) -> bool:
    """Whether a leaf takes its memory from another one that is loaded too."""
    return isinstance(leaf.record, AliasRecord) and job.selected(job.index.entries[leaf.record.of].path)


def _tied(leaf: Leaf, made: dict[int, Any], job: _Load) -> Any:
    record, spec = leaf.record, leaf.spec
    assert isinstance(record, AliasRecord) and spec is not None, "only ties are left"
    base = made[record.of]
    job.loaded += 1
    base_spec = job.index.entries[record.of].spec
    if record.view is None and base_spec is not None and _same_kind(base_spec, spec):
        return base
    strides = record.view.strides if record.view is not None else _strides(spec.shape)
    offset = record.view.offset if record.view is not None else 0
    return library_of(spec).view(base, spec, offset, strides)


def _same_kind(a: ArraySpec, b: ArraySpec) -> bool:
    return (a.kind, a.requires_grad) == (b.kind, b.requires_grad)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _own_leaves(job: _Load) -> Iterator[Leaf]:
    for leaf in job.index.entries:
        if leaf.ranks is None or job.find(leaf.path) is leaf:
            yield leaf


def _own_structure(structure: Structure, job: _Load) -> Structure:
    """The structure with each `PerRank` reduced to the subtree of the rank that is wanted, as this rank's own."""
    if structure is None:
        return None
    if isinstance(structure, PerRankNode):
        own = own_child(structure, job.source_rank, "")
        return PerRankNode((encode_runs([job.rank]),), (own,))
    children = tuple(_own_structure(child, job) for child in structure.children)
    return msgspec.structs.replace(structure, children=children)


# with like -------------------------------------------------------------------------------------------------------


def _plain(path: str, rank: int) -> str:
    """A path of a live tree as the index has it."""
    mark = rank_key(rank)
    if mark not in path:
        return path
    return "/".join("~rank*" if step == mark else step for step in path.split("/"))


def _is_array_like(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _resolve_like(job: _Load, like: object, make: Callable[[object, str], Target | None]) -> list[Any]:
    """The new leaves for a tree like this, in its order; arrays are wanted, not yet read."""
    _, leaves = flatten(like, rank=job.rank, namespace=job.options.namespace)
    asked: set[str] = set()
    pending: list[tuple[object, str, Leaf | None]] = []
    for text, wanted in leaves:
        path = _plain(text, job.rank)
        asked.add(path)
        if wanted is ... or not job.selected(path):
            pending.append((wanted, path, None))
            continue
        if path not in job.index.by_path:
            job.missing.append(path)
            pending.append((wanted, path, None))
            continue
        pending.append((wanted, path, job.find(path)))
    job.check_keys(asked)
    made: list[Any] = []
    ties: dict[tuple[int, int], Any] = {}
    for wanted, path, leaf in pending:
        made.append(wanted if leaf is None else _fill(job, wanted, path, leaf, make, ties))
    return made


def _fill(
    job: _Load,
    wanted: object,
    path: str,
    leaf: Leaf,
    make: Callable[[object, str], Target | None],
    ties: dict[tuple[int, int], Any],
) -> Any:
    if leaf.spec is None:
        value = job.value(leaf, path)
        if isinstance(wanted, ArraySpec) or (_is_array_like(wanted) and make(wanted, path) is not None):
            raise MismatchError(path, expected="an array", found=f"the value {value!r:.60} in the checkpoint")
        job.loaded += 1
        return value
    record = leaf.record
    base = record.of if isinstance(record, AliasRecord) and record.view is None else leaf.number
    if (id(wanted), base) in ties:
        return ties[id(wanted), base]
    target = make(wanted, path)
    if target is None:
        raise MismatchError(
            path,
            expected=f"the value {wanted!r:.60}",
            found=f"an array in the checkpoint, {leaf.spec.dtype} of shape {leaf.spec.shape}",
            hint="Put an array, a tc.ArraySpec or `...` there in like",
        )
    job.match(path, leaf, target)
    ties[id(wanted), base] = target.leaf
    return target.leaf


def load_tree(store: Store, like: object, rank: int, options: LoadOptions) -> tuple[object, LoadReport]:
    """Loads a new tree; see `treeckpt.load`."""
    job = _Load(store, rank, options)
    if like is None:
        return _as_saved(job), job.report()

    def make(wanted: object, path: str) -> Target | None:
        return like_of(wanted, path, rank, options.device)

    job.check_memory()
    leaves = _resolve_like(job, like, make)
    job.run()
    return replace_leaves(like, iter(leaves), namespace=options.namespace), job.report()


def load_into_tree(store: Store, tree: object, rank: int, options: LoadOptions) -> LoadReport:
    """Fills a tree in place; see `treeckpt.load_into`."""
    job = _Load(store, rank, options)
    job.in_place = True
    job.check_memory()
    leaves = _resolve_like(job, tree, lambda wanted, path: target_of(wanted, path, rank))
    _, before = flatten(tree, rank=rank, namespace=options.namespace)
    # what is equal already stays the very object, so that only real changes need a container that can change
    kept = [old if _equal_values(old, new) else new for (_, old), new in zip(before, leaves, strict=True)]
    new = replace_leaves(tree, iter(kept), namespace=options.namespace)
    _check_graft(tree, new, options)
    job.run()
    graft(tree, new, namespace=options.namespace)
    return job.report()


def _equal_values(old: object, new: object) -> bool:
    if old is new:
        return True
    if type(old) is not type(new) or _is_array_like(old):
        return False
    try:
        return encode(old, "", allow_pickle=False) == encode(new, "", allow_pickle=False)
    except Exception:
        return False


def _check_graft(tree: object, new: object, options: LoadOptions) -> None:
    """Refuses values that would have to change inside a tuple, before anything is written."""
    shadow = replace_leaves(tree, iter([leaf for _, leaf in flatten(tree, namespace=options.namespace)[1]]),
                            namespace=options.namespace)  # fmt: skip
    stuck = graft(shadow, new, namespace=options.namespace)
    if stuck:
        path, value = stuck[0]
        raise MismatchError(
            path,
            expected="a value that is as saved, or in a container that can change",
            found=f"{value!r:.60} in the checkpoint",
            hint="Use load(path, like=tree), which returns a new tree",
        )
