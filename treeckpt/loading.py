"""The load: match what is wanted with what was saved, have it read, and put the tree together.

Everything that can be checked is checked before memory is touched: keys, kinds, shapes, dtypes, layouts, and then that
every shard which is needed is there, whole and of this save. Ranks do not talk: each reads the ranges that it wants.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from .core.errors import MismatchError, TreeckptError
from .core.records import AliasRecord, Leaf, PerRankValues, ValueRecord
from .core.runs import decode_runs, encode_runs
from .core.spec import ArraySpec
from .core.structure import PerRankNode, Structure, rank_key
from .core.tree import flatten, graft, own_child, replace_leaves, unflatten
from .filling import Filling, Means, Slot, Verify
from .io.codec import read_index
from .io.comm import Comm
from .io.record import Recorder
from .io.relay import Relay, open_relay, together
from .io.slabs import Slabs
from .io.store import Store
from .leaves.base import Target
from .leaves.registry import abstract_of, decode, encode, library_of, like_of, new_array, resolve, target_of
from .reports import LoadReport

__all__ = ["MEMORY", "LoadOptions", "load_into_tree", "load_tree"]

MEMORY = 64 << 20
"""Bytes of buffers that a load may take, unless told otherwise."""


class LoadOptions(msgspec.Struct, frozen=True):
    """The knobs of a load; see `treeckpt.load`."""

    select: tuple[str, ...] | None = None
    strict: bool = True
    cast: bool = False
    device: str | None = None
    verify: Verify = True
    per_rank: Literal["error", "take"] = "error"
    copy: bool = False
    mmap: bool = False
    allow_pickle: bool = False
    namespace: str = ""
    read: Literal["each", "once"] = "each"
    memory: int = MEMORY


_Make = Callable[[Any, str], Target | None]
"""Gives the target of a wanted leaf at a path."""


class _Load:
    """One load on one rank."""

    def __init__(self, store: Store, comm: Comm, options: LoadOptions) -> None:
        self.options, self.rank = options, comm.rank
        self.recorder = Recorder(comm.rank)
        self.index = read_index(store)
        self.source_rank = comm.rank % self.index.world
        self.refuse_own = options.per_rank == "error" and comm.size != self.index.world
        self.world = comm.size
        self.take = None if options.copy else Slabs().take
        """Memory for new arrays; with `copy` each has its own."""
        self.filling = Filling(store, self.index, self.source_rank, self.recorder)
        self.loaded = 0
        self.missing: list[str] = []
        self.unexpected: list[str] = []

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
        if self.refuse_own and self.selected(path):
            raise MismatchError(
                path,
                expected=f"state of one rank of {self.world}",
                found=f"state saved by a world of {self.index.world}",
                hint="The world size changed: leave this leaf out with `...` in like, or pass per_rank='take'",
            )
        for leaf in found:
            if self.source_rank in decode_runs(leaf.ranks or ()):
                return leaf
        raise MismatchError(
            path,
            expected=f"state of rank {self.source_rank}",
            found="state of other ranks only",
            hint="Leave this leaf out with `...` in like",
        )

    def value(self, leaf: Leaf, path: str) -> object:
        """A saved value."""
        record = leaf.record
        self.loaded += 1
        if isinstance(record, PerRankValues):
            position = int(np.flatnonzero(decode_runs(leaf.ranks or ()) == self.source_rank)[0])
            return decode(record.values[position], path, allow_pickle=self.options.allow_pickle)
        assert isinstance(record, ValueRecord), "arrays are read, not decoded"
        return decode(record.value, path, allow_pickle=self.options.allow_pickle)

    def array(self, path: str, leaf: Leaf, spec: ArraySpec | None, make: _Make, wanted: object) -> Slot:
        """Wants an array: as a view of what is read where that is possible, else in the target that `make` makes."""
        self.loaded += 1
        self.filling.claim(path, leaf)
        if spec is not None and not self.options.copy and self._on_host(spec) and spec.regions is None:
            if spec is not leaf.spec:
                self.check(path, leaf, spec)
            if leaf.spec is not None and spec.dtype == leaf.spec.dtype:
                slot = self.filling.land(path, leaf, spec)
                if slot is not None:
                    return slot
        target = make(wanted, path)
        if target is None:
            raise MismatchError(
                path,
                expected="a value",
                found=f"an array in the checkpoint, {leaf.spec and leaf.spec.dtype} of shape "
                f"{leaf.spec and leaf.spec.shape}",
                hint="Put an array, a tc.ArraySpec or `...` there in like",
            )
        self.check(path, leaf, target.spec)
        return self.filling.want(path, leaf, target)

    def new(self, spec: Any, path: str) -> Target:
        """A new array where the options put it."""
        return new_array(spec, path, self.options.device, take=self.take)

    def _on_host(self, spec: ArraySpec) -> bool:
        device = self.options.device
        if device == "original":
            return spec.device is None
        return device == "cpu" or (device is None and spec.device is None)

    def check(self, path: str, leaf: Leaf, wanted: ArraySpec) -> None:
        """Compares what is wanted with what was saved.

        Raises:
            MismatchError: of shape or dtype.
        """
        saved = leaf.spec
        assert saved is not None, "values are decoded, not read"
        if wanted.shape != saved.shape:
            raise MismatchError(
                path,
                expected=f"shape {wanted.shape}",
                found=f"{saved.shape} in the checkpoint",
                hint="Ask for the saved shape, or leave the leaf out with `...`",
            )
        if wanted.dtype != saved.dtype and not self.options.cast:
            raise MismatchError(
                path,
                expected=wanted.dtype,
                found=f"{saved.dtype} in the checkpoint",
                hint="Pass cast=True to convert",
            )

    def check_keys(self, asked: set[str], left_out: Sequence[str]) -> None:
        """Compares what was asked for with what is there.

        Args:
            left_out: paths of `...` in like, each of which stands for all that was saved below it.

        Raises:
            MismatchError: under `strict`, naming what is missing and what is unexpected.
        """
        below = tuple(f"{path}/" if path else "" for path in left_out)
        self.unexpected = [
            path
            for path in self.index.by_path
            if path not in asked and not path.startswith(below) and self.selected(path)
        ]
        if self.options.strict and (self.missing or self.unexpected):
            texts = [_some("missing in the checkpoint", self.missing), _some("not asked for", self.unexpected)]
            raise MismatchError(
                (self.missing or self.unexpected)[0],
                expected="the leaves of like and of the checkpoint to be the same",
                found="; ".join(text for text in texts if text),
                hint="Pass strict=False to load what both have, or `...` in like for what you do not want",
            )

    def report(self) -> LoadReport:
        return LoadReport(
            self.filling.store.url,
            self.filling.nbytes,
            self.filling.read_nbytes,
            self.loaded,
            tuple(self.missing),
            tuple(self.unexpected),
            self.recorder.seconds,
        )


def _some(what: str, paths: Sequence[str]) -> str:
    if not paths:
        return ""
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return f"{len(paths)} {what}: {', '.join(paths[:5])}{more}"


# without like ----------------------------------------------------------------------------------------------------


def _as_saved(job: _Load) -> Callable[[], object]:
    """Wants the whole tree, or what `select` leaves of it; gives what builds it once the arrays have been read.

    Unselected leaves are `...`.
    """
    made: dict[int, Slot] = {}
    order = [leaf for leaf in job.index.entries if leaf.ranks is None or job.find(leaf.path) is leaf]
    for leaf in order:
        if not job.selected(leaf.path):
            made[leaf.number] = Slot(...)
        elif leaf.spec is None:
            made[leaf.number] = Slot(job.value(leaf, leaf.path))
        elif not _is_tied(leaf, job):
            made[leaf.number] = _array_as_saved(job, leaf, leaf.spec)

    def build() -> object:
        for leaf in order:
            if leaf.number not in made:
                made[leaf.number] = Slot(_tied(leaf, made, job))
        structure = job.index.structure
        if any(leaf.ranks is not None for leaf in order):
            structure = _own_structure(structure, job)
        leaves = iter([made[leaf.number].leaf for leaf in order])
        return unflatten(structure, leaves, resolve=resolve, rank=job.rank, namespace=job.options.namespace)

    return build


def _array_as_saved(job: _Load, leaf: Leaf, saved: ArraySpec) -> Slot:
    device = job.options.device
    spec = saved if device == "original" else msgspec.structs.replace(saved, device=None) if saved.device else saved

    # without torch new_array says so; a view would fail later, and less clearly
    return job.array(leaf.path, leaf, spec, job.new, spec)


def _is_tied(leaf: Leaf, job: _Load) -> bool:
    """Whether a leaf takes its memory from another one that is loaded too."""
    return isinstance(leaf.record, AliasRecord) and job.selected(job.index.entries[leaf.record.of].path)


def _tied(leaf: Leaf, made: dict[int, Slot], job: _Load) -> Any:
    record, spec = leaf.record, leaf.spec
    assert isinstance(record, AliasRecord) and spec is not None, "only ties are left"
    base, base_spec = made[record.of].leaf, job.index.entries[record.of].spec
    job.loaded += 1
    same = base_spec is not None and (base_spec.kind, base_spec.requires_grad) == (spec.kind, spec.requires_grad)
    if record.view is None and same:
        return base
    strides = tuple(math.prod(spec.shape[d + 1 :]) for d in range(len(spec.shape)))
    offset = 0
    if record.view is not None:
        offset, strides = record.view.offset, record.view.strides
    return library_of(spec).view(base, spec, offset, strides)


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


def _plain(path: str, mark: str) -> str:
    """A path of a live tree as the index has it; `mark` is the step into this rank's own."""
    if mark not in path:
        return path
    return "/".join("~rank*" if step == mark else step for step in path.split("/"))


