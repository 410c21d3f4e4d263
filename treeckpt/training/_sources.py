"""The sources of a restore, behind one protocol: checkpoints in stores, or a tree in memory.

`open_source` chooses the class. Paths, shapes and dtypes are compared first; values and small parts are loaded as they
were saved; arrays are filled in place at the end. A tree in memory provides only the part of this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property, reduce
from typing import Any, Protocol, TypeGuard

import msgspec

from .._arrays.dtensor import is_dtensor
from .._arrays.registry import abstract_of, decode, new_array, resolve
from .._arrays.stateful import expand_states, state_tree
from .._core.format.records import AliasRecord, ArrayRecord, BlobRecord, Index, Leaf, ValueRecord
from .._core.sharding.placements import Layout, MeshLayout, Replicate, held_by
from .._core.sharding.region import Region
from .._core.tree.containers import PerRank
from .._core.tree.flatten import child_of_rank, flatten, unflatten
from .._core.tree.leaf_differences import Strict
from .._core.tree.merge import merge_sources
from .._core.tree.paths import compile_globs
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import (
    TABLE_KEYS,
    DictNode,
    OrderedDictNode,
    PerRankNode,
    Structure,
    index_path,
    key_text,
    keys_of,
    parse_path,
    paths_of,
)
from .._io.comm.comm import Comm, global_rank
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.open import is_path_or_store
from .._loading.aliasing import are_equal, identity_of
from .._loading.match import Load, LoadOptions
from .._loading.options import Fallback, Policy, ReadOptions, read_alone
from .._loading.overlay import Bank, From, as_bank, open_members, own_globs, tables_of_several
from .._loading.run_load import fill_tree, run_load
from ..errors import MismatchError
from ..reports import LoadReport
from ..rules import Renaming, Transforms, as_rules, carried
from ..rules._rules import Carried, Drop, Renames, Rule, placed_below
from ..rules._view import ComposedLeaf, View, view_of
from ..trees import _moving
from ..trees._per_rank_state import load_own
from ._groups import is_same
from ._modules import WRAPPER_STEPS, Key, StateDictEntry

OnReport = Callable[[LoadReport], None]
OWN = "/~rank*"
"""How the path of a leaf ends of which each rank has its own."""
MAX_WRAPPERS = 6
"""Steps of wrappers in one saved name that are looked at: each choice of them is tried."""


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
        """The names of all its leaves, selected or not, after the rules."""
        ...

    @property
    def structure(self) -> Structure:
        """The structure of its tree."""
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
        self,
        name: str,
        on_report: OnReport | None = None,
        *,
        select: Sequence[str] = (),
        lenient: bool = False,
        arrays: bool = True,
    ) -> Any:
        """Returns a part at the root, as saved.

        Args:
            on_report: gets the report of its load, if it is read.
            select: the paths of what is needed of it, without which all is; other leaves may be `...`.
            lenient: gives `...` in the place of what cannot be made here; the report names it.
            arrays: reads arrays; without it their specs may stand in their places.
        """
        ...

    def world_of(self, name: str) -> int:
        """Returns how many ranks saved a per-rank part at the root."""
        ...

    def own(self, name: str, policy: Policy) -> Any:
        """Returns this rank's state of a per-rank part."""
        ...

    def own_to_fill(self, name: str) -> Any:
        """Returns this rank's part for `fill`: new arrays, None for values; None for a tree in memory, which has it."""
        ...

    def fill(self, target: dict[str, Any], *, take: bool, alone: bool = False, strict: Strict = False) -> LoadReport:
        """Fills what `target` has, in place.

        Args:
            take: per-rank leaves of another world are taken modulo.
            strict: "missing" refuses leaves that a checkpoint lacks.
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
    nodes: dict[str, Structure] = {}

    def walk(node: Structure, above: str) -> None:
        for key, child in children_of(node).items():
            name = above + key_text(str(key))
            if name in names:
                nodes[name] = child
            else:
                walk(child, f"{name}/")

    walk(node, "")
    return nodes


def leaves_below(path: str, structure: Structure) -> list[str]:
    """The paths of the leaves of a structure that is at a path."""
    return [path] if structure is None else [f"{path}/{below}" if below else path for below, _ in paths_of(structure)]


class _SavedMember:
    """One of the checkpoints of a source, seen through its rules.

    Args:
        options: with its rules.
        globs: the options with the globs of what it may give, where there are several.
    """

    def __init__(self, checkpoint: Checkpoint, comm: Comm, options: LoadOptions, globs: LoadOptions) -> None:
        self.checkpoint, self.comm = checkpoint, comm
        self.index, self.world = checkpoint.index, checkpoint.index.world
        self.rules, self._reading = options.rules, options
        self.view = self._view()
        self.options = globs.for_structure(self.view.structure)
        self.names = self.view.names
        left = [name for name in self.view.by_path if name.startswith("model/") and not options.selects(name)]
        if left:
            self.add(Carried(tuple(Drop(name, optional=True) for name in left)))
        self.ruled = (self.view.transformed.dropped, self.view.renamed) if options.rules else ((), ())

    def add(self, *rules: Rule) -> None:
        """Applies further rules."""
        self.rules = (*self.rules, *rules)
        self.view = self._view()

    def _view(self) -> View:
        rank = self.comm.rank
        return view_of(self.index, self.rules, source_rank=rank % self.world, rank=rank)

    def selected(self, path: str) -> bool:
        return self.options.selects(path) and not self.view.is_kept(path)

    def keep_only(self, own: set[str]) -> list[str]:
        """Drops all other leaves but those of a table of which some stay, as it stays whole; returns these others."""
        ids_paths = (path for path, leaves in self.view.by_path.items() if leaves[0].number in self.index.tables)
        tables = [path.removesuffix(TABLE_KEYS[0]) for path in ids_paths]
        parts = tuple(table for table in tables if any(path.startswith(table) for path in own))
        beside = [path for path in self.view.specs if path not in own and path.startswith(parts)]
        kept = own.union(beside)
        self.add(*(Drop(path, optional=True) for path in self.view.specs if path not in kept))
        return beside

    def leaf(self, path: str) -> Leaf:
        return self.view.by_path[path][0]

    def layout_of(self, leaf: Leaf) -> Layout | None:
        record = leaf.record
        array = self.index.entries[record.of].record if isinstance(record, AliasRecord) else record
        return self.index.layouts[array.layout] if isinstance(array, ArrayRecord) and array.layout >= 0 else None

    def reading_job(self) -> Load:
        """Returns a load that reads some arrays of the checkpoint, to compare them."""
        options = LoadOptions(
            cast=self._reading.cast,
            read=ReadOptions(verify=self._reading.read.verify),
            fallback=Fallback(per_rank="take"),
            rules=self.rules,
            strict=False,
        )
        return Load(self.checkpoint, self.comm, options)


class CheckpointSource:
    """A checkpoint on a store, or several of which later ones win.

    Of several, each is read through its own rules, which its optimizers' state follows, and through rules that drop the
    leaves that a later one provides. So they have no leaf in common, and their structures merge into that of one
    training state. Per-rank state, such as that of the generators, comes from one checkpoint as a whole.
    """

    def __init__(self, given: Checkpoint | Bank, comm: Comm, options: LoadOptions) -> None:
        self.comm, self.options = comm, options
        self._provider: dict[str, _SavedMember] = {}
        """The one of several checkpoints that gives a leaf, by path."""
        self.is_bank = isinstance(given, Bank)
        if isinstance(given, Checkpoint):
            self.members = [_SavedMember(given, comm, options, options)]
            self.names = self.members[0].names
            self._read: Checkpoint | Bank = given
        else:
            self._open_several(given)
        self.url = ", ".join(member.checkpoint.url for member in self.members)
        # One member of another world is enough: its per-rank leaves are not those of the ranks here.
        self.world = next((m.world for m in self.members if m.world != comm.size), comm.size)
        self.step = self._member_for("param_groups").index.step
        dropped, renamed = zip(*(member.ruled for member in self.members), strict=True)
        self.ruled = sum(dropped, ()), sum(renamed, ())
        self.structure = reduce(merge_sources, (member.view.structure for member in self.members))
        specs = {path: member.view.specs[path] for path, member in self._provider.items()}
        self.leaves: Mapping[str, ArraySpec | None] = specs if self._provider else self.members[0].view.specs

    def _open_several(self, bank: Bank) -> None:
        def look(source: From) -> _SavedMember:
            assert isinstance(source.path, Checkpoint), "the bank is opened"
            own = msgspec.structs.replace(self.options, rules=as_rules(source.rename, source.transforms))
            return _SavedMember(source.path, self.comm, own, own_globs(source, self.options))

        members = open_members(bank, self.options.rules, look, unit=lambda path: path.partition(OWN)[0])
        self.names = frozenset[str]().union(*(member.names for member, _ in members))
        sources: list[From] = []
        several = tables_of_several([member for member, _ in members])
        for member, paths in members:
            self._provider.update((path, member) for path in member.view.specs if path in paths)
            # of a table of which it gives rows all columns stay, though others give them too
            tables = [ids.removesuffix(TABLE_KEYS[0]) for ids, givers in several.items() if member in givers]
            shared = {path for path in member.view.by_path if path.startswith(tuple(tables)) and member.selected(path)}
            beside = member.keep_only(paths | shared)
            if member.view.specs:
                sources.append(From(member.checkpoint, transforms=member.rules, exclude=beside or None))
        self.members = [member for member, _ in members if member.view.specs]
        self._read = Bank(sources)

    def _member(self, path: str) -> _SavedMember:
        """Returns the checkpoint that gives a leaf."""
        return self._provider[path] if self._provider else self.members[0]

    def _member_for(self, part: str) -> _SavedMember:
        """Returns the last checkpoint that gives a leaf of a part at the root, or the last of all."""
        givers = [self._provider[path] for path in self._provider if path == part or path.startswith(f"{part}/")]
        return max(givers, key=self.members.index, default=self.members[-1])

    @property
    def _rules(self) -> tuple[Rule, ...]:
        """The rules on the only checkpoint; each of several has its own."""
        return self.members[0].rules if self._read is self.members[0].checkpoint else ()

    def is_left(self, path: str) -> bool:
        given = path in self._provider or path + OWN in self._provider
        return not self.options.selects(path) or (not given and any(m.view.is_kept(path) for m in self.members))

    def are_equal(self, paths: tuple[str, str], wanted: Any) -> bool:
        first, second = (self._member(path) for path in paths)
        if first is second and len({identity_of(first.leaf(path)) for path in paths}) == 1:
            return True
        job = first.reading_job()
        jobs = (job, paths[0]), (job if first is second else second.reading_job(), paths[1])
        return are_equal(*jobs, wanted_of(wanted, paths[0], self.comm))

    def identity(self, path: str) -> object:
        member = self._member(path)
        # A rule, as a cast of one of two tied names, may make two arrays of one.
        return None if member.rules else (id(member), identity_of(member.leaf(path)))

    def is_spread(self, path: str) -> bool:
        member, leaf = self._member(path), self._member(path).leaf(path)
        layouts = map(member.layout_of, leaf.sources.values() if isinstance(leaf, ComposedLeaf) else [leaf])
        return any(layout is not None and _is_spread(layout) for layout in layouts)

    def is_same_part(self, path: str, tensor: Any) -> bool:
        if path not in self.leaves or (member := self._member(path)).world != self.comm.size:
            return False
        leaf, here = member.leaf(path), wanted_of(tensor, path, self.comm)
        layout = None if isinstance(leaf, ComposedLeaf) else member.layout_of(leaf)
        if layout is None or leaf.spec is None or leaf.spec.shape != here.shape:
            return False
        held = tuple(local.region for local in held_by(layout, here.shape, self.comm.rank))
        return _filled(held) == _filled(here.regions or ())

    def value(self, path: str) -> Any:
        member, leaf = self._member(path), self._member(path).leaf(path)
        record = leaf.record
        if isinstance(record, BlobRecord):
            return member.reading_job().value(leaf, path)
        assert isinstance(record, ValueRecord), "arrays are read, and what is a rank's own is loaded by its part"
        return decode(record.value, path, allow_pickle=self.options.allow_pickle)

    def part(
        self,
        name: str,
        on_report: OnReport | None = None,
        *,
        select: Sequence[str] = (),
        lenient: bool = False,
        arrays: bool = True,
    ) -> Any:
        node = descend(self.structure, (name,))
        if not select and not lenient and (values := self._values(name, node)) is not None:
            whole: Any = DictNode((name,), (node,))
            return unflatten(whole, iter(values), resolve=resolve, namespace=self.options.namespace)[name]  # pyright: ignore[reportIndexIssue]
        own = LoadOptions(
            tuple(select) or (name,),
            read=read_alone(self.options.read),
            fallback=Fallback(per_rank="take"),
            allow_pickle=self.options.allow_pickle,
            namespace=self.options.namespace,
            rules=self._rules,
            lenient=lenient,
            specs_only=not arrays,
        )
        tree, report = run_load(self._read, None, self.comm, own)
        if on_report is not None:
            on_report(report)
        return tree[name]

    def _values(self, path: str, node: Structure) -> list[Any] | None:
        """Returns the values below a path, which are in the index; None where anything else is there."""
        leaves = [(p, self._member(p).leaf(p)) for p in leaves_below(path, node)]
        if not all(isinstance(leaf.record, ValueRecord) and leaf.ranks is None for _, leaf in leaves):
            return None
        return [self.value(p) for p, _ in leaves]

    def world_of(self, name: str) -> int:
        return self._member_for(name).world

    def own(self, name: str, policy: Policy) -> Any:
        member = self._member_for(name)
        return load_own(
            member.checkpoint,
            name,
            policy,
            self.comm,
            saved_world=member.world,
            read=read_alone(self.options.read),
            allow_pickle=self.options.allow_pickle,
            namespace=self.options.namespace,
            transforms=member.rules,
        )

    def own_to_fill(self, name: str) -> Any:
        member, node = self._member_for(name), descend(self.structure, (name,))
        rank, path = self.comm.rank if member.rules else self.comm.rank % member.world, name
        if isinstance(node, PerRankNode):
            path, own = f"{name}{OWN}", child_of_rank(node, rank, name)
            return PerRank(self._new(path, own))
        return self._new(path, node)

    def _new(self, path: str, node: Structure) -> Any:
        """Returns what stands at a path, with new arrays on the host, and None for values."""
        specs = ((p, self.leaves[p]) for p in leaves_below(path, node))
        leaves = (spec and new_array(msgspec.structs.replace(spec, device=None), p, None).leaf for p, spec in specs)
        return unflatten(node, leaves, resolve=resolve, namespace=self.options.namespace)

    def fill(self, target: dict[str, Any], *, take: bool, alone: bool = False, strict: Strict = False) -> LoadReport:
        once = bool(self.options.read.once) and not alone
        own = msgspec.structs.replace(
            self.options,
            # What is not selected is `...` in the target, or dropped by a rule.
            select=None,
            exclude=None,
            strict=strict,
            read=msgspec.structs.replace(self.options.read, once=once, copy=True),
            fallback=Fallback(per_rank="take" if take else "error"),
            rules=self._rules,
        )
        return fill_tree(self._read, target, self.comm, own)


def _filled(regions: Sequence[Region]) -> list[Region]:
    return [region for region in regions if region.size]


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
        return _moving.are_equal(first, second, wanted, paths[1], self.comm.rank)

    def identity(self, path: str) -> object:
        return id(self._leaves[path])

    def is_left(self, path: str) -> bool:
        return False

    def part(
        self,
        name: str,
        on_report: OnReport | None = None,
        *,
        select: Sequence[str] = (),
        lenient: bool = False,
        arrays: bool = True,
    ) -> Any:
        return self.tree[name]

    def world_of(self, name: str) -> int:
        return self.world

    def own(self, name: str, policy: Policy) -> Any:
        state = self.tree[name]
        return state.value if isinstance(state, PerRank) else state

    def own_to_fill(self, name: str) -> Any:
        return None

    def is_spread(self, path: str) -> bool:
        return is_dtensor(self._leaves[path])

    def is_same_part(self, path: str, tensor: Any) -> bool:
        if path not in self._leaves:
            return False
        there, here = (wanted_of(side, path, self.comm) for side in (self._leaves[path], tensor))
        return there.shape == here.shape and _filled(there.regions or ()) == _filled(here.regions or ())

    def value(self, path: str) -> Any:
        return self._leaves[path]

    def fill(self, target: dict[str, Any], *, take: bool, alone: bool = False, strict: Strict = False) -> LoadReport:
        """Copies array by array; every check comes before the first."""
        states = expand_states(target, rank=self.comm.rank, namespace=self.options.namespace, mappings=True)
        if states is None:
            return self._fill(target)
        filled, more = states.restore(lambda path, arrays: self.tree, self._fill)
        return msgspec.structs.replace(filled, loaded=filled.loaded + more)

    def _fill(self, target: Any) -> LoadReport:
        where: Any = {"rank": self.comm.rank, "namespace": self.options.namespace}
        matched = _moving.match_leaves(target, self.structure, self._leaves, lambda leaf, _: leaf, **where)
        nbytes = _moving.put_leaves(
            target, matched, lambda old, new, _: old if is_same(old, new) else new, cast=self.options.cast, **where
        )
        return LoadReport(
            self.url, nbytes, read_nbytes=0, loaded=len(matched.given), missing=(), unexpected=(), seconds=0.0
        )


STATE, GROUPS = "state", "param_groups"
"""The keys of an optimizer's state dict."""
_MODEL_NAMES = ("model", "model_state_dict", "state_dict", "module")


