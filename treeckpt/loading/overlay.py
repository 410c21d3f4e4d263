"""Loads one tree from several checkpoints; where several have a leaf, the last one's is taken.

Each checkpoint is seen through its own rules and globs. Which checkpoint provides which leaf is decided first, from the
indexes alone; then each is loaded as if it had nothing else, so no byte is read that another one replaces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeVar

import msgspec

from ..arrays.registry import abstract_of, resolve
from ..core.tree.flatten import flatten, unflatten
from ..core.tree.keyed_table import Column
from ..core.tree.merge import merge
from ..core.tree.structure import index_path, paths_of
from ..errors import CheckpointNotFound, TreeckptError
from ..io.comm.comm import Comm, global_rank
from ..io.storage.checkpoint import Checkpoint
from ..io.storage.store import Store
from ..reports import LoadReport
from .aliasing import tied_to
from .join_slots import ids_beside, no_plain_rows
from .load import load_into_tree, load_tree, sequences_of
from .match import Load, LoadOptions, check_same
from .transforms import Renaming, Transforms, as_rules
from .transforms.rules import Rule

__all__ = ["Bank", "CheckpointOverlay", "From", "as_bank", "globs_of", "members_of", "refuse_rules"]

T = TypeVar("T")


class From(msgspec.Struct, frozen=True):
    """One checkpoint of a bank.

    Args:
        path: as for `treeckpt.load`.
        select, exclude: globs over the paths that it gives, by the names after its rules.
        rename, transforms: rules for it alone, as for `treeckpt.load`.
        optional: it may be missing, and then gives nothing.
    """

    path: str | os.PathLike[str] | Store | Checkpoint
    select: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    rename: Renaming = None
    transforms: Transforms = None
    optional: bool = False


class Bank:
    """Several checkpoints as one: `tc.load(tc.Bank(["base", tc.From("tuned", select="model/head")]), like)`.

    Args:
        sources: paths, stores or `From`; of a leaf that several of them give, the last one's is taken.
    """

    def __init__(self, sources: Iterable[Any]) -> None:
        self.sources: tuple[From, ...] = tuple(one if isinstance(one, From) else From(one) for one in sources)
        if not self.sources:
            raise TreeckptError("bank", expected="one checkpoint at least", found="none")

    def __repr__(self) -> str:
        return f"Bank({list(self.sources)!r})"


def as_bank(path: Any) -> Bank | None:
    """Returns the bank for a path or a list; None for a single checkpoint."""
    if isinstance(path, Bank):
        return path
    if isinstance(path, From):
        return Bank([path])
    several: Any = path if isinstance(path, (list, tuple)) else None
    return None if several is None else Bank(several)


class _Part(msgspec.Struct):
    """One checkpoint, and what it provides."""

    options: LoadOptions
    job: Load
    """A load that finds leaves and reads none."""
    wins: set[str]
    joined: dict[str, Load]
    """As `LoadOptions` has it."""


def members_of(bank: Bank, look: Callable[[From], T]) -> list[T]:
    """Applies a function to each source of a bank, and leaves out optional sources whose checkpoint is missing.

    Raises:
        CheckpointNotFound: one is missing that is not optional, or all are.
    """
    found: list[T] = []
    for source in bank.sources:
        try:
            found.append(look(source))
        except CheckpointNotFound:
            if not source.optional:
                raise
    if not found:
        where = ", ".join(str(getattr(source.path, "url", source.path)) for source in bank.sources)
        raise CheckpointNotFound(where, expected="one checkpoint at least", found="none")
    return found


def refuse_rules(rules: Sequence[Rule]) -> None:
    """Refuses rules for all checkpoints of a bank."""
    if rules:
        raise TreeckptError(
            "transforms",
            expected="rules on each checkpoint of a bank",
            found="rules for all",
            hint="Give them to tc.From",
        )


def _asked(like: Any, comm: Comm, options: LoadOptions) -> dict[str, Any]:
    """Returns the leaves of like, by path as in a checkpoint."""
    _, leaves = flatten(like, rank=comm.rank, namespace=options.namespace)
    return {index_path(path, comm.rank): leaf for path, leaf in leaves}


def _settled(bank: Bank, asked: Mapping[str, Any], comm: Comm, options: LoadOptions) -> list[_Part]:
    """Decides from the indexes which checkpoint provides which leaf.

    Raises:
        CheckpointNotFound: one is missing that is not optional.
        MismatchError: a glob matches nothing, under `strict`.
    """
    refuse_rules(options.rules)

    def look(source: From) -> _Part:
        assert isinstance(source.path, Checkpoint), "the bank is opened"
        rules = as_rules(source.rename, source.transforms)
        own = msgspec.structs.replace(
            options, select=globs_of(source.select), exclude=globs_of(source.exclude), rules=rules
        )
        return _Part(
            msgspec.structs.replace(options, rules=rules, strict=False), Load(source.path, comm, own), set(), {}
        )

    parts = members_of(bank, look)

    def names() -> frozenset[str]:
        return frozenset(asked).union(*(part.job.view.names for part in parts))

    for part in parts:
        part.job.options.check_used(lambda part=part: part.job.view.names, names)
    options.check_used(names)
    winner: dict[str, _Part] = {}
    for part in parts:
        winner.update((path, part) for path in part.job.view.by_path if part.job.selected(path))
    for path, part in winner.items():
        part.wins.add(path)
    return parts


def globs_of(select: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns globs as a tuple."""
    if select is None:
        return None
    return (select,) if isinstance(select, str) else tuple(select)


