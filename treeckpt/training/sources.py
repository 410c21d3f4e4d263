"""The sources of a restore, behind one protocol: a checkpoint in a store, or a tree in memory.

`open_source` chooses the class, and combines several checkpoints. Paths, shapes and dtypes are compared first; values
and small parts are loaded as they were saved; arrays are filled in place at the end. A tree in memory provides only the
part of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec

from .. import api
from ..arrays.dtensor import is_dtensor
from ..arrays.expanded_tree import expand_states, state_tree
from ..arrays.registry import abstract_of, decode
from ..core.format.records import AliasRecord, ArrayRecord, BlobRecord, Leaf, ValueRecord
from ..core.sharding.placements import Layout, MeshLayout, Replicate, held_by
from ..core.sharding.region import Region
from ..core.tree.flatten import PerRank, flatten
from ..core.tree.recursion import Recursive, trampoline
from ..core.tree.spec import ArraySpec
from ..core.tree.structure import TABLE_KEYS, OrderedDictNode, PerRankNode, Structure, index_path, keys_of, paths_of
from ..errors import MismatchError
from ..io.comm.comm import Comm, global_rank
from ..io.storage.checkpoint import Checkpoint
from ..loading.aliasing import are_equal, identity_of
from ..loading.match import Load, LoadOptions
from ..loading.run_load import run_load
from ..loading.transforms.rules import Carried, Drop, Rule
from ..loading.transforms.view import ComposedLeaf, View, view_of
from ..reports import LoadReport
from ..trees import moving
from ..trees.per_rank_state import Policy, load_own
from .hyperparameters import is_same
from .names import Key, key_path

OnReport = Callable[[LoadReport], None]
OWN = "/~rank*"
"""How the path of a leaf ends of which each rank has its own."""


class RestoreSource(Protocol):
    """A saved training state."""

    url: str
    world: int
    """Ranks that saved it."""
    step: int | None
    options: LoadOptions
    ruled: tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
    """The paths that rules dropped, and (saved, new) pairs of those that they renamed."""

    @property
    def names(self) -> frozenset[str]:
        """Of all its leaves, selected or not, after the rules."""
        ...

    @property
    def structure(self) -> Structure:
        """Of its tree."""
        ...

    def is_left(self, path: str) -> bool:
        """Whether the target at a path stays unchanged."""
        ...

    @property
    def leaves(self) -> Mapping[str, ArraySpec | None]:
        """Every leaf by path, with `~rank*` for a rank's own; None for values."""
        ...

    def are_equal(self, paths: tuple[str, str], wanted: Any) -> bool:
        """Whether two arrays are one, or equal in the part that a tensor needs."""
        ...

    def identity(self, path: str) -> object:
        """Returns a key, equal for the paths of one saved tensor; None where rules may have made copies of it."""
        ...

    def is_spread(self, path: str) -> bool:
        """Whether an array was distributed, as far as that is known."""
        ...

    def is_same_part(self, path: str, tensor: Any) -> bool:
        """Whether as many ranks have saved an array, and this one held the same part of it as of a tensor here."""
        ...

    def value(self, path: str) -> Any:
        """Returns the saved value at a path without an array."""
        ...

    def part(
        self, name: str, on_report: OnReport | None = None, *, select: Sequence[str] = (), lenient: bool = False
    ) -> Any:
        """Returns a part at the root, as saved.

        Args:
            on_report: gets the report of its load, if it is read.
            select: the paths of what is needed of it, without which all is; other leaves may be `...`.
            lenient: gives `...` in the place of what cannot be made here; the report names it.
        """
        ...

    def abstract(self, name: str) -> Any:
        """Returns a part at the root with its values; arrays may be specs."""
        ...

    def world_of(self, name: str) -> int:
        """Returns how many ranks saved a per-rank part at the root."""
        ...

    def own(self, name: str, policy: Policy) -> Any:
        """Returns this rank's state of a per-rank part."""
        ...

    def fill(self, target: dict[str, Any], *, take: bool, alone: bool = False) -> LoadReport:
        """Fills what `target` has, in place.

        Args:
            take: per-rank leaves of another world are taken modulo.
            alone: other ranks need not call it: this one reads for itself.
        """
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