def names_of_state_dicts(structure: Structure) -> dict[str, str]:
    """Returns the `rename` by which a restore finds the state dicts, or the training state, at or below the root.

    It is empty where there are none, or they have these names.
    """
    places = {"": children_of(structure)}
    places |= {f"{key_text(str(key))}/": children_of(node) for key, node in places[""].items()}
    for place, children in places.items():
        if place and {"model", GROUPS} <= children.keys():
            return {place.removesuffix("/"): ""}
        optimizer = next((key for key, node in children.items() if _is_optimizer_state(node)), None)
        model = next((key for key in _MODEL_NAMES if children.get(key) is not None), None)
        if optimizer is not None and model is not None:
            found = {f"{place}{model}": "model", f"{place}{key_text(str(optimizer))}": "optimizer"}
            return {old: new for old, new in found.items() if old != new}
    return {}


def _is_optimizer_state(node: Structure) -> bool:
    """Whether a node is the state dict of an optimizer, nested or with a key for each moment."""
    keys = [str(key) for key in children_of(node)]
    flat = bool(keys) and all(key.startswith((f"{STATE}.", f"{GROUPS}.")) for key in keys)
    return flat or {STATE, GROUPS} <= {*keys}


def _named_otherwise(source: RestoreSource, hint: str) -> str:
    """Returns what to do where the state dicts of a source have other names; `hint` and more if none is found."""
    members = source.members if isinstance(source, CheckpointSource) else []
    if rename := next(filter(None, (names_of_state_dicts(member.index.structure) for member in members)), None):
        in_bank = isinstance(source, CheckpointSource) and source.is_bank
        how = f"give its tc.From rename={rename}, and pass" if in_bank else f"pass rename={rename},"
        return f"Its parts have other names: {how} from_root=True"
    return (
        f"{hint}. State dicts under other names: old = treeckpt.load(path), then treeckpt.save(new, "
        "{'model': old[...], 'optimizer': old[...]}) with their names there, and restore new"
    )