def _check_asked(
    parts: Sequence[_Part],
    like: Any,
    wanted: Mapping[str, Any],
    comm: Comm,
    options: LoadOptions,
    *,
    in_place: bool = False,
) -> tuple[list[str], list[str]]:
    """Returns the wanted paths that no checkpoint provides, and the provided paths that are not wanted.

    Args:
        wanted: the leaves of like, by path.
        in_place: a leaf that is one array with a filled leaf is filled too.

    Raises:
        MismatchError: there are such paths, under `strict`.
    """
    here = global_rank(comm)
    given = set[str]().union(*(part.wins for part in parts))
    missing: list[str] = []
    structure, _ = flatten(like, rank=comm.rank, namespace=options.namespace)
    taken = [
        one for p in parts for one in sequences_of(p.job, like, structure).values() if p.wins.issuperset(one.paths)
    ]
    given_whole = tuple(f"{one.path}/" if one.path else "" for one in taken)
    for path, leaf in wanted.items():
        if (
            leaf is ...
            or path.startswith(given_whole)
            or path in given
            or not options.selects(path)
            or any(p.job.view.is_kept(path) for p in parts)
        ):
            continue
        if type(leaf) is Column and leaf.name in leaf.view.table.fill:
            continue
        spec = abstract_of(leaf, path, here)
        filler = next((part for part in reversed(parts) if part.job.view.filled(path, spec) is not None), None)
        if filler is None:
            missing.append(path)
        else:
            filler.wins.add(path)
    if missing and in_place:
        filled = [(path, leaf) for part in parts for path in part.wins if (leaf := wanted.get(path)) is not None]
        tied = tied_to([(path, wanted[path]) for path in missing], filled, here, in_place=True)
        missing = [path for path in missing if path not in tied]
    below = (*given_whole, *(f"{path}/" if path else "" for path, leaf in wanted.items() if leaf is ...))
    extra = [p for p in given if p not in wanted and options.selects(p) and not p.startswith(below)]
    if options.strict:
        check_same(missing, sorted(extra))
    return missing, sorted(extra)


def _options(part: _Part) -> LoadOptions:
    return msgspec.structs.replace(part.options, only=frozenset(part.wins), joined=part.joined)