def saved_metadata(source: RestoreSource, key: Key = ()) -> Mapping[str, Any] | None:
    """Returns the saved `_metadata` of a model by the names of its modules, after the rules; None where none was saved.

    Args:
        key: of a model among several.
    """
    node = descend(source.structure, ("model", *key))
    attributes = node.attributes if isinstance(node, OrderedDictNode) else None
    return attributes.metadata.decoded("model") if attributes is not None and attributes.metadata else None


def nodes_by_name(node: Structure, names: Container[str]) -> dict[str, Structure]:
    """The structures below a node whose path is one of the names, in one walk."""
    found: dict[str, Structure] = {}

    def walk(node: Structure, prefix: Key) -> Recursive[None]:
        for key, child in children_of(node).items():
            here = (*prefix, str(key))
            if key_path(here) in names:
                found[key_path(here)] = child
            else:
                yield walk(child, here)

    trampoline(walk(node, ()))
    return found


def leaves_below(path: str, structure: Structure) -> list[str]:
    """The paths of the leaves of a structure that is at a path."""
    return [f"{path}/{below}" if below else path for below, _ in paths_of(structure)]


class CheckpointSource:
    """A checkpoint on a store."""

    def __init__(self, checkpoint: Checkpoint, comm: Comm, options: LoadOptions) -> None:
        self.checkpoint, self.comm, self.options = checkpoint, comm, options
        self.index, self.url = checkpoint.index, checkpoint.url
        self.world, self.step = self.index.world, self.index.step
        self.rules = options.rules
        self.view = self._view()
        self._unselected = self.view
        left = [name for name in self.view.by_path if name.startswith("model/") and not options.selects(name)]
        if left:
            self.add(Carried(tuple(Drop(name, optional=True) for name in left)))
        self.ruled = (self.view.transformed.dropped, self.view.renamed) if options.rules else ((), ())

    def add(self, *rules: Rule) -> None:
        """Applies further rules."""
        self.rules = (*self.rules, *rules)
        self.view = self._view()

    @property
    def names(self) -> frozenset[str]:
        return self._unselected.names

    @property
    def structure(self) -> Structure:
        return self.view.structure

    @property
    def tables(self) -> list[str]:
        """The prefix of the paths of each keyed table's leaves."""
        tables = self.index.tables
        return [
            path.removesuffix(TABLE_KEYS[0]) for path, found in self.view.by_path.items() if found[0].number in tables
        ]

    def _view(self) -> View:
        rank = self.comm.rank
        return view_of(self.index, self.rules, source_rank=rank % self.world, rank=rank)

    def is_left(self, path: str) -> bool:
        return self.view.is_kept(path) or not self.options.selects(path)

    @property
    def leaves(self) -> dict[str, ArraySpec | None]:
        return self.view.specs

    def are_equal(self, paths: tuple[str, str], wanted: Any) -> bool:
        if len({identity_of(self.view.by_path[path][0]) for path in paths}) == 1:
            return True
        spec = wanted_of(wanted, paths[0], self.comm)
        job = self.reading_job()
        return are_equal((job, paths[0]), (job, paths[1]), spec)

    def identity(self, path: str) -> object:
        return None if self.rules else identity_of(self.view.by_path[path][0])

    def reading_job(self) -> Load:
        """Returns a load that reads some arrays of the checkpoint, to compare them."""
        options = LoadOptions(
            cast=self.options.cast, verify=self.options.verify, per_rank="take", rules=self.rules, strict=False
        )
        return Load(self.checkpoint, self.comm, options)

    def is_spread(self, path: str) -> bool:
        leaf = self.view.by_path[path][0]
        layouts = map(self._layout, leaf.sources.values() if isinstance(leaf, ComposedLeaf) else [leaf])
        return any(layout is not None and _is_spread(layout) for layout in layouts)

    def _layout(self, leaf: Leaf) -> Layout | None:
        record = leaf.record
        array = self.index.entries[record.of].record if isinstance(record, AliasRecord) else record
        return self.index.layouts[array.layout] if isinstance(array, ArrayRecord) and array.layout >= 0 else None

    def is_same_part(self, path: str, tensor: Any) -> bool:
        if self.world != self.comm.size or path not in self.view.by_path:
            return False
        leaf, here = self.view.by_path[path][0], wanted_of(tensor, path, self.comm)
        layout = None if isinstance(leaf, ComposedLeaf) else self._layout(leaf)
        if layout is None or leaf.spec is None or leaf.spec.shape != here.shape:
            return False
        held = tuple(one.region for one in held_by(layout, here.shape, self.comm.rank))
        return _filled(held) == _filled(here.regions or ())

    def value(self, path: str) -> Any:
        leaf = self.view.by_path[path][0]
        record = leaf.record
        if isinstance(record, BlobRecord):
            return self.reading_job().value(leaf, path)
        assert isinstance(record, ValueRecord), "arrays are read, and what is a rank's own is loaded by its part"
        return decode(record.value, path, allow_pickle=self.options.allow_pickle)

    def part(
        self, name: str, on_report: OnReport | None = None, *, select: Sequence[str] = (), lenient: bool = False
    ) -> Any:
        options = msgspec.structs.replace(self.options, rules=self.rules, lenient=lenient)
        return load_part(self.checkpoint, name, self.comm, options, on_report, select)

    def abstract(self, name: str) -> Any:
        return abstract_part(self.checkpoint, name, self.comm, self.options, self.rules)

    def world_of(self, name: str) -> int:
        return self.world

    def own(self, name: str, policy: Policy) -> Any:
        return load_own(
            self.checkpoint,
            name,
            policy,
            self.comm,
            saved_world=self.world,
            verify=self.options.verify is not False,
            allow_pickle=self.options.allow_pickle,
            namespace=self.options.namespace,
            transforms=self.rules,
        )

    def fill(self, target: dict[str, Any], *, take: bool, alone: bool = False) -> LoadReport:
        return fill_from(self.checkpoint, target, self.comm, self.options, take=take, alone=alone, rules=self.rules)


