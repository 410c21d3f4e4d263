"""What is registered with a manager is saved with every step, and given back by every restore.

Two kinds: things that all ranks share, trees or objects with `state_dict` and `load_state_dict`, under `registered/` in
the checkpoint; and readers of input, of which each rank has its own, under `io/`, with a word for each on what to do
when the number of ranks has changed. Restoring first compares and loads everything that is small; readers are handed
their state last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from .. import api
from ..arrays.registry import is_value
from ..arrays.stateful import AsSaved, is_optimizer
from ..core.format.records import Index
from ..core.tree.flatten import PerRank, flatten
from ..core.tree.globs import compile_globs
from ..core.tree.in_place import update_in_place
from ..core.tree.structure import empty_containers, key_text, keys_of
from ..errors import MismatchError, TreeError
from ..io.comm.comm import Comm
from ..io.storage.store import Store
from ..loading.match import LoadOptions
from ..loading.overlay import globs_of
from ..loading.transforms import as_rules
from ..saving.options import SaveOptions
from ..trees.per_rank_state import Policy, policy_of, states_of_all_ranks
from .options import check_thing

__all__ = ["RegisteredState", "RegistrationMixin"]

THINGS, READERS = "registered", "io"
"""Where they stand at the root of the tree."""


class _InputReader(msgspec.Struct, frozen=True):
    dump: Callable[[], Any]
    load: Callable[[Any], Any]
    changed: Policy


class _FunctionValue(AsSaved):
    """A value that functions give and take."""

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        self._get, self._set = get, set

    def state_dict(self) -> Any:
        """The value."""
        return self._get()

    def load_state_dict(self, state: Any) -> None:
        """Sets the value."""
        self._set(state)


class RegisteredState:
    """What is registered with one manager, on one rank."""

    def __init__(self) -> None:
        self._things: dict[str, Any] = {}
        self._readers: dict[str, _InputReader] = {}

    def __bool__(self) -> bool:
        return bool(self._things or self._readers)

    def add(self, name: str, thing: Any, namespace: str = "") -> None:
        """Registers something that ranks share.

        Args:
            namespace: of optree's registry.

        Raises:
            ValueError: the name is taken.
            TreeError: it holds a value that could not be put back.
        """
        _check_name(name, self._things, "registered")
        check_thing(f"{THINGS}/{key_text(name)}", name, thing, namespace)
        self._things[name] = thing

    def add_value(self, name: str, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        """Registers a value that functions give and take.

        Raises:
            ValueError: the name is taken.
            TypeError: they are no functions.
        """
        _check_name(name, self._things, "registered")
        for what, function in (("get", get), ("set", set)):
            if not callable(function):
                raise TypeError(f"expected {what} to be a function, found {function!r:.60}")
        self._things[name] = _FunctionValue(get, set)

    def add_reader(self, name: str, reader: Any, changed: Policy) -> None:
        """Registers what each rank has of its own.

        Raises:
            ValueError: the name is taken.
            TreeError: it keeps no state.
        """
        _check_name(name, self._readers, "registered as io state")
        for dump, load in (("state_dict", "load_state_dict"), ("dump_io_state", "load_io_state")):
            acts: tuple[Any, Any] = getattr(reader, dump, None), getattr(reader, load, None)
            if all(map(callable, acts)):
                self._readers[name] = _InputReader(*acts, policy_of(changed, name))
                return
        raise TreeError(
            f"{READERS}/{name}",
            expected="an object with state_dict and load_state_dict, or dump_io_state and load_io_state",
            found=f"a {type(reader).__qualname__}",
            hint="Wrap it in one that has both",
        )

    # saving ------------------------------------------------------------------------------------------------------

    def joined(self, tree: Any) -> Any:
        """A tree together with what is registered; `...` stands for no tree.

        Raises:
            TreeError: there is nothing, or the tree cannot take it.
        """
        if not self:
            if tree is ...:
                raise TreeError("", expected="a tree", found="none, and nothing registered")
            return tree
        parts: dict[str, Any] = {}
        if self._things:
            parts[THINGS] = self._things
        if self._readers:
            parts[READERS] = {name: PerRank(one.dump()) for name, one in self._readers.items()}
        return {**_as_dict(tree), **parts}

    # restoring ---------------------------------------------------------------------------------------------------

    def restore(self, store: Store, like: Any, into: Any, comm: Comm, options: Mapping[str, Any]) -> Any:
        """Loads a tree as `treeckpt.load`, or fills one, and gives what is registered its state.

        Raises:
            As `treeckpt.load`; nothing that is registered has changed then.
        """
        if not self:
            if into is not None:
                return api.load_into(store, into, comm=comm, **options)
            return api.load(store, like, comm=comm, **options)
        index = api.inspect(store)
        names = _RegisteredSelection(index, options)
        options = names.beside({THINGS: self._things, READERS: self._readers})
        states = self._states(store, names, comm, options)
        things = {name: self._things[name] for name in names.wanted(THINGS, self._things)}
        resumed = _with_resumed(things, store, names, comm, options)
        target = {THINGS: resumed, READERS: ...} if things or names.left(THINGS, self._things) else {}
        if into is not None:
            result: Any = _fill(
                store, _as_dict(into), {**dict.fromkeys((THINGS, READERS), ...), **target}, comm, options
            )
        else:
            result = _load(store, like, index, comm, options)
            if target:
                rest = dict.fromkeys((key for key in _roots(index) if key not in target), ...)
                _fill(store, {}, {**rest, **target}, comm, _for_filling(options))
        for name, thing in resumed.items():
            if thing is not things[name]:
                _take_back(things[name], thing)
        for name, state in states.items():
            self._readers[name].load(state)
        return result

    def _states(
        self, store: Store, names: _RegisteredSelection, comm: Comm, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """This rank's state of each reader."""
        wanted = names.wanted(READERS, self._readers)
        if not wanted:
            return {}
        world = names.index.world
        changed = {name: self._readers[name].changed for name in wanted} if comm.size != world else {}
        for name in (name for name, policy in changed.items() if policy == "error"):
            raise MismatchError(
                f"{READERS}/{name}",
                expected=f"state of one rank of {comm.size}",
                found=f"state saved by a world of {world}",
                hint="The world size changed: register it with changed='take' or a function that merges the states, "
                "or leave it out",
            )
        ranks = range(world) if any(callable(policy) for policy in changed.values()) else [comm.rank % world]
        reading = {key: options[key] for key in ("verify", "allow_pickle") if key in options}
        found = dict(zip(ranks, states_of_all_ranks(store, READERS, world, ranks=ranks, **reading), strict=True))

        def state_of(name: str) -> Any:
            policy = changed.get(name)
            if callable(policy):
                return policy([found[rank][name].value for rank in ranks], comm.rank, comm.size)
            return found[comm.rank % world][name].value

        return {name: state_of(name) for name in wanted}


