"""Training states of other programs: the state dicts of a model and its optimizers, as they save them.

What `torch.save({"model": ..., "optimizer": ...})`, `get_state_dict` with DCP, and hfai write has the state of
optimizers by the numbers or names of parameters. Here its index is rearranged into that of a training state of ours, by
name; the arrays stay where they are. Numbers count the parameters in the order of the live optimizer's groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from .._core.format.records import AliasRecord, Index, LeafRecord, ValueRecord
from .._core.tree.structure import DictNode, ListNode, PerRankNode, Structure, TupleNode, key_text, keys_of
from .._io.storage.checkpoint import Checkpoint
from .._loading.match import LoadOptions
from .._loading.overlay import Bank, From, own_globs
from ..errors import CheckpointNotFound, FormatError, MismatchError
from ..rules._rules import Carried, Drop, Rename, Renames, Rule
from ..rules._view import ComposedLeaf, View, view_of
from ._groups import ParamGroup, labels_of
from ._modules import Key, ModelEntries, key_path, parse_key
from ._optimizers import NamedOptimizer, Optimizers, groups_of, is_lbfgs, name_optimizers, optimizer_names
from ._sources import GROUPS as _GROUPS
from ._sources import STATE as _STATE
from ._sources import holds_state_dicts, rules_of, wrapper_rules

_PARAMS, _NAMES = "params", "param_names"


class IndexPart(msgspec.Struct, frozen=True):
    """A subtree of an index: its structure and the numbers of its leaves, or new records."""

    structure: Structure
    leaves: Sequence[int | LeafRecord]

    @property
    def parts(self) -> dict[Any, IndexPart]:
        """Those of its children, by key; none for a leaf and for what each rank has of its own."""
        node = self.structure
        if node is None or isinstance(node, PerRankNode):
            return {}
        parts: dict[Any, IndexPart] = {}
        start = 0
        for key, child in zip(keys_of(node, ""), node.children, strict=True):
            count = _count(child)
            parts[key] = IndexPart(child, self.leaves[start : start + count])
            start += count
        return parts


def _count(node: Structure) -> int:
    """Returns the number of leaves of a structure."""
    count, waiting = 0, [node]
    while waiting:
        structure = waiting.pop()
        if structure is None:
            count += 1
        else:
            waiting.extend(structure.children)
    return count


def _value(value: Any) -> IndexPart:
    return IndexPart(None, (ValueRecord(value),))


def _node(children: Mapping[Any, Any]) -> IndexPart:
    """Returns the dict of some parts, and of dicts of parts."""
    made = [part if isinstance(part, IndexPart) else _node(part) for part in children.values()]
    structure = DictNode(tuple(children), tuple(part.structure for part in made))
    return IndexPart(structure, [leaf for part in made for leaf in part.leaves])


def _listed(part: IndexPart | None) -> list[IndexPart]:
    """Returns the elements of a list, which some formats keep as a dict of numbers."""
    if part is None:
        return []
    children = part.parts
    if isinstance(part.structure, (ListNode, TupleNode)):
        return list(children.values())
    return [children[key] for key in sorted(children, key=lambda key: int(key) if str(key).isdecimal() else -1)]


class SavedGroup(msgspec.Struct, frozen=True):
    """A param group of a state dict."""

    members: tuple[Any, ...]
    """The numbers or names of its parameters."""
    names: tuple[str, ...]
    """Their names, where they are saved beside the numbers."""
    values: dict[Any, IndexPart]


class SavedStateDict(msgspec.Struct, frozen=True):
    """The state dict of an optimizer."""

    state: dict[Any, IndexPart]
    groups: list[SavedGroup]


def _read_state_dict(part: IndexPart | None, values: Callable[[IndexPart], list[Any]]) -> SavedStateDict | None:
    """Returns the state dict that a part of an index is; None if it is none."""
    children = part.parts if part is not None else {}
    if children and all(str(key).startswith((f"{_STATE}.", f"{_GROUPS}.")) for key in children):
        return _read_flat(children)
    if _GROUPS not in children or not isinstance(children.get(_STATE, _node({})).structure, (DictNode, ListNode)):
        return None
    groups: list[SavedGroup] = []
    for group in _listed(children[_GROUPS]):
        fields = group.parts
        members, names = (values(fields[key]) if key in fields else [] for key in (_PARAMS, _NAMES))
        own = {key: child for key, child in fields.items() if key not in (_PARAMS, _NAMES)}
        groups.append(SavedGroup(tuple(members), tuple(names), own))
    state = children.get(_STATE, _node({})).parts
    known = {str(member) for group in groups for member in group.members}
    return SavedStateDict({str(key) if str(key) in known else key: child for key, child in state.items()}, groups)


def _read_flat(children: Mapping[Any, IndexPart]) -> SavedStateDict:
    """Reads a state dict with a key for each moment of each parameter, as `flatten_optimizer_state_dict` makes them."""
    state: dict[str, dict[str, IndexPart]] = {}
    groups: dict[str, dict[str, IndexPart]] = {}
    for key, child in children.items():
        kind, _, rest = str(key).partition(".")
        name, _, last = rest.rpartition(".")
        (state if kind == _STATE else groups).setdefault(name, {})[last] = child
    # a group for each parameter: those of one live group have to agree
    members = [SavedGroup((name,), (), own) for name, own in groups.items()]
    return SavedStateDict({name: _node(own) for name, own in state.items()}, members)


class _Naming:
    """Finds the names that parameters have in a source.

    Args:
        rules: those that will be applied to it.
    """

    def __init__(self, index: Index, rules: Sequence[Rule]) -> None:
        self._index, self._rules = index, rules
        followed = any(isinstance(rule, Carried) for rule in rules)
        self._view = view_of(index, rules, source_rank=0, rank=0, strict=False) if followed else None

    def is_saved(self, name: str) -> bool:
        """Whether a parameter of that name was saved."""
        return f"model/{key_text(name)}" in self._index.by_path

    def of(self, names: Sequence[Key]) -> Key:
        """Returns the saved name of a live parameter.

        Args:
            names: all that it has here.

        Raises:
            MismatchError: it is made of parts of others, by rules.
        """
        there = self._index.by_path if self._view is None else self._view.by_path
        path = next((path for key in names if (path := f"model/{key_path(key)}") in there), None)
        if path is None or self._view is None:
            return names[0] if path is None else parse_key(path.removeprefix("model/"))
        if isinstance(self._view.by_path[path][0], ComposedLeaf):
            raise MismatchError(
                path,
                expected="parameters under other names at most, for the state of an optimizer that numbers them",
                found=f"one that rules make of others: {self._view.chain(path)}",
                hint="Leave the optimizer out, or restore without these rules, save, and load that with them",
            )
        return parse_key(self._view.transformed.items[path].of.removeprefix("model/"))


class _Rearranged:
    """The training state that the state dicts in an index are."""

    def __init__(
        self, index: Index, lives: Sequence[NamedOptimizer], ties: Mapping[int, tuple[Key, ...]], rules: Sequence[Rule]
    ) -> None:
        self.index, self.lives = index, lives
        self.ties = {keys[0]: keys for keys in ties.values()}
        self.naming = _Naming(index, rules)
        self.root = _root_of(index)

    def _values(self, part: IndexPart) -> list[Any]:
        """Returns the values of a list in the index."""
        records = [self.index.leaves[leaf] if isinstance(leaf, int) else leaf for leaf in part.leaves]
        if not all(isinstance(record, ValueRecord) and isinstance(record.value, (int, str)) for record in records):
            raise FormatError(_GROUPS, expected="numbers or names of parameters", found="other values")
        return [record.value for record in records if isinstance(record, ValueRecord)]

    def state_dicts(self) -> dict[Key, SavedStateDict] | None:
        """Returns the state dict of each live optimizer, by its name; None where they are no state dicts."""
        part = self.root.get("optimizer")
        if part is None or _GROUPS in self.root:
            return None
        children = part.parts
        names = optimizer_names(self.lives)
        state_dicts: dict[Key, SavedStateDict] = {}
        for position, name in enumerate(names):
            own = part
            if name and key_path(name) in children:
                own = children[key_path(name)]
            elif isinstance(part.structure, (ListNode, TupleNode)) and len(children) == len(names):
                own = children[position]
            state_dict = _read_state_dict(own, self._values)
            if state_dict is None:
                return None
            state_dicts[name] = state_dict
        return state_dicts

    def rearranged(self, state_dicts: Mapping[Key, SavedStateDict]) -> Index:
        """Returns the index with the state of each optimizer by the names of its parameters."""
        optimizer: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        for prefix, saved in state_dicts.items():
            self._add(prefix, saved, optimizer, groups)
        return _with_tree(self.index, _node(self.root | {"optimizer": optimizer, _GROUPS: groups}))

    def _add(self, prefix: Key, saved: SavedStateDict, optimizer: dict[str, Any], groups: dict[str, Any]) -> None:
        names = self._names(prefix, saved)
        members: dict[str, Any] = {}
        values: dict[str, Any] = {}
        named = [
            ParamGroup(
                tuple(names[member] for member in group.members),
                {"name": self._values(group.values["name"])[0]} if "name" in group.values else {},
            )
            for group in saved.groups
        ]
        for label, named_group, group in zip(labels_of(named), named, saved.groups, strict=True):
            members[label] = {name: _value(None) for name in sorted(map(key_path, named_group.members))}
            values[label] = group.values
        state = {
            names[member]: saved.state.get(str(member), _node({})) for group in saved.groups for member in group.members
        }
        for key, part in state.items():
            _put(optimizer, (*prefix, *key), part)
        tree: dict[str, Any] = {"members": members, "values": values}
        known = {str(member) for member in names}
        if shared := {key: part for key, part in saved.state.items() if str(key) not in known}:
            tree["shared"] = shared
        if any(is_lbfgs(live.stateful) for live in self.lives if live.prefix == prefix):
            order = [_value(key_path(key)) for key in state]
            structure = ListNode((None,) * len(order))
            tree["order"] = IndexPart(structure, [leaf for part in order for leaf in part.leaves])
        for key, part in tree.items():
            _put(groups, (*prefix, key), part)

    def _names(self, prefix: Key, saved: SavedStateDict) -> dict[Any, Key]:
        """Returns the saved names of parameters, by what stands for each in the state dict."""
        several = all(isinstance(member, str) for group in saved.groups for member in group.members)
        if several:
            return {member: (member,) for group in saved.groups for member in group.members}
        named = {
            m: (n,)
            for g in saved.groups
            if len(g.names) == len(g.members)
            for m, n in zip(g.members, g.names, strict=True)
        }
        if len(named) == sum(len(g.members) for g in saved.groups) and all(
            self.naming.is_saved(n) for (n,) in named.values()
        ):
            return named
        live = groups_of(self.lives, prefix)
        sizes, wanted = [len(g.members) for g in saved.groups], [len(g.members) for g in live]
        if sizes != wanted:
            raise MismatchError(
                key_path(("optimizer", *prefix, _GROUPS)),
                expected=f"groups of {', '.join(map(str, wanted))} parameters, as the optimizer has",
                found=f"groups of {', '.join(map(str, sizes))}, which have numbers and no names",
                hint="Give the optimizer the groups that were saved; names are saved by get_state_dict, or where the "
                "optimizer is made of model.named_parameters()",
            )
        return {
            member: self.naming.of(self.ties[key])
            for group, here in zip(saved.groups, live, strict=True)
            for member, key in zip(group.members, here.members, strict=True)
        }


def _put(root: dict[str, Any], key: Key, part: Any) -> None:
    for step in key[:-1]:
        root = root.setdefault(step, {})
    root[key[-1]] = part


def _with_tree(index: Index, tree: IndexPart) -> Index:
    """Returns an index of the same files with another tree of its leaves.

    Of ties to an array that is not in the tree, the first becomes that array.
    """
    numbers = {leaf: number for number, leaf in enumerate(tree.leaves) if isinstance(leaf, int)}
    records: list[LeafRecord] = []
    for number, leaf in enumerate(tree.leaves):
        record = index.leaves[leaf] if isinstance(leaf, int) else leaf
        if isinstance(record, AliasRecord):
            of = numbers.setdefault(record.of, number)
            record = index.leaves[record.of] if of == number else msgspec.structs.replace(record, of=of)
        records.append(record)
    return msgspec.structs.replace(index, structure=tree.structure, leaves=tuple(records))


def _root_of(index: Index) -> dict[Any, IndexPart]:
    return IndexPart(index.structure, range(len(index.leaves))).parts


class Arrangement:
    """Arranges checkpoints with state dicts as training states of ours, for live objects.

    Args:
        model, optimizer: the live objects.
        from_root: whether the first rules, which only name leaves, say where the state dicts are.
    """

    def __init__(self, model: ModelEntries, optimizer: Optimizers | None, *, from_root: bool) -> None:
        self._model, self._optimizer, self._from_root = model, optimizer, from_root
        self.has_rearranged = False
        """Whether one of them was none of ours."""
        self._dropped: tuple[str, ...] = ()
        self._renamed: tuple[tuple[str, str], ...] = ()
        """What the first rules have renamed: (saved, new)."""

    def ruled(self, dropped: tuple[str, ...], renamed: tuple[tuple[str, str], ...]) -> tuple[Any, Any]:
        """Returns the paths that all rules have dropped and renamed, by those of the rules that were left."""
        saved = {new: old for old, new in self._renamed}
        later = tuple((saved.get(old, old), new) for old, new in renamed)
        taken = {old for old, _ in later}
        return (*self._dropped, *dropped), (*(pair for pair in self._renamed if pair[0] not in taken), *later)

    def bank(self, bank: Bank, options: LoadOptions, under: str) -> Bank:
        """Returns a bank of opened checkpoints with each of them arranged, and the rules for it.

        The state of optimizers is left as it is where nothing of it is selected.
        """

        def arranged(source: From) -> From:
            assert isinstance(source.path, Checkpoint), "the bank is opened"
            checkpoint, own = source.path, own_globs(source, options)
            fills = own.selects("optimizer") or any(glob.startswith("optimizer/") for glob in own.select or ())
            rules = rules_of(source.rename, source.transforms, under, from_root=self._from_root)
            with contextlib.suppress(CheckpointNotFound):  # one that may be missing
                checkpoint, rules = self.checkpoint(checkpoint, rules, fills_optimizer=fills)
            return msgspec.structs.replace(source, path=checkpoint, rename=None, transforms=rules)

        return Bank(map(arranged, bank.sources))

    def checkpoint(
        self, given: Checkpoint, rules: tuple[Rule, ...], *, fills_optimizer: bool = True
    ) -> tuple[Checkpoint, tuple[Rule, ...]]:
        """Returns a checkpoint as a training state of ours, and the rules for it.

        Models in a list become those of their positions, as text, by which `training.load` names several. Names that a
        wrapper has changed get the rule that changes them back. State dicts of optimizers are rearranged.

        Args:
            rules: those that will be applied to it, which may change the names of parameters.

        Raises:
            MismatchError: parameters have numbers that do not tell which they are.
        """
        optimizer = self._optimizer if fills_optimizer else None
        if self._from_root and optimizer is not None and not holds_state_dicts(given):
            named, rest, view = _named_from_root(given, rules)
            if view is not None and holds_state_dicts(named):
                given, rules, self.has_rearranged = named, rest, True
                self._dropped += view.transformed.dropped
                self._renamed += view.renamed
        has_state = optimizer is not None and holds_state_dicts(given)
        if not (has_state or rules) and all(entry.path in given.index.by_path for entry in self._model.entries):
            return given, rules
        root = _root_of(given.index)
        if "model" in root and isinstance(root["model"].structure, ListNode):
            several = {str(number): part for number, part in root["model"].parts.items()}
            given = given.with_index(_with_tree(given.index, _node(root | {"model": several})))
            self.has_rearranged = True
        rules = (*rules, *wrapper_rules(given.index, self._model.entries, rules))
        if has_state:
            job = _Rearranged(given.index, name_optimizers(optimizer, self._model), self._model.ties, rules)
            if (state_dicts := job.state_dicts()) is not None:
                given, self.has_rearranged = given.with_index(job.rearranged(state_dicts)), True
        return given, rules


def _named_from_root(given: Checkpoint, rules: tuple[Rule, ...]) -> tuple[Checkpoint, tuple[Rule, ...], View | None]:
    """Returns a checkpoint under the names that the first rules give, which only name leaves, the others, and its view.

    Parts at the root in which ranks have leaves of their own stay where they are; a checkpoint whose other parts the
    rules do not fit is left as it is.
    """
    count = next((n for n, rule in enumerate(rules) if not isinstance(rule, (Rename, Renames, Drop))), len(rules))
    if not count or not isinstance(given.index.structure, DictNode):
        return given, rules, None
    root, entries = _root_of(given.index), given.index.entries
    own = {
        key: part
        for key, part in root.items()
        if any(isinstance(leaf, int) and entries[leaf].ranks is not None for leaf in part.leaves)
    }
    shared = _node({key: part for key, part in root.items() if key not in own})
    try:
        view = view_of(_with_tree(given.index, shared), rules[:count], source_rank=0, rank=0)
    except MismatchError:
        if own:
            return given, rules, None
        raise
    tree = IndexPart(view.structure, [shared.leaves[leaf.number] for leaf in view.entries])
    if own.keys() & tree.parts.keys():
        return given, rules, None
    if own:
        tree = _node(own | tree.parts)
    return given.with_index(_with_tree(given.index, tree)), rules[count:], view