def _filled(regions: Sequence[Region]) -> list[Region]:
    return [region for region in regions if region.size]


def load_part(
    source: Any,
    name: str,
    comm: Comm,
    options: LoadOptions,
    on_report: OnReport | None = None,
    select: Sequence[str] = (),
) -> Any:
    """Loads a part at the root of a checkpoint, or of a bank of several, as it was saved; see `RestoreSource.part`."""
    own = LoadOptions(
        tuple(select) or (name,),
        per_rank="take",
        verify=options.verify is not False,
        allow_pickle=options.allow_pickle,
        namespace=options.namespace,
        rules=options.rules,
        lenient=options.lenient,
    )
    tree, report = run_load(source, None, comm, own, "error")
    if on_report is not None:
        on_report(report)
    return tree[name]


def abstract_part(source: Any, name: str, comm: Comm, options: LoadOptions, rules: Sequence[Rule] = ()) -> Any:
    """Returns a part at the root of a checkpoint, or of a bank of several, see `RestoreSource.abstract`."""
    found = api.load_abstract(
        source,
        select=name,
        comm=comm,
        allow_pickle=options.allow_pickle,
        namespace=options.namespace,
        transforms=rules,
    )
    return found[name]


def fill_from(
    path: Any,
    target: dict[str, Any],
    comm: Comm,
    options: LoadOptions,
    *,
    take: bool,
    alone: bool,
    rules: Sequence[Rule] = (),
) -> LoadReport:
    """Fills what `target` has from a checkpoint, or a bank of several; see `RestoreSource.fill`."""
    return api.load_into(
        path,
        target,
        transforms=rules,
        strict=False,
        cast=options.cast,
        verify=options.verify,
        per_rank="take" if take else "error",
        allow_pickle=options.allow_pickle,
        namespace=options.namespace,
        read="each" if alone else options.read,
        comm=comm,
    )


