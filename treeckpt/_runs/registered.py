"""Objects that are registered with a manager: saved with every step, and restored by every restore.

There are two kinds: objects that all ranks share (trees, or objects with `state_dict` and `load_state_dict`), saved
under `registered/` in the checkpoint; and readers of input, of which each rank has its own, saved under `io/`, each
with a policy for a changed number of ranks. Shared objects are filled in the load of the tree or training state;
readers get their state last.
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from .. import _api
from .._arrays.stateful import LoadsSavedState, StatePlan, is_optimizer, object_states, plan_state
from .._core.format.records import Index
from .._core.tree.containers import PerRank
from .._core.tree.flatten import flatten
from .._core.tree.paths import compile_globs, globs_of
from .._core.tree.structure import empty_container_paths, key_text, keys_of
from .._io.comm.comm import Comm, other_world_error
from .._io.storage.checkpoint import Checkpoint
from .._loading.match import LoadOptions
from .._loading.options import ONLY_OF_LOAD, Policy, policy_of, read_alone
from .._loading.overlay import Bank
from ..errors import MismatchError, TreeError
from ..reports import LoadReport
from ..rules import as_rules
from ..trees._per_rank_state import load_own
from .options import check_can_restore

if TYPE_CHECKING:  # it imports torch
    from ..training._user_state import TreeToFill

OBJECTS, READERS = "registered", "io"
"""The keys at the root of the tree under which shared objects and readers are saved."""


class InputReader(msgspec.Struct, frozen=True):
    """A reader, as an object with `state_dict` and `load_state_dict`, and the policy for a changed number of ranks."""

    owner: Any
    changed: Policy


class FunctionValue(LoadsSavedState):
    """A value that is read and set by functions, which pass it on as it is."""

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        self._get, self._set = get, set

    def state_dict(self) -> Any:
        """Returns the value."""
        return self._get()

    def load_state_dict(self, state: Any) -> None:
        """Sets the value."""
        self._set(state)


class RegisteredState:
    """The objects registered with one manager, on one rank."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self.objects: dict[str, Any] = {}
        """What all ranks share."""
        self.readers: dict[str, InputReader] = {}

    def __bool__(self) -> bool:
        return bool(self.objects or self.readers)

    def add(self, name: str, thing: Any) -> None:
        """Registers an object; see `Manager.register`."""
        _check_name(name, self.objects, "registered")
        check_can_restore(f"{OBJECTS}/{key_text(name)}", name, thing, self._namespace)
        self.objects[name] = thing

    def add_value(self, name: str, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        """Registers a value; see `Manager.register_value`."""
        _check_name(name, self.objects, "registered")
        for what, function in (("get", get), ("set", set)):
            if not callable(function):
                raise TypeError(f"expected {what} to be a function, found {function!r:.60}")
        self.objects[name] = FunctionValue(get, set)

    def add_reader(self, name: str, reader: Any, changed: Policy) -> None:
        """Registers a reader of input; see `Manager.register_io_state`."""
        _check_name(name, self.readers, "registered as io state")
        for dump, load in (("state_dict", "load_state_dict"), ("dump_io_state", "load_io_state")):
            methods: tuple[Any, Any] = getattr(reader, dump, None), getattr(reader, load, None)
            if all(map(callable, methods)):
                owner = reader if dump == "state_dict" else FunctionValue(*methods)
                self.readers[name] = InputReader(owner, policy_of(changed, name) or "error")
                return
        raise TreeError(
            f"{READERS}/{name}",
            expected="an object with state_dict and load_state_dict, or dump_io_state and load_io_state",
            found=f"a {type(reader).__qualname__}",
            hint="Wrap it in one that has both",
        )

    # saving ------------------------------------------------------------------------------------------------------

    def joined(self, tree: Any) -> Any:
        """Returns a tree together with what is registered; `...` stands for no tree.

        Raises:
            TreeError: there is no tree and nothing registered, or the tree is no dict.
        """
        if not self:
            if tree is ...:
                raise TreeError("", expected="a tree", found="none, and nothing registered")
            return tree
        parts: dict[str, Any] = {}
        if self.objects:
            parts[OBJECTS] = self.objects
        if self.readers:
            parts[READERS] = {
                name: PerRank(object_states(one.owner.state_dict(), f"{READERS}/{key_text(name)}", (one.owner,)))
                for name, one in self.readers.items()
            }
        return {**_as_dict(tree), **parts}

    # restoring ---------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Checkpoint, like: Any, into: Any, comm: Comm, options: Mapping[str, Any]) -> Any:
        """Loads or fills a tree, same as `treeckpt.load` and `load_into`, and restores what is registered.

        Raises:
            The errors of `treeckpt.load`; nothing that is registered has changed then.
        """
        if not self and into is not None:
            return _api.load_into(checkpoint, into, comm=comm, **options)
        if not self:
            return _api.load(checkpoint, like, comm=comm, **options)
        selection = _RegisteredSelection(checkpoint.index, options)
        options = selection.tree_options({OBJECTS: self.objects, READERS: self.readers})
        readers = self._plan_readers(checkpoint, selection, comm, options)
        things = {name: self.objects[name] for name in selection.wanted(OBJECTS, self.objects)}
        trees = _trees_with_optimizers(things, checkpoint, selection.selects, comm, options)
        target: dict[str, Any] = {}
        if things or selection.has_unregistered(OBJECTS, self.objects):
            target = {OBJECTS: things | {name: tree.target for name, tree in trees.items()}, READERS: ...}
        if into is not None:
            rest = dict.fromkeys((OBJECTS, READERS), ...)
            result = _fill(checkpoint, _as_dict(into), {**rest, **target}, comm, options)
        else:
            result = _load(checkpoint, like, checkpoint.index, comm, options)
            if target:  # the registered objects alone
                filling = {key: given for key, given in options.items() if key not in ONLY_OF_LOAD}
                # A fill refuses both, which say how new arrays are made.
                filling["read"] = msgspec.structs.replace(options["read"], mmap=False, copy=False)
                rest = dict.fromkeys((key for key in _roots(checkpoint.index) if key not in target), ...)
                _fill(checkpoint, {}, {**rest, **target}, comm, filling)
        for tree in trees.values():
            tree.take_back()
        for reader in readers:
            reader.load()
        return result

    def fill(self, source: Checkpoint | Bank, into: Any, comm: Comm, options: Mapping[str, Any]) -> LoadReport:
        """Fills a tree, and the objects that all ranks share, from checkpoints that need not be those of this run.

        Raises:
            The errors of `treeckpt.load_into`; nothing has changed then.
        """
        if not self.objects and into is None:
            raise TreeError("", expected="a tree in into, or something registered", found="neither")
        chosen = LoadOptions(globs_of(options.get("select")), exclude=globs_of(options.get("exclude"), "exclude"))
        trees = _trees_with_optimizers(self.objects, source, chosen.selects, comm, options)
        things = self.objects | {name: tree.target for name, tree in trees.items()}
        parts = {OBJECTS: things} if things else {}
        report = _fill(source, {} if into is None else _as_dict(into), parts, comm, options)
        for tree in trees.values():
            tree.take_back()
        return report

    def restore_training(
        self, checkpoint: Checkpoint, model: Any, optimizer: Any, comm: Comm, options: Mapping[str, Any]
    ) -> Any:
        """Restores a training state, same as `treeckpt.training.restore`, and what is registered; returns the report.

        Raises:
            The errors of `treeckpt.training.restore`.
        """
        from ..training import restore
        from ..training._restore import WithObjects

        if not self:
            return restore(checkpoint, model, optimizer, comm=comm, **options)
        # The globs of a training state mean `model/...` alone, so they choose nothing of what is registered.
        selection = _RegisteredSelection(checkpoint.index, {"strict": options.get("strict", True)})
        readers = self._plan_readers(checkpoint, selection, comm, options)
        things = {name: self.objects[name] for name in selection.wanted(OBJECTS, self.objects)}
        report = restore(WithObjects(checkpoint, {OBJECTS: things}), model, optimizer, comm=comm, **options)
        for reader in readers:
            reader.load()
        return msgspec.structs.replace(report, ignored=self._ignored(report.ignored, checkpoint.index))

    def _ignored(self, parts: Iterable[str], index: Index) -> tuple[str, ...]:
        """Returns the parts of a checkpoint that a restore did not ask for, without what is registered."""
        found: list[str] = []
        for part in parts:
            ours = {f"{part}/{key_text(name)}" for name in {OBJECTS: self.objects, READERS: self.readers}.get(part, ())}
            there = ("/".join(path.split("/")[:2]) for path in index.by_path if path.startswith(f"{part}/"))
            found += [name for name in dict.fromkeys(there) if name not in ours] if ours else [part]
        return tuple(found)

    def _plan_readers(
        self, checkpoint: Checkpoint, selection: _RegisteredSelection, comm: Comm, options: Mapping[str, Any]
    ) -> list[StatePlan]:
        """Loads this rank's state of each reader; returns what these take."""
        wanted = selection.wanted(READERS, self.readers)
        if not wanted:
            return []
        world = selection.index.world
        changed = {name: self.readers[name].changed for name in wanted} if comm.size != world else {}
        for name in (name for name, policy in changed.items() if policy == "error"):
            others = "; or a function merge(states, rank, world) in place of 'take'; or do not register it"
            take = f"changed='take' to register_io_state({name!r}, ...)"
            raise other_world_error(f"{READERS}/{name}", comm, world, take=take, others=others)
        merges = any(callable(policy) for policy in changed.values())

        def merge(states: list[Any], rank: int, size: int) -> dict[str, Any]:
            return {
                name: policy([state[name].value for state in states], rank, size)
                if callable(policy := changed[name])
                else states[rank % world][name].value
                for name in wanted
            }

        reading = {key: options[key] for key in ("allow_pickle", "namespace") if key in options}
        found = load_own(
            checkpoint,
            READERS,
            merge if merges else "take",
            comm,
            saved_world=world,
            argument="changed",
            read=read_alone(options["read"]),
            **reading,
        )
        states = found if merges else {name: found[name].value for name in wanted}
        namespace = options.get("namespace", "")
        return [
            plan_state(f"{READERS}/{key_text(name)}", self.readers[name].owner, state, namespace=namespace)
            for name, state in states.items()
        ]


class _RegisteredSelection:
    """Tells which of the registered names are in a checkpoint, and are selected by the options of the load."""

    def __init__(self, index: Index, options: Mapping[str, Any]) -> None:
        self.index, self._options, self._strict = index, options, options.get("strict", True)
        self._saved = [*index.by_path, *empty_container_paths(index.structure)]
        given = LoadOptions(globs_of(options.get("select")), exclude=globs_of(options.get("exclude"), "exclude"))
        self._chosen = given.for_structure(index.structure)
        self.selects = self._chosen.selects

    def tree_options(self, registered: Mapping[str, Iterable[str]]) -> dict[str, Any]:
        """Returns the options for the tree, without globs that match only registered names not in the checkpoint."""
        names = [f"{part}/{key_text(name)}" for part, part_names in registered.items() for name in part_names]
        saved, options = self._saved, dict(self._options)
        for key, globs in (("select", self._chosen.select), ("exclude", self._chosen.exclude)):
            if globs:
                known = compile_globs(globs)
                ours = set(known.unused(saved)) - set(known.unused(saved + names))
                options[key] = [glob for glob in globs if glob not in ours]
        return options

    def wanted(self, part: str, names: Iterable[str]) -> list[str]:
        """Returns the names of a part that are to be restored.

        Raises:
            MismatchError: with `strict`, one is not in the checkpoint.
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

    def has_unregistered(self, part: str, names: Iterable[str]) -> bool:
        """Whether the checkpoint has a selected leaf of a part that is not registered."""
        known = tuple(f"{part}/{key_text(name)}" for name in names)
        return any(
            path.startswith(f"{part}/") and not path.startswith(known) and self._chosen.selects(path)
            for path in self.index.by_path
        )


def _trees_with_optimizers(
    things: Mapping[str, Any],
    checkpoint: Checkpoint | Bank,
    selects: Callable[[str], bool],
    comm: Comm,
    options: Mapping[str, Any],
) -> dict[str, TreeToFill]:
    """Returns the objects that hold optimizers, to be filled so that these take a state even if they have none yet."""
    namespace = options.get("namespace", "")
    # Without torch nothing is an optimizer, and it is not imported to find that out.
    names = "torch" in sys.modules and [
        name
        for name, thing in things.items()
        if any(is_optimizer(leaf) for _, leaf in flatten(thing, namespace=namespace)[1])
    ]
    if not names or options["fallback"].on_corrupt == "skip":
        return {}
    from ..training._sources import CheckpointSource
    from ..training._user_state import TreeToFill

    rules = as_rules(options.get("rename"), options.get("transforms"))
    source = CheckpointSource(
        checkpoint,
        comm,
        LoadOptions(allow_pickle=options.get("allow_pickle", False), namespace=namespace, rules=rules),
    )
    return {name: TreeToFill(things[name], (OBJECTS, name), source, selects) for name in names}


def _fill(
    checkpoint: Checkpoint | Bank, into: dict[str, Any], parts: dict[str, Any], comm: Comm, options: Mapping[str, Any]
) -> LoadReport:
    """Fills a dict and further parts at the root of the tree, in one load."""
    tree = {**into, **parts}
    report = _api.load_into(checkpoint, tree, comm=comm, **options)
    # The load may have put new values into `tree`, which is a copy of the caller's dict.
    into.update((key, tree[key]) for key in into)
    return report


def _load(checkpoint: Checkpoint, like: Any, index: Index, comm: Comm, options: Mapping[str, Any]) -> Any:
    """Loads the tree without what is registered."""
    ours = {OBJECTS, READERS}
    if like is not None:
        tree = _api.load(checkpoint, {**_as_dict(like), **dict.fromkeys(ours, ...)}, comm=comm, **options)
    else:
        rest = [key for key in _roots(index) if key not in ours]
        select = options.get("select")
        if select is None:
            # A key may have characters that mean something in a glob.
            select = [glob.escape(key_text(key)) for key in rest]
        tree = _api.load(checkpoint, comm=comm, **{**options, "select": select})
    return {key: value for key, value in tree.items() if key not in ours}


def _roots(index: Index) -> Sequence[Any]:
    return keys_of(index.structure, "") if index.structure is not None else []


def _as_dict(tree: Any) -> dict[str, Any]:
    if tree is ...:
        return {}
    if type(tree) is not dict or not {OBJECTS, READERS}.isdisjoint(tree):
        found = f"a {type(tree).__qualname__}" if type(tree) is not dict else f"one with {OBJECTS!r} or {READERS!r}"
        raise TreeError("", expected=f"a dict, beside whose keys {OBJECTS!r} and {READERS!r} are put", found=found)
    return tree


def _check_name(name: str, taken: Mapping[str, Any], what: str) -> None:
    """Refuses what is no name, and a name that is registered already."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"expected a name, found {name!r:.60}")
    if name in taken:
        raise ValueError(f"{name!r} is {what} already")