def rules_of(rename: Renaming, transforms: Transforms, under: str, *, from_root: bool) -> tuple[Rule, ...]:
    """Returns the rules of a restore, for what it reads once it is placed; see `restore`."""
    rules = as_rules(rename, transforms) if rename is not None or transforms is not None else ()
    rules = placed_below(rules, under) if under else rules
    return (carried(*rules),) if rules and not from_root else rules


def check_source(given: Any) -> None:
    """Raises a MismatchError for what is no source of a restore."""
    if not isinstance(given, Mapping) and not is_stored(given):
        raise MismatchError(
            "",
            expected="a path, a store, a bank of them, or a tree as training.state gives it",
            found=f"{type(given).__name__}",
            hint="The path comes first: restore(path, model, optimizer)",
        )


def wrapper_rules(index: Index, entries: Iterable[StateDictEntry], rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Returns the rule that takes the steps of wrappers out of saved names, as `module.` of DistributedDataParallel.

    Only names that the model here lacks are looked at, and only those count that are names of it without such steps.

    Args:
        rules: those that are applied before.
    """
    saved = view_of(index, rules, source_rank=0, rank=0, strict=False).by_path if rules else index.by_path
    here = {entry.path for entry in entries}
    missing, pairs = here.difference(saved), dict[str, str]()
    for path in saved if missing else ():
        above, _, name = path.rpartition("/")
        steps = name.split(".")
        places = [place for place, step in enumerate(steps) if step in WRAPPER_STEPS][:MAX_WRAPPERS]
        if not places or path in here or "*" in path or "$" in path:
            continue
        for out in itertools.chain(*(itertools.combinations(places, n + 1) for n in range(len(places)))):
            kept = [step for place, step in enumerate(steps) if place not in out]
            if f"{above}/{'.'.join(kept)}" in missing:
                inside = len(steps) - out[-1] - 1
                pairs[f"{above}/{'.'.join(steps[: out[-1] + 1])}.*"] = f"{above}/{'.'.join((*kept[:-inside], '*'))}"
                break
    # the first that matches counts: that of a wrapper in another one
    ordered = sorted(pairs.items(), key=lambda pair: -len(pair[0]))
    return (carried(Renames(tuple(ordered), optional=True)),) if pairs else ()


def place_under(given: Any, under: str) -> Any:
    """Returns a checkpoint, or a bank of opened ones, as if all that it holds were saved under a path; or a tree."""
    if isinstance(given, Mapping):
        return reduce(lambda tree, key: {key: tree}, reversed(parse_path(under)), given)
    if isinstance(given, Bank):
        return given.opened([place_under(source.path, under) for source in given.sources])
    if not isinstance(given, Checkpoint):  # opening it says what is wrong
        return given
    index = given.index
    structure = reduce(lambda node, key: DictNode((key,), (node,)), reversed(parse_path(under)), index.structure)
    return given.with_index(msgspec.structs.replace(index, structure=structure))


def check_globs(source: RestoreSource, options: LoadOptions, entries: Sequence[str], *, with_extra: bool) -> None:
    """Refuses globs of `select` and `exclude` that mean nothing of the model's, under `strict`.

    Args:
        entries: the paths of the live model, which globs may mean too.
        with_extra: whether "extra" may be meant, as there is one, and no tree to fill was given for it.

    Raises:
        MismatchError: naming one, and the arguments for other parts.
    """
    if not options.strict or not (options.select or options.exclude):
        return
    names = sorted(source.names)
    saved = [name for name in names if name.startswith("model/")]
    ours = [*dict.fromkeys([*entries, *saved]), *(["extra"] if with_extra else [])]
    for what, globs in (("select", options.select), ("exclude", options.exclude)):
        for glob in compile_globs(globs or ()).unused(ours):
            if other := next((name for name in names if compile_globs((glob,)).match(name)), None):
                raise MismatchError(
                    f"{what}={glob!r:.80}",
                    expected="globs of model/..., which the optimizers' state follows",
                    found=f"one that means {other}",
                    hint="Leave other parts alone by their arguments: extra=False, rng=False, optimizer=None, "
                    "scheduler=None, loader=None",
                )
    try:
        options.check_used(lambda: ours)
    except MismatchError as error:
        error.add_hint("Globs mean model/..., by the names that rules give")
        raise


def missing_part(part: str, how: str, source: RestoreSource) -> MismatchError:
    """Returns the error that a source lacks a part of a training state.

    Args:
        how: what would have saved it.
    """
    parts = children_of(source.structure)
    in_memory = isinstance(source, TreeSource)  # in which state dicts of optimizers are not read
    if in_memory and part in parts:
        return MismatchError(
            part,
            expected=f"in a tree in memory, what {how} gives",
            found="a state dict, which restore reads from files only",
            hint="Give the path of the file in place of its tree; or treeckpt.save(new, tree), and restore new. "
            f"To leave what is here as it is, pass {part}=None",
        )
    hint = f"To leave what is here as it is, pass {part}={False if part == 'rng' else None}"
    if several := [str(key) for key, node in children_of(parts.get(part)).items() if _is_optimizer_state(node)]:
        return MismatchError(
            part,
            expected="the state dict of one optimizer, as there is one here",
            found=f"those of {', '.join(several)}",
            hint=f"Several models, and several optimizers, are given in a dict: {{{several[0]!r}: ...}}. {hint}",
        )
    return MismatchError(
        part,
        expected=f"a state saved with {how}",
        found=f"only {', '.join(map(str, parts))} in the checkpoint",
        hint=_named_otherwise(source, hint) if part == "optimizer" else hint,
    )


def is_stored(given: Any) -> bool:
    """Whether a source is a path, a store, or several of them, and no tree in memory."""
    return is_path_or_store(given) or isinstance(given, Checkpoint) or as_bank(given) is not None


def holds_state_dicts(given: Any) -> TypeGuard[Checkpoint]:
    """Whether a source is a checkpoint with the state of optimizers, and not that of a training state of ours."""
    keys = set(map(str, children_of(given.index.structure))) if isinstance(given, Checkpoint) else set[str]()
    return {"model", "optimizer"} <= keys and "param_groups" not in keys


def open_source(given: Any, comm: Comm, options: LoadOptions) -> RestoreSource:
    """Opens a path or store, several of them, or a tree.

    Raises:
        MismatchError: the root is no training state.
    """
    stored = given if isinstance(given, Checkpoint) else as_bank(given)
    source: Any
    if isinstance(given, Mapping):
        source = TreeSource(given, comm, options)
    else:
        assert stored is not None, "checked before"
        source = CheckpointSource(stored, comm, options)
    root = source.structure
    if "model" not in children_of(root) and not any(name.startswith("model/") for name in source.names):
        keys = ", ".join(map(str, keys_of(root, ""))) if root is not None else "a single leaf"
        raise MismatchError(
            source.url,
            expected="a training state, with `model` at its root",
            found=keys[:200],
            hint=_named_otherwise(
                source,
                "Save treeckpt.training.state(model, optimizer), or load this with treeckpt.load. Where the model's "
                "state dict is the root, pass under='model'; where it has another name, from_root=True with rename=",
            ),
        )
    return source