def wanted_of(tensor: Any, path: str, comm: Comm) -> ArraySpec:
    """Returns the spec of a tensor, with the regions that this rank holds."""
    spec = abstract_of(tensor, path, global_rank(comm))
    assert spec is not None, "only tensors are compared"
    return spec


def _is_spread(layout: Layout) -> bool:
    """Whether a layout differs from that of plain tensors, of which several ranks have replicas."""
    if not isinstance(layout, MeshLayout):
        return True
    return len(layout.mesh.shape) > 1 or bool(layout.mesh.names) or layout.placements != (Replicate(),)


class TreeSource:
    """A tree in memory, as `state` or `treeckpt.load` gives one."""

    def __init__(self, tree: Any, comm: Comm, options: LoadOptions) -> None:
        self.tree = state_tree(tree, rank=comm.rank, namespace=options.namespace)
        self.comm, self.options = comm, options
        self.url, self.world, self.step, self.ruled = "tree", comm.size, None, ((), ())
        if options.rules or options.select is not None or options.exclude is not None:
            raise MismatchError(
                "tree",
                expected="a checkpoint, for rules, select and exclude",
                found="a tree in memory",
                hint="Save it, or change the tree before it is restored",
            )
        self.structure, leaves = flatten(self.tree, rank=comm.rank, namespace=options.namespace)
        self._leaves = {index_path(path, comm.rank): leaf for path, leaf in leaves if leaf is not ...}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._leaves)

    @cached_property
    def leaves(self) -> dict[str, ArraySpec | None]:
        return {path: abstract_of(leaf, path, self.comm.rank) for path, leaf in self._leaves.items()}

    def are_equal(self, paths: tuple[str, str], wanted: Any) -> bool:
        first, second = (self._leaves[path] for path in paths)
        return moving.are_equal(first, second, wanted, paths[1], self.comm.rank)

    def identity(self, path: str) -> object:
        return id(self._leaves[path])

    def is_left(self, path: str) -> bool:
        return False

    def part(
        self, name: str, on_report: OnReport | None = None, *, select: Sequence[str] = (), lenient: bool = False
    ) -> Any:
        return self.tree[name]

    def abstract(self, name: str) -> Any:
        return self.tree[name]

    def world_of(self, name: str) -> int:
        return self.world

    def own(self, name: str, policy: Policy) -> Any:
        state = self.tree[name]
        return state.value if isinstance(state, PerRank) else state

    def is_spread(self, path: str) -> bool:
        return is_dtensor(self._leaves[path])

    def is_same_part(self, path: str, tensor: Any) -> bool:
        if path not in self._leaves:
            return False
        there, here = (wanted_of(one, path, self.comm) for one in (self._leaves[path], tensor))
        return there.shape == here.shape and _filled(there.regions or ()) == _filled(here.regions or ())

    def value(self, path: str) -> Any:
        return self._leaves[path]

    def fill(self, target: dict[str, Any], *, take: bool, alone: bool = False) -> LoadReport:
        """Copies array by array; every check comes before the first."""
        found = expand_states(target, rank=self.comm.rank, namespace=self.options.namespace, mappings=True)
        if found is None:
            return self._fill(target)
        filled, more = found.restore(lambda path, arrays: self.tree, self._fill)
        return msgspec.structs.replace(filled, loaded=filled.loaded + more)

    def _fill(self, target: Any) -> LoadReport:
        where: Any = {"rank": self.comm.rank, "namespace": self.options.namespace}
        found = moving.match_leaves(target, self.structure, self._leaves, lambda leaf, _: leaf, **where)
        nbytes = moving.put_leaves(
            target, found, lambda old, new, _: old if is_same(old, new) else new, cast=self.options.cast, **where
        )
        return LoadReport(self.url, nbytes, 0, len(found.given), (), (), 0.0)