def _join_tables(parts: Sequence[_Part], asked: Mapping[str, Any] | None) -> None:
    """Joins slots to ids that another checkpoint provides, id by id.

    With `like` the checkpoint that provides the ids of a table loads all of it; without, each loads its own slots.

    Raises:
        MismatchError: `like` wants plain arrays, which have no ids.
    """
    givers = {path: part for part in parts for path in part.wins}
    for path, giver in givers.items():
        ids = ids_beside(path)
        home = givers.get(ids) if ids is not None else None
        if ids is None or home is None or home is giver:
            continue
        if home.job.view.by_path[ids][0].number not in home.job.index.tables:
            continue
        if asked is None:
            giver.joined[ids] = home.job
            continue
        if path in asked and asked[path] is not ... and type(asked[path]) is not Column:
            raise no_plain_rows(path, asked[path], giver.job.checkpoint.url)
        giver.wins.discard(path)
        home.joined[path] = giver.job


def _load_bank(bank: Bank, like: object, comm: Comm, options: LoadOptions) -> tuple[object, LoadReport]:
    asked = {} if like is None else _asked(like, comm, options)
    parts = _settled(bank, asked, comm, options)
    reports: list[LoadReport] = []
    if like is None:
        _join_tables(parts, None)
        trees: list[object] = []
        for part in parts:
            tree, report = load_tree(part.job.checkpoint, None, comm, _options(part))
            trees.append(tree)
            reports.append(report)
        return _merged(trees, comm, options), _joined(reports, [], [])
    missing, unexpected = _check_asked(parts, like, asked, comm, options)
    _join_tables(parts, asked)
    for part in parts:
        like, report = load_tree(part.job.checkpoint, like, comm, _options(part))
        reports.append(report)
    return like, _joined(reports, missing, unexpected)


def _merged(trees: Sequence[object], comm: Comm, options: LoadOptions) -> object:
    """Merges several trees; `...` where none has a leaf."""
    flat = [flatten(tree, rank=comm.rank, namespace=options.namespace) for tree in trees]
    structure = reduce(merge, (structure for structure, _ in flat))
    found = {index_path(path, comm.rank): leaf for _, leaves in flat for path, leaf in leaves if leaf is not ...}
    leaves = iter([found.get(path, ...) for path, _ in paths_of(structure)])
    return unflatten(structure, leaves, resolve=resolve, rank=comm.rank, namespace=options.namespace)


def _load_bank_into(bank: Bank, tree: object, comm: Comm, options: LoadOptions) -> LoadReport:
    asked = _asked(tree, comm, options)
    parts = _settled(bank, asked, comm, options)
    missing, unexpected = _check_asked(parts, tree, asked, comm, options, in_place=True)
    _join_tables(parts, asked)
    reports = load_into_tree([(part.job.checkpoint, _options(part)) for part in parts], tree, comm)
    return _joined(reports, missing, unexpected)


class CheckpointOverlay(msgspec.Struct, frozen=True):
    """What a load reads: one opened checkpoint, or a bank whose sources are opened checkpoints."""

    source: Checkpoint | Bank

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint that is read from."""
        if isinstance(self.source, Checkpoint):
            return [self.source]
        return [one.path for one in self.source.sources if isinstance(one.path, Checkpoint)]

    def load(self, like: object, comm: Comm, options: LoadOptions) -> tuple[object, LoadReport]:
        """Loads a new tree; see `treeckpt.load`."""
        if isinstance(self.source, Bank):
            return _load_bank(self.source, like, comm, options)
        return load_tree(self.source, like, comm, options)

    def load_into(self, tree: object, comm: Comm, options: LoadOptions) -> LoadReport:
        """Fills a tree in place; see `treeckpt.load_into`."""
        if isinstance(self.source, Bank):
            return _load_bank_into(self.source, tree, comm, options)
        [report] = load_into_tree([(self.source, options)], tree, comm)
        return report


def _joined(reports: Sequence[LoadReport], missing: Sequence[str], unexpected: Sequence[str]) -> LoadReport:
    return LoadReport(
        path=", ".join(report.path for report in reports),
        nbytes=sum(report.nbytes for report in reports),
        read_nbytes=sum(report.read_nbytes for report in reports),
        loaded=sum(report.loaded for report in reports),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        seconds=sum(report.seconds for report in reports),
        dropped=tuple(path for report in reports for path in report.dropped),
        renamed=tuple(pair for report in reports for pair in report.renamed),
        sources=tuple(msgspec.structs.replace(report, unexpected=()) for report in reports),
    )
