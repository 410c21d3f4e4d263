"""Opens the source of a restore: a checkpoint, a tree in memory, or several checkpoints of which later ones win.

Of several, each is read through its own rules, which its optimizers' state follows, and through rules that drop the
leaves that a later one provides. So they have no leaf in common, and their structures merge into that of one training
state. Per-rank state, such as that of the generators, comes from one checkpoint as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, reduce
from typing import Any

import msgspec

from ..core.tree.globs import compile_globs
from ..core.tree.merge import merge_sources
from ..core.tree.spec import ArraySpec
from ..core.tree.structure import DictNode, Structure, keys_of, parse_path
from ..errors import MismatchError
from ..io.comm.comm import Comm
from ..io.storage.checkpoint import Checkpoint
from ..io.storage.open import is_path_or_store
from ..loading.aliasing import are_equal
from ..loading.match import LoadOptions, Strict
from ..loading.overlay import Bank, From, as_bank, globs_of, members_of, refuse_rules
from ..loading.transforms import Renaming, Transforms, as_rules, carried
from ..loading.transforms.rules import Drop, Rule, placed_below
from ..reports import LoadReport
from ..trees.per_rank_state import Policy
from .sources import (
    OWN,
    CheckpointSource,
    OnReport,
    RestoreSource,
    TreeSource,
    abstract_part,
    children_of,
    fill_from,
    load_part,
    wanted_of,
)

OTHER_NAMES = (
    "State dicts under other names: old = treeckpt.load(path), then treeckpt.save(new, {'model': old[...], "
    "'optimizer': old[...]}) with their names there, and restore new"
)


def rules_of(rename: Renaming, transforms: Transforms, under: str, *, from_root: bool) -> tuple[Rule, ...]:
    """Returns the rules of a restore, for what it reads once it is placed; see `restore`."""
    rules = as_rules(rename, transforms)
    rules = placed_below(rules, under) if under else rules
    return (carried(*rules),) if rules and not from_root else rules


def place_under(given: Any, under: str) -> Any:
    """Returns a checkpoint, or a bank of opened ones, as if all that it holds were saved under a path; or a tree."""
    if isinstance(given, Mapping):
        return reduce(lambda tree, key: {key: tree}, reversed(parse_path(under)), given)
    if isinstance(given, Bank):
        return given.opened([place_under(source.path, under) for source in given.sources])
    index = given.index
    structure = reduce(lambda node, key: DictNode((key,), (node,)), reversed(parse_path(under)), index.structure)
    return given.with_index(msgspec.structs.replace(index, structure=structure))


class _OverlaySource:
    """Several checkpoints, of which later ones win."""

    def __init__(self, bank: Bank, comm: Comm, options: LoadOptions, *, from_root: bool) -> None:
        refuse_rules(options.rules)
        self.comm, self.options, self._from_root = comm, options, from_root
        members = members_of(bank, self._look)
        self._all_members = [member for _, member in members]
        for source, member in members:
            _globs(source, options.strict).check_used(lambda member=member: member.names, lambda: self.names)
        self._provider: dict[str, CheckpointSource] = {}
        given = [
            (member, [path for path in member.leaves if _globs(source).selects(path) and not member.view.is_kept(path)])
            for source, member in members
        ]
        beside: dict[CheckpointSource, list[str]] = {}
        winner = {_unit(path): member for member, paths in given for path in paths}
        for member, paths in given:
            own = {path for path in paths if winner[_unit(path)] is member}
            self._provider.update(dict.fromkeys(own, member))
            # a table of which only some leaves are taken stays a whole table
            parts = tuple(table for table in member.tables if any(path.startswith(table) for path in own))
            beside[member] = [path for path in member.leaves if path not in own and path.startswith(parts)]
            kept = own.union(beside[member])
            member.add(*(Drop(path, optional=True) for path in member.leaves if path not in kept))
        self.members = [member for member, _ in given if member.leaves]
        self._bank = Bank([From(m.checkpoint, transforms=m.rules, exclude=beside[m] or None) for m in self.members])
        self.url = ", ".join(member.url for member in self.members)
        self.world = next((m.world for m in self.members if m.world != comm.size), comm.size)
        self.step = (self._provider_of("param_groups") or self.members[-1]).step
        dropped, renamed = zip(*(member.ruled for member in self.members), strict=True)
        self.ruled = sum(dropped, ()), sum(renamed, ())

    def _look(self, source: From) -> tuple[From, CheckpointSource]:
        rules = rules_of(source.rename, source.transforms, "", from_root=self._from_root)
        options = msgspec.structs.replace(self.options, rules=rules)
        assert isinstance(source.path, Checkpoint), "the bank is opened"
        return source, CheckpointSource(source.path, self.comm, options)

    def _provider_of(self, part: str) -> CheckpointSource | None:
        """Returns the last checkpoint that provides a leaf of a part at the root, or None."""
        found = [self._provider[path] for path in self._provider if path == part or path.startswith(f"{part}/")]
        return max(found, key=self.members.index, default=None)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset[str]().union(*(member.names for member in self._all_members))

    @cached_property
    def structure(self) -> Structure:
        return reduce(merge_sources, (member.structure for member in self.members))

    @cached_property
    def leaves(self) -> Mapping[str, ArraySpec | None]:
        return {path: member.leaves[path] for path, member in self._provider.items()}

    def is_left(self, path: str) -> bool:
        given = path in self._provider or path + OWN in self._provider
        return not self.options.selects(path) or (not given and any(m.view.is_kept(path) for m in self.members))

    def are_equal(self, paths: tuple[str, str], wanted: Any) -> bool:
        first, second = (self._provider[path] for path in paths)
        if first is second:
            return first.are_equal(paths, wanted)
        jobs = (first.reading_job(), paths[0]), (second.reading_job(), paths[1])
        return are_equal(*jobs, wanted_of(wanted, paths[0], self.comm))

    def identity(self, path: str) -> object:
        found = self._provider[path].identity(path)
        return None if found is None else (id(self._provider[path]), found)

    def is_spread(self, path: str) -> bool:
        return self._provider[path].is_spread(path)

    def is_same_part(self, path: str, tensor: Any) -> bool:
        return path in self._provider and self._provider[path].is_same_part(path, tensor)

    def value(self, path: str) -> Any:
        return self._provider[path].value(path)

    def part(
        self, name: str, on_report: OnReport | None = None, *, select: Sequence[str] = (), lenient: bool = False
    ) -> Any:
        options = msgspec.structs.replace(self.options, lenient=lenient)
        return load_part(self._bank, name, self.comm, options, on_report, select)

    def abstract(self, name: str) -> Any:
        return abstract_part(self._bank, name, self.comm, self.options)

    def world_of(self, name: str) -> int:
        provider = self._provider_of(name)
        return self.world if provider is None else provider.world

    def own(self, name: str, policy: Policy) -> Any:
        provider = self._provider_of(name)
        assert provider is not None, "only parts of the structure are requested"
        return provider.own(name, policy)

    def fill(self, target: dict[str, Any], *, take: bool, alone: bool = False) -> LoadReport:
        return fill_from(self._bank, target, self.comm, self.options, take=take, alone=alone)


def _unit(path: str) -> str:
    """Returns the path of the unit that one checkpoint provides: a leaf, or all per-rank state at a path."""
    return path.partition(OWN)[0]


def _globs(source: From, strict: Strict = True) -> LoadOptions:
    return LoadOptions(globs_of(source.select), strict, exclude=globs_of(source.exclude, "exclude"))


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


def missing_part(part: str, how: str, parts: Iterable[object], *, in_memory: bool = False) -> MismatchError:
    """Returns the error that a source lacks a part of a training state.

    Args:
        how: what would have saved it.
        parts: those that it has.
        in_memory: whether the source is a tree in memory, in which state dicts of optimizers are not read.
    """
    if in_memory and part in parts:
        return MismatchError(
            part,
            expected=f"in a tree in memory, what {how} gives",
            found="a state dict, which restore reads from files only",
            hint="Give the path of the file in place of its tree; or treeckpt.save(new, tree), and restore new. "
            f"To leave what is here as it is, pass {part}=None",
        )
    hint = f"To leave what is here as it is, pass {part}={False if part == 'rng' else None}"
    return MismatchError(
        part,
        expected=f"a state saved with {how}",
        found=f"only {', '.join(map(str, parts))} in the checkpoint",
        hint=hint + (f". {OTHER_NAMES}" if part == "optimizer" else ""),
    )


def is_stored(given: Any) -> bool:
    """Whether a source is a path, a store, or several of them, and no tree in memory."""
    return is_path_or_store(given) or isinstance(given, Checkpoint) or as_bank(given) is not None


def open_source(given: Any, comm: Comm, options: LoadOptions, *, from_root: bool = False) -> RestoreSource:
    """Opens a path or store, several of them, or a tree.

    Args:
        from_root: as for `restore`, of the rules on each of several checkpoints.

    Raises:
        MismatchError: the root is no training state.
    """
    bank = as_bank(given)
    source: Any
    if isinstance(given, Mapping):
        source = TreeSource(given, comm, options)
    elif bank is not None:
        source = _OverlaySource(bank, comm, options, from_root=from_root)
    elif isinstance(given, Checkpoint):
        source = CheckpointSource(given, comm, options)
    else:
        raise MismatchError(
            "",
            expected="a path, a store, a bank of them, or a tree as training.state gives it",
            found=f"{type(given).__name__}",
            hint="The path comes first: restore(path, model, optimizer)",
        )
    root = source.structure
    if "model" not in children_of(root) and not any(name.startswith("model/") for name in source.names):
        keys = ", ".join(map(str, keys_of(root, ""))) if root is not None else "a single leaf"
        raise MismatchError(
            source.url,
            expected="a training state, with `model` at its root",
            found=keys[:200],
            hint="Save treeckpt.training.state(model, optimizer), or load this with treeckpt.load. Where the model's "
            "state dict is the root, pass under='model'; where it has another name, from_root=True with rename=. "
            + OTHER_NAMES,
        )
    return source
