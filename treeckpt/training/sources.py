"""Where does a restore take its state from? A checkpoint on a store, or a tree in memory, behind one set of questions.

What is there, of which shape and dtype, is asked first; values and small parts are loaded as they were saved; arrays
are filled in place, at the very end. A tree in memory gives only what this rank holds of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol

import msgspec

from .. import api
from ..core.errors import LayoutError, MismatchError
from ..core.records import AliasRecord
from ..core.region import Region, intersect
from ..core.spec import ArraySpec
from ..core.structure import Node, PerRankNode, Structure, keys_of, rank_key
from ..core.tree import PerRank, flatten
from ..filling import Verify
from ..io.comm import Comm
from ..leaves.base import Source as ArraySource
from ..leaves.base import Target
from ..leaves.registry import abstract_of, library_of, source_of, target_of
from ..stateful import expand
from .ranks import Policy, load_own

__all__ = ["CheckpointSource", "Filled", "Options", "Source", "TreeSource", "children_of", "descend", "open_source"]


class Options(msgspec.Struct, frozen=True):
    """The knobs that reading needs."""

    cast: bool = False
    verify: Verify = True
    allow_pickle: bool = False
    read: Literal["each", "once"] = "each"


class Filled(msgspec.Struct, frozen=True):
    """What was filled, and how much of it this rank read."""

    loaded: int
    nbytes: int
    read_nbytes: int


class Source(Protocol):
    """A saved training state."""

    url: str
    world: int
    """Ranks that saved it."""
    step: int | None
    structure: Structure

    @property
    def leaves(self) -> Mapping[str, ArraySpec | None]:
        """Every leaf by path, with `~rank*` for a rank's own; None for values."""
        ...

    def identity(self, path: str) -> object:
        """Equal for paths that are one array."""
        ...

    def part(self, name: str) -> Any:
        """What stands at the root under a name, as saved."""
        ...

    def own(self, name: str, policy: Policy) -> Any:
        """This rank's state of what each rank has of its own."""
        ...

    def fill(self, target: dict[str, Any], *, take: bool) -> Filled:
        """Fills what `target` has, in place; `take`: per-rank leaves of another world are taken modulo."""
        ...


def children_of(node: Structure) -> dict[Any, Structure]:
    """The structures of a node's children, by key; none for a leaf and for what each rank has of its own."""
    if node is None or isinstance(node, PerRankNode):
        return {}
    return dict(zip(keys_of(node, ""), node.children, strict=True))


def descend(node: Structure, keys: Sequence[Any]) -> Structure:
    """The structure below a node, step by step; None where nothing is, or a leaf."""
    for key in keys:
        node = children_of(node).get(key)
    return node


class CheckpointSource:
    """A checkpoint on a store."""

    def __init__(self, path: Any, comm: Comm, options: Options) -> None:
        self.path, self.comm, self.options = path, comm, options
        self.index = api.inspect(path)
        self.url, self.world, self.step = str(getattr(path, "url", path)), self.index.world, self.index.step
        self.structure: Structure = self.index.structure

    @cached_property
    def leaves(self) -> dict[str, ArraySpec | None]:
        return {path: found[0].spec for path, found in self.index.by_path.items()}

    def identity(self, path: str) -> object:
        leaf = self.index.by_path[path][0]
        record = leaf.record
        return record.of if isinstance(record, AliasRecord) and record.view is None else leaf.number

    def part(self, name: str) -> Any:
        tree = api.load(self.path, select=name, comm=self.comm, per_rank="take", **self._reading)
        return tree[name]

    def own(self, name: str, policy: Policy) -> Any:
        return load_own(self.path, name, policy, self.comm, saved_world=self.world, **self._reading)

    @property
    def _reading(self) -> dict[str, Any]:
        return {"verify": self.options.verify is not False, "allow_pickle": self.options.allow_pickle}

    def fill(self, target: dict[str, Any], *, take: bool) -> Filled:
        report = api.load_into(
            self.path,
            target,
            strict=False,
            cast=self.options.cast,
            verify=self.options.verify,
            per_rank="take" if take else "error",
            allow_pickle=self.options.allow_pickle,
            read=self.options.read,
            comm=self.comm,
        )
        return Filled(report.loaded, report.nbytes, report.read_nbytes)