class _RegisteredSelection:
    """Which of the registered names are in a checkpoint, and asked for."""

    def __init__(self, index: Index, options: Mapping[str, Any]) -> None:
        self.index, self._options, self._strict = index, options, options.get("strict", True)
        self._saved = [*index.by_path, *empty_containers(index.structure)]
        self._chosen = LoadOptions(globs_of(options.get("select")), exclude=globs_of(options.get("exclude")))

    def beside(self, registered: Mapping[str, Iterable[str]]) -> dict[str, Any]:
        """The options for the tree, without globs that only mean what is registered and not in the checkpoint."""
        names = [f"{part}/{key_text(name)}" for part, part_names in registered.items() for name in part_names]
        saved, options = self._saved, dict(self._options)
        for key, globs in (("select", self._chosen.select), ("exclude", self._chosen.exclude)):
            if globs:
                known = compile_globs(globs)
                ours = set(known.unused(saved)) - set(known.unused(saved + names))
                options[key] = [glob for glob in globs if glob not in ours]
        return options

    def selects(self, path: str) -> bool:
        """Whether a path is asked for."""
        return self._chosen.selects(path)

    def wanted(self, part: str, names: Iterable[str]) -> list[str]:
        """The names of a part that are to be restored.

        Raises:
            MismatchError: under `strict`, one is not in the checkpoint.
        """
        found: list[str] = []
        for name in names:
            path = f"{part}/{key_text(name)}"
            below = [p for p in self._saved if p == path or p.startswith(f"{path}/")]
            if any(map(self._chosen.selects, below)):
                found.append(name)
            elif not below and self._strict and self._chosen.selects(path):
                raise MismatchError(
                    path,
                    expected=f"the state of {name!r}, which is registered",
                    found="nothing in the checkpoint",
                    hint="Pass strict=False, or leave it out",
                )
        return found

    def left(self, part: str, names: Iterable[str]) -> bool:
        """Whether the checkpoint has something of a part that is asked for and not registered."""
        known = tuple(f"{part}/{key_text(name)}" for name in names)
        return any(
            path.startswith(f"{part}/") and not path.startswith(known) and self._chosen.selects(path)
            for path in self.index.by_path
        )


