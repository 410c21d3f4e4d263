"""Loads one tree from several checkpoints; where several have a leaf, the last one's is taken.

Rows of a keyed table are joined by id: where several give ids of it, the table has those of all of them.

Each checkpoint is seen through its own rules and globs. Which checkpoint provides which leaf is decided first, from the
indexes alone; then each is loaded as if it had nothing else, so no byte is read that another one replaces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Protocol, TypeVar

import msgspec

from .._arrays.registry import abstract_of, build_tensor, resolve
from .._core.format.records import Index
from .._core.tree.flatten import flatten, unflatten, update_metadata
from .._core.tree.keyed_table import TableColumn, table_path
from .._core.tree.leaf_differences import LeafDifferences, check_same, compare_leaves
from .._core.tree.merge import merge_sources
from .._core.tree.paths import Selection, globs_of
from .._core.tree.structure import empty_container_paths, index_path, paths_of
from .._io.comm.comm import Comm, global_rank
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.store import Store
from ..errors import CheckpointNotFound, MismatchError, TreeckptError
from ..reports import LoadReport
from ..rules import Renaming, Transforms, as_rules
from ..rules._rules import Rule
from ..rules._view import View
from .aliasing import tied_to
from .keyed_tables import RowGivers, ids_beside, no_plain_rows
from .load import compare_containers, load_into_tree, load_tree
from .match import Load, LoadOptions

M = TypeVar("M", bound="BankMember")


class From(msgspec.Struct, frozen=True):
    """One checkpoint of a bank.

    >>> tc.load([tc.From("run/step_00000100", select="step"), tc.From("gone", optional=True)])["step"]
    100

    Args:
        path: as for `treeckpt.load`.
        select, exclude: globs over the paths that it gives, by the names after its rules; or a path as keys, as those
            of `treeckpt.path_keys` or an accessor of optree. A tuple of texts alone holds globs; in a list each tuple
            is a path: `("opt", 0)`, `[("opt", "w")]`.
        rename, transforms: rules for it alone, as for `treeckpt.load`.
        optional: it may be missing, and then gives nothing.
    """

    path: str | os.PathLike[str] | Store | Checkpoint
    select: Selection = None
    exclude: Selection = None
    rename: Renaming = None
    transforms: Transforms = None
    optional: bool = False


class Bank:
    """Several checkpoints as one: `tc.load(tc.Bank(["base", tc.From("tuned", select="model/head")]), like)`.

    >>> tc.load(tc.Bank(["run/step_00000100", tc.From("gone", optional=True)]), select="step")["step"]
    100

    Args:
        sources: paths, stores or `From`; of a leaf that several of them give, the last one's is taken. Of a keyed table
            that several give, the rows are joined by id, and `LoadReport.joined` says how many each gave.
    """

    def __init__(self, sources: Iterable[Any]) -> None:
        self.sources: tuple[From, ...] = tuple(
            source if isinstance(source, From) else From(source) for source in sources
        )
        if not self.sources:
            raise TreeckptError("bank", expected="one checkpoint at least", found="none")

    def __repr__(self) -> str:
        return f"Bank({list(self.sources)!r})"

    @property
    def paths(self) -> list[Any]:
        """The path of each source, or its checkpoint where it is opened."""
        return [source.path for source in self.sources]

    def opened(self, checkpoints: Sequence[Any]) -> Bank:
        """Returns the bank with opened checkpoints, or stores, as the paths of its sources."""
        pairs = zip(self.sources, checkpoints, strict=True)
        return Bank(msgspec.structs.replace(source, path=path) for source, path in pairs)


def as_bank(path: Any) -> Bank | None:
    """Returns the bank for a path or a list; None for a single checkpoint."""
    if isinstance(path, (From, list, tuple)):
        several: Any = [path] if isinstance(path, From) else path
        return Bank(several)
    return path if isinstance(path, Bank) else None


class _Part(msgspec.Struct):
    """One checkpoint, and what it provides."""

    job: Load
    """A load that finds leaves and reads none."""
    wins: set[str] = set()
    """The paths that it gives."""
    joined: dict[str, Load] = {}
    """Columns of tables that another checkpoint gives, as `LoadOptions.joined` has them."""
    rows: dict[str, RowGivers] = {}
    """The checkpoints that give rows of a table, as `LoadOptions.rows` has them."""


class BankMember(Protocol):
    """One checkpoint of a bank, seen through its own rules and globs."""

    options: LoadOptions
    index: Index

    @property
    def view(self) -> Index | View:
        """The leaves of the checkpoint, after its rules."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """The names of all leaves of the checkpoint, selected or not, after its rules."""
        ...

    def selected(self, path: str) -> bool:
        """Whether it may give a leaf of its view."""
        ...


def open_members(
    bank: Bank,
    rules: Sequence[Rule],
    look: Callable[[From], M],
    asked: Iterable[str] = (),
    unit: Callable[[str], str] = str,
) -> list[tuple[M, set[str]]]:
    """Returns the checkpoints of a bank, each with the paths that it gives: of those that several have, the last does.

    Optional sources whose checkpoint is missing are left out.

    Args:
        rules: for all of them, which are refused.
        look: opens the checkpoint of a source.
        asked: paths that globs may name too.
        unit: returns the path of what one checkpoint gives as a whole, by the path of a leaf in it.

    Raises:
        CheckpointNotFound: one is missing that is not optional, or all are.
        MismatchError: a glob that means nothing.
    """
    if rules:
        raise TreeckptError(
            "transforms",
            expected="rules on each checkpoint of a bank",
            found="rules for all",
            hint="Give them to tc.From",
        )
    members: list[M] = []
    for source in bank.sources:
        try:
            members.append(look(source))
        except CheckpointNotFound:
            if not source.optional:
                raise
    if not members:
        where = ", ".join(str(getattr(source.path, "url", source.path)) for source in bank.sources)
        raise CheckpointNotFound(where, expected="one checkpoint at least", found="none")

    def names() -> frozenset[str]:
        return frozenset(asked).union(*(member.names for member in members))

    for member in members:
        member.options.check_used(lambda member=member: member.names, names)
    given = [[path for path in member.view.by_path if member.selected(path)] for member in members]
    winner = {unit(path): number for number, paths in enumerate(given) for path in paths}
    return [
        (member, {path for path in paths if winner[unit(path)] == number})
        for number, (member, paths) in enumerate(zip(members, given, strict=True))
    ]


def own_globs(source: From, options: LoadOptions) -> LoadOptions:
    """Returns the options of a load with the globs of one source of a bank."""
    return msgspec.structs.replace(options, select=globs_of(source.select), exclude=globs_of(source.exclude, "exclude"))


def _select_parts(bank: Bank, asked: Collection[str], comm: Comm, options: LoadOptions) -> list[_Part]:
    """Returns the checkpoints of a bank, and which of their leaves are taken.

    Args:
        asked: the paths of like.
    """

    def look(source: From) -> Load:
        assert isinstance(source.path, Checkpoint), "the bank is opened"
        rules = as_rules(source.rename, source.transforms)
        return Load(source.path, comm, msgspec.structs.replace(own_globs(source, options), rules=rules))

    members = open_members(bank, options.rules, look, asked)
    options.check_used(lambda: frozenset(asked).union(*(job.names for job, _ in members)))
    return [_Part(job, wins) for job, wins in members]


def loads_of(source: Checkpoint | Bank, comm: Comm, options: LoadOptions) -> list[Load]:
    """Returns a load of each checkpoint, of which nothing is read."""
    if isinstance(source, Checkpoint):
        return [Load(source, comm, options)]
    return [part.job for part in _select_parts(source, (), comm, msgspec.structs.replace(options, strict=False))]


def _check_asked(
    parts: Sequence[_Part],
    wanted: Mapping[str, Any],
    whole: Collection[str],
    comm: Comm,
    options: LoadOptions,
    *,
    in_place: bool,
) -> LeafDifferences:
    """Returns the wanted paths that no checkpoint provides, and the provided ones not wanted; refused by `strict`.

    Args:
        wanted: the leaves of like, by path.
        whole: the paths of sequences that are replaced as a whole.
        in_place: a leaf that is one array with a filled leaf is filled too.
    """
    here = global_rank(comm)
    given = sorted({path for part in parts for path in part.wins if not part.job.is_of_others(path)})
    differences = compare_leaves(wanted, given, whole=whole, selects=options.selects)
    missing: list[str] = []
    for path in differences.missing:
        leaf = wanted[path]
        if any(part.job.is_kept(path) for part in parts):
            continue
        if type(leaf) is TableColumn and leaf.name in leaf.view.table.fill:
            continue
        spec = abstract_of(leaf, path, here)
        # of rules too the last one's counts
        filler = next((part for part in reversed(parts) if part.job.filled(path, spec) is not None), None)
        if filler is None:
            missing.append(path)
        else:
            filler.wins.add(path)
    if missing and in_place:
        filled = [(path, leaf) for part in parts for path in part.wins if (leaf := wanted.get(path)) is not None]
        tied = tied_to([(path, wanted[path]) for path in missing], filled, here, in_place=True)
        missing = [path for path in missing if path not in tied]
    differences = LeafDifferences(
        missing, differences.unexpected, common=differences.common or len(missing) < len(differences.missing)
    )
    check_same(differences, options.own_strict)
    return differences


def _join_tables(parts: Sequence[_Part], asked: Mapping[str, Any] | None) -> None:
    """Joins rows that several checkpoints provide, and slots to ids that another one provides, id by id.

    With `like` the checkpoint that provides the ids of a table loads all of it, and plain arrays, which have no ids,
    are refused; without, each loads its own slots.
    """
    givers = {path: part for part in parts for path in part.wins}
    for path, jobs in tables_of_several([part.job for part in parts]).items():
        several = RowGivers(jobs, path)
        if asked is None:
            for given, part in givers.items():
                if path in (given, ids_beside(given)):
                    part.rows[path] = several
        elif asked.get(path, ...) is not ...:
            if type(asked[path]) is not TableColumn:
                raise no_plain_rows(path, asked[path], givers[path].job.checkpoint.url)
            givers[path].rows[path] = several
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
        if path in asked and asked[path] is not ... and type(asked[path]) is not TableColumn:
            raise no_plain_rows(path, asked[path], giver.job.checkpoint.url)
        giver.wins.discard(path)
        home.joined[path] = giver.job


def tables_of_several(members: Sequence[M]) -> dict[str, list[M]]:
    """Returns, by the path of its ids, which checkpoints give rows of a table, of those that several give."""
    found: dict[str, list[M]] = {}
    for member in members:
        for path, leaves in member.view.by_path.items() if member.index.tables else ():
            if leaves[0].number in member.index.tables and member.selected(path):
                found.setdefault(path, []).append(member)
    return {path: several for path, several in found.items() if len(several) > 1}


_SUMMED = ("nbytes", "unverified_nbytes", "read_nbytes", "loaded", "seconds")
"""The numbers of a report of several checkpoints that are the sums of theirs."""
_JOINED = ("dropped", "renamed", "in_parts", "unmade")
"""What such a report lists of each checkpoint, one after the other."""


class _Provided(msgspec.Struct):
    """The checkpoints of a load, each with options that select what it provides."""

    sources: list[tuple[Checkpoint, LoadOptions]]
    differences: LeafDifferences

    def report(self, reports: Sequence[LoadReport]) -> LoadReport:
        """Returns the report of all loads together."""
        total: dict[str, Any] = {name: sum(getattr(report, name) for report in reports) for name in _SUMMED}
        lists: dict[str, Any] = {
            name: tuple(item for report in reports for item in getattr(report, name)) for name in _JOINED
        }
        several = {path: givers for _, options in self.sources for path, givers in options.rows.items()}
        taken = [
            (table_path(path), job.checkpoint.url, count)
            for path, givers in several.items()
            for job, count in zip(givers.jobs, givers.taken, strict=True)
        ]
        return LoadReport(
            path=", ".join(report.path for report in reports),
            joined=tuple(taken),
            missing=tuple(self.differences.missing),
            unexpected=tuple(self.differences.unexpected),
            sources=tuple(msgspec.structs.replace(report, unexpected=()) for report in reports),
            **total,
            **lists,
        )


def _provide(bank: Bank, like: object, comm: Comm, options: LoadOptions, *, in_place: bool = False) -> _Provided:
    """Decides from the indexes what each checkpoint of a bank provides.

    Raises:
        CheckpointNotFound: one is missing that is not optional.
        MismatchError: leaves, rules or globs that do not fit.
    """
    structure, leaves = flatten(like, rank=comm.rank, namespace=options.namespace) if like is not None else (None, [])
    asked = {index_path(path, comm.rank): leaf for path, leaf in leaves}
    parts = _select_parts(bank, asked, comm, options)
    differences = LeafDifferences([], [], common=True)
    if like is not None:
        replaced = [
            (part, sequence) for part in parts for sequence in compare_containers(part.job, like, structure).values()
        ]
        whole = [sequence.path for part, sequence in replaced if part.wins.issuperset(sequence.paths)]
        differences = _check_asked(parts, asked, whole, comm, options, in_place=in_place)
    _join_tables(parts, asked if like is not None else None)
    empty: dict[str, _Part] = {}
    for part in parts if like is None else ():
        paths = empty_container_paths(part.job.view.structure)
        empty.update((path, part) for path in paths if part.job.selected(path))
    for path, part in empty.items():
        part.wins.add(path)
    sources: list[tuple[Checkpoint, LoadOptions]] = []
    for part in parts:
        rules, only = part.job.options.rules, frozenset(part.wins)
        # each lacks what others give: `strict` was applied to all of them together
        given = {"only": only, "joined": part.joined, "rows": part.rows}
        own = msgspec.structs.replace(options, rules=rules, strict=False, partial=None, **given)
        sources.append((part.job.checkpoint, own))
    unexpected = options.not_asked_for(differences.unexpected)
    return _Provided(sources, msgspec.structs.replace(differences, unexpected=unexpected))


def _merged(trees: Sequence[object], comm: Comm, options: LoadOptions) -> object:
    """Merges several trees; `...` where none has a leaf."""
    flat = [flatten(tree, rank=comm.rank, namespace=options.namespace) for tree in trees]
    every = [(index_path(path, comm.rank), leaf) for _, leaves in flat for path, leaf in leaves]
    # of one path only one tree has a leaf: each checkpoint loaded what it provides
    given_by_path = {path: leaf for path, leaf in every if leaf is not ...}
    left_out = frozenset(path for path, leaf in every if leaf is ... and path not in given_by_path)
    structure = reduce(partial(merge_sources, left_out=left_out), (structure for structure, _ in flat))
    leaves = iter([given_by_path.get(path, ...) for path, _ in paths_of(structure)])
    merged = unflatten(
        structure, leaves, resolve=resolve, build=build_tensor, rank=comm.rank, namespace=options.namespace
    )
    for own, given in flat:
        loaded = {index_path(path, comm.rank): leaf is not ... for path, leaf in given}
        update_metadata(merged, own, loaded, rank=comm.rank, namespace=options.namespace)
    return merged


def load_bank(bank: Bank, like: object, comm: Comm, options: LoadOptions) -> tuple[object, LoadReport]:
    """Loads a new tree from a bank of opened checkpoints; see `treeckpt.load`."""
    if options.ids is not None:
        raise MismatchError(
            "ids",
            expected="one checkpoint, whose tables have the rows",
            found=f"{len(bank.sources)}",
            hint="Load these rows from their checkpoint alone",
        )
    provided = _provide(bank, like, comm, options)
    reports: list[LoadReport] = []
    trees: list[object] = []
    for checkpoint, own in provided.sources:
        # with like each fills in its leaves and passes on the others
        tree, report = load_tree(checkpoint, trees[-1] if trees and like is not None else like, comm, own)
        trees.append(tree)
        reports.append(report)
    return _merged(trees, comm, options) if like is None else trees[-1], provided.report(reports)


def fill_from_bank(bank: Bank, tree: object, comm: Comm, options: LoadOptions) -> LoadReport:
    """Fills a tree in place from a bank of opened checkpoints; see `treeckpt.load_into`."""
    provided = _provide(bank, tree, comm, options, in_place=True)
    return provided.report(load_into_tree(provided.sources, tree, comm))