class TreeSource:
    """A tree in memory, as `state` or `treeckpt.load` gives one."""

    def __init__(self, tree: Any, comm: Comm, options: Options) -> None:
        expanded = expand(tree, rank=comm.rank)
        self.tree = tree if expanded is None else expanded.tree
        self.comm, self.options = comm, options
        self.url, self.world, self.step = "tree", comm.size, None
        self.structure, leaves = flatten(self.tree, rank=comm.rank)
        self._leaves = {_any_rank(path, comm.rank): leaf for path, leaf in leaves if leaf is not ...}

    @cached_property
    def leaves(self) -> dict[str, ArraySpec | None]:
        return {path: abstract_of(leaf, path, self.comm.rank) for path, leaf in self._leaves.items()}

    def identity(self, path: str) -> object:
        source = source_of(self._leaves[path], path, self.comm.rank)
        storage = source.storage if source is not None else None
        return path if storage is None else (storage.address, storage.strides)

    def part(self, name: str) -> Any:
        return self.tree[name]

    def own(self, name: str, policy: Policy) -> Any:
        state = self.tree[name]
        return state.value if isinstance(state, PerRank) else state

    def fill(self, target: dict[str, Any], *, take: bool) -> Filled:
        """Copies array by array; every check comes before the first."""
        jobs: list[tuple[ArraySource, Target, str]] = []
        _, wanted = flatten(target, rank=self.comm.rank)
        for text, leaf in wanted:
            path = _any_rank(text, self.comm.rank)
            if leaf is ... or path not in self._leaves:
                continue
            place, source = target_of(leaf, path, self.comm.rank), source_of(self._leaves[path], path, self.comm.rank)
            if place is not None and source is not None:
                _check_copy(source, place, path, cast=self.options.cast)
                jobs.append((source, place, path))
        nbytes = sum(_copy(source, place) for source, place, _ in jobs)
        _put_values(target, self.tree)
        return Filled(len(wanted), nbytes, 0)


def _any_rank(path: str, rank: int) -> str:
    mark = rank_key(rank)
    return "/".join("~rank*" if step == mark else step for step in path.split("/")) if mark in path else path


def _check_copy(source: ArraySource, place: Target, path: str, *, cast: bool) -> None:
    if source.spec.shape != place.spec.shape:
        raise MismatchError(path, expected=f"shape {place.spec.shape}", found=f"{source.spec.shape} in the tree")
    if source.spec.dtype != place.spec.dtype and not cast:
        raise MismatchError(
            path,
            expected=place.spec.dtype,
            found=f"{source.spec.dtype} in the tree",
            hint="Pass cast=True to convert",
        )
    for piece in place.pieces:
        there = sum(overlap.size for part in source.pieces if (overlap := intersect(part.region, piece.region)))
        if there < piece.region.size:
            raise LayoutError(
                path,
                expected=f"all {piece.region.size} elements that this rank holds",
                found=f"{there} of them in the tree on this rank",
                hint="Save the tree and restore from the checkpoint: ranks do not talk here",
            )


def _copy(source: ArraySource, place: Target) -> int:
    nbytes = 0
    for piece in place.pieces:
        for part in source.pieces:
            both = intersect(part.region, piece.region)
            if both is None:
                continue
            data = part.data.read(_box(both, part.region))
            if source.spec.dtype != place.spec.dtype:
                data = library_of(place.spec).cast(data, source.spec.dtype, place.spec.dtype)
            piece.data.write(_box(both, piece.region), data)
            nbytes += data.nbytes
    return nbytes


def _box(region: Region, inside: Region) -> tuple[slice, ...]:
    return tuple(
        slice(start - base, start - base + n)
        for start, base, n in zip(region.offset, inside.offset, region.shape, strict=True)
    )


def _put_values(target: Any, tree: Any) -> None:
    """Values of nested dicts and lists, by key; arrays have been copied."""
    pairs: Any = target.items() if isinstance(target, dict) else enumerate(target) if isinstance(target, list) else ()
    for key, old in list(pairs):
        if old is ... or (isinstance(tree, Mapping) and key not in tree):
            continue
        new = tree[key]
        if isinstance(old, (dict, list)):
            _put_values(old, new)
        elif not hasattr(old, "shape") and not isinstance(old, (PerRank, tuple)):
            target[key] = new


def open_source(given: Any, comm: Comm, options: Options) -> Source:
    """The source of a path or store, or of a tree.

    Raises:
        MismatchError: its root is no training state.
    """
    is_tree = isinstance(given, Mapping)
    if not is_tree and not isinstance(given, (str, os.PathLike)) and not hasattr(given, "sizes"):
        raise MismatchError(
            "", expected="a path, a store, or a tree as training.state gives it", found=f"{type(given).__name__}"
        )
    source: Any = TreeSource(given, comm, options) if is_tree else CheckpointSource(given, comm, options)
    root: Node | None = source.structure
    if "model" not in children_of(root):
        keys = ", ".join(map(str, keys_of(root, ""))) if root is not None else "a single leaf"
        raise MismatchError(
            source.url,
            expected="a training state, with `model` at its root",
            found=keys[:200],
            hint="Save treeckpt.training.state(model, optimizer), or load this with treeckpt.load",
        )
    return source