def _is_array_like(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _match(job: _Load, like: object, make: _Make, *, views: bool) -> tuple[list[tuple[str, object]], list[Slot]]:
    """The leaves of a tree like this, and slots for them, in its order; arrays are wanted, not yet read."""
    _, leaves = flatten(like, rank=job.rank, namespace=job.options.namespace)
    asked: set[str] = set()
    pairs: list[tuple[object, str, Leaf | None]] = []
    mark = rank_key(job.rank)
    for text, wanted in leaves:
        path = _plain(text, mark)
        asked.add(path)
        leaf = None
        if wanted is not ... and job.selected(path):
            leaf = job.find(path)
            if leaf is None:
                job.missing.append(path)
        pairs.append((wanted, path, leaf))
    job.check_keys(asked, [path for wanted, path, _ in pairs if wanted is ...])
    ties: dict[tuple[int, int], Slot] = {}
    return leaves, [
        Slot(wanted) if leaf is None else _slot(job, wanted, path, leaf, make, ties, views)
        for wanted, path, leaf in pairs
    ]


def _slot(
    job: _Load,
    wanted: object,
    path: str,
    leaf: Leaf,
    make: _Make,
    ties: dict[tuple[int, int], Slot],
    views: bool,
) -> Slot:
    if leaf.spec is None:
        value = job.value(leaf, path)
        if isinstance(wanted, ArraySpec) or (_is_array_like(wanted) and make(wanted, path) is not None):
            raise MismatchError(path, expected="an array", found=f"the value {value!r:.60} in the checkpoint")
        return Slot(value)
    record = leaf.record
    base = record.of if isinstance(record, AliasRecord) and record.view is None else leaf.number
    # leaves that are one object in like, and one array in the checkpoint, stay one object
    slot = ties.get((id(wanted), base))
    if slot is None:
        spec = abstract_of(wanted, path, job.rank) if views else None
        slot = ties[id(wanted), base] = job.array(path, leaf, spec, make, wanted)
    return slot


def load_tree(store: Store, like: object, comm: Comm, options: LoadOptions) -> tuple[object, LoadReport]:
    """Loads a new tree; see `treeckpt.load`."""
    relay, rank = _relay(comm, options), comm.rank
    with together(relay):
        job = _Load(store, comm, options)

        def make(wanted: Any, path: str) -> Target | None:
            return like_of(wanted, path, rank, options.device, take=job.take)

        build = _as_saved(job) if like is None else _as_like(job, like, _match(job, like, make, views=True)[1])
    job.filling.run(options.verify, Means(options.memory, mapped=options.mmap, relay=relay))
    return build(), job.report()


def _as_like(job: _Load, like: object, slots: Sequence[Slot]) -> Callable[[], object]:
    return lambda: replace_leaves(like, iter([slot.leaf for slot in slots]), namespace=job.options.namespace)


def load_into_tree(store: Store, tree: object, comm: Comm, options: LoadOptions) -> LoadReport:
    """Fills a tree in place; see `treeckpt.load_into`."""
    relay, rank = _relay(comm, options), comm.rank
    with together(relay):
        job = _Load(store, comm, options)
        before, slots = _match(job, tree, lambda wanted, path: target_of(wanted, path, rank), views=False)
        # what is equal already stays the very object, so that only real changes need a container that can change
        kept = [old if _is_same(old, slot.leaf) else slot.leaf for (_, old), slot in zip(before, slots, strict=True)]
        new = tree
        if any(old is not leaf for (_, old), leaf in zip(before, kept, strict=True)):
            new = replace_leaves(tree, iter(kept), namespace=options.namespace)
            _check_graft(tree, before, new, options)
    job.filling.run(options.verify, Means(options.memory, relay=relay), in_place=True)
    if new is not tree:
        graft(tree, new, namespace=options.namespace)
    return job.report()


def _relay(comm: Comm, options: LoadOptions) -> Relay | None:
    return open_relay(comm) if options.read == "once" else None


def _is_same(old: object, new: object) -> bool:
    """Whether two values are stored alike; Python's own comparison takes 1, 1.0 and True for the same."""
    if old is new or (type(old) is type(new) and type(old) in (int, bool, str) and old == new):
        return True
    if _is_array_like(old) or _is_array_like(new):
        return False
    try:
        stored = [msgspec.json.encode(encode(value, "", allow_pickle=False)) for value in (old, new)]
    except TreeckptError:
        return False
    return stored[0] == stored[1]


def _check_graft(tree: object, before: list[tuple[str, object]], new: object, options: LoadOptions) -> None:
    """Refuses values that would have to change inside a tuple, before anything is written: tries it on a copy."""
    shadow = replace_leaves(tree, iter([leaf for _, leaf in before]), namespace=options.namespace)
    if stuck := graft(shadow, new, namespace=options.namespace):
        path, value = stuck[0]
        raise MismatchError(
            path,
            expected="a value that is as saved, or in a container that can change",
            found=f"{value!r:.60} in the checkpoint",
            hint="Use load(path, like=tree), which returns a new tree",
        )