def _with_resumed(
    things: dict[str, Any], store: Store, names: _RegisteredSelection, comm: Comm, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The things with optimizers that can take what was saved, whatever they have."""
    optimizers = "torch" in sys.modules and [
        name for name, thing in things.items() if any(is_optimizer(leaf) for _, leaf in flatten(thing)[1])
    ]
    if not optimizers or options.get("on_corrupt") == "skip":
        return things
    from ..training.resuming import with_resumed
    from ..training.sources import CheckpointSource, Options

    rules = as_rules(options.get("rename"), options.get("transforms"))
    source = CheckpointSource(store, comm, Options(allow_pickle=options.get("allow_pickle", False), rules=rules))
    found = {name: with_resumed(things[name], (THINGS, name), source, names.selects) for name in optimizers}
    return {**things, **found}


def _take_back(thing: Any, filled: Any) -> None:
    """Puts the values of a tree with resumed optimizers into the one that is registered."""
    from ..training.resuming import without_resumed

    update_in_place(thing, without_resumed(filled), is_value=is_value)


def _fill(store: Store, into: dict[str, Any], parts: dict[str, Any], comm: Comm, options: Mapping[str, Any]) -> Any:
    """Fills a dict's values and other parts at the root beside them, in one load."""
    tree = {**into, **parts}
    report = api.load_into(store, tree, comm=comm, **options)
    into.update((key, tree[key]) for key in into)
    return report


def _load(store: Store, like: Any, index: Index, comm: Comm, options: Mapping[str, Any]) -> Any:
    """The tree without what is registered."""
    ours = {THINGS, READERS}
    if like is not None:
        tree = api.load(store, {**_as_dict(like), **dict.fromkeys(ours, ...)}, comm=comm, **options)
    else:
        rest = [key for key in _roots(index) if key not in ours]
        select = options.get("select")
        if select is None:
            select = [_literal(key_text(key)) for key in rest]
        tree = api.load(store, comm=comm, **{**options, "select": select})
    return {key: value for key, value in tree.items() if key not in ours}


def _for_filling(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that filling takes too."""
    known = api.load_into.__kwdefaults__ or {}
    return {key: value for key, value in options.items() if key in known}


def _roots(index: Index) -> Sequence[Any]:
    return keys_of(index.structure, "") if index.structure is not None else []


def _as_dict(tree: Any) -> dict[str, Any]:
    if tree is ...:
        return {}
    if type(tree) is not dict or not {THINGS, READERS}.isdisjoint(tree):
        found = f"a {type(tree).__qualname__}" if type(tree) is not dict else f"one with {THINGS!r} or {READERS!r}"
        raise TreeError("", expected=f"a dict, beside whose keys {THINGS!r} and {READERS!r} are put", found=found)
    return tree


def _literal(text: str) -> str:
    """A glob that means just this text."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _check_name(name: str, taken: Mapping[str, Any], what: str) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"expected a name, found {name!r:.60}")
    if name in taken:
        raise ValueError(f"{name!r} is {what} already")


class RegistrationMixin:
    """The part of a manager that registers what to save with every step."""

    _registered: RegisteredState
    _options: SaveOptions

    def register(self, name: str, thing: Any) -> None:
        """Has something saved with every step, under `registered/<name>`, and restored by every `restore`, in place.

        Args:
            thing: an object with `state_dict` and `load_state_dict`, `KeyedTable.of` a hash table, or a tree whose
                containers can change; the same on all ranks, but for what it marks. An optimizer may be fresh when it
                is restored: its state is made where its parameters are.

        Raises:
            ValueError: the name is taken.
            TreeError: it is or holds a value that cannot be changed in place; `register_value` takes those.
        """
        self._registered.add(name, thing, self._options.namespace)

    def register_value(self, name: str, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        """Has a value saved with every step, under `registered/<name>`, and given back by every `restore`.

        Args:
            get: gives the value at each save: any tree that `treeckpt.save` takes, the same on all ranks.
            set: takes the value as it was saved.

        Raises:
            ValueError: the name is taken.
        """
        self._registered.add_value(name, get, set)

    def register_io_state(self, name: str, reader: Any, *, changed: Policy = "error") -> None:
        """Has the state of this rank's reader of input saved with every step, under `io/<name>`, and restored.

        Args:
            reader: with `state_dict` and `load_state_dict`, or `dump_io_state` and `load_io_state`.
            changed: what it is given when the number of ranks is another one: "error" refuses, "take" takes that of
                rank modulo the old world, or `merge(states of all old ranks, rank, world)` makes it.

        Raises:
            ValueError: the name is taken.
        """
        self._registered.add_reader(name, reader, changed)
