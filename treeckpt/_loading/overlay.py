"""Loads one tree from several checkpoints; where several have a leaf, the last one's is taken.

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
from .._core.tree.flatten import flatten, unflatten, update_metadata
from .._core.tree.keyed_table import TableColumn
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
from .keyed_tables import ids_beside, no_plain_rows
from .load import compare_containers, load_into_tree, load_tree
from .match import Load, LoadOptions
from .verify import survey

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
        sources: paths, stores or `From`; of a leaf that several of them give, the last one's is taken.
    """

    def __init__(self, sources: Iterable[Any]) -> None:
        self.sources: tuple[From, ...] = tuple(one if isinstance(one, From) else From(one) for one in sources)
        if not self.sources:
            raise TreeckptError("bank", expected="one checkpoint at least", found="none")

    def __repr__(self) -> str:
        return f"Bank({list(self.sources)!r})"

    def opened(self, checkpoints: Sequence[Checkpoint]) -> Bank:
        """Returns the bank with an opened checkpoint as the path of each source."""
        pairs = zip(self.sources, checkpoints, strict=True)
        return Bank(msgspec.structs.replace(source, path=one) for source, one in pairs)


def as_bank(path: Any) -> Bank | None:
    """Returns the bank for a path or a list; None for a single checkpoint."""
    if isinstance(path, (From, list, tuple)):
        several: Any = [path] if isinstance(path, From) else path
        return Bank(several)
    return path if isinstance(path, Bank) else None


class _Part(msgspec.Struct):
    """One checkpoint, and what it provides."""

    options: LoadOptions
    job: Load
    """A load that finds leaves and reads none."""
    wins: set[str] = set()
    """The paths that it gives."""
    joined: dict[str, Load] = {}
    """As `LoadOptions` has it."""


class BankMember(Protocol):
    """One checkpoint of a bank, seen through its own rules and globs."""

    options: LoadOptions
    view: View

    @property
    def names(self) -> frozenset[str]:
        """Of all its leaves, selected or not, after its rules."""
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
    return [
        _Part(msgspec.structs.replace(options, rules=job.options.rules, strict=False), job, wins)
        for job, wins in members
    ]


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
    given = sorted(set[str]().union(*(part.wins for part in parts)))
    found = compare_leaves(wanted, given, whole=whole, selects=options.selects)
    missing: list[str] = []
    for path in found.missing:
        leaf = wanted[path]
        if any(p.job.view.is_kept(path) for p in parts):
            continue
        if type(leaf) is TableColumn and leaf.name in leaf.view.table.fill:
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
    found = LeafDifferences(missing, found.unexpected, common=found.common or len(missing) < len(found.missing))
    check_same(found, options.strict)
    return found


def _join_tables(parts: Sequence[_Part], asked: Mapping[str, Any] | None) -> None:
    """Joins slots to ids that another checkpoint provides, id by id.

    With `like` the checkpoint that provides the ids of a table loads all of it, and plain arrays, which have no ids,
    are refused; without, each loads its own slots.
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
        if path in asked and asked[path] is not ... and type(asked[path]) is not TableColumn:
            raise no_plain_rows(path, asked[path], giver.job.checkpoint.url)
        giver.wins.discard(path)
        home.joined[path] = giver.job


class _Provided(msgspec.Struct):
    """The checkpoints of a load, each with options that select what it provides."""

    sources: list[tuple[Checkpoint, LoadOptions]]
    differences: LeafDifferences

    def report(self, reports: Sequence[LoadReport]) -> LoadReport:
        """Returns the report of all loads together."""
        return LoadReport(
            path=", ".join(report.path for report in reports),
            nbytes=sum(report.nbytes for report in reports),
            unverified_nbytes=sum(report.unverified_nbytes for report in reports),
            read_nbytes=sum(report.read_nbytes for report in reports),
            loaded=sum(report.loaded for report in reports),
            missing=tuple(self.differences.missing),
            unexpected=tuple(self.differences.unexpected),
            seconds=sum(report.seconds for report in reports),
            dropped=tuple(path for report in reports for path in report.dropped),
            renamed=tuple(pair for report in reports for pair in report.renamed),
            in_parts=tuple(pair for report in reports for pair in report.in_parts),
            unmade=tuple(path for report in reports for path in report.unmade),
            sources=tuple(msgspec.structs.replace(report, unexpected=()) for report in reports),
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
    found = LeafDifferences([], [], common=True)
    if like is not None:
        replaced = [(part, one) for part in parts for one in compare_containers(part.job, like, structure).values()]
        whole = [one.path for part, one in replaced if part.wins.issuperset(one.paths)]
        found = _check_asked(parts, asked, whole, comm, options, in_place=in_place)
    _join_tables(parts, asked if like is not None else None)
    empty: dict[str, _Part] = {}
    for part in parts if like is None else ():
        paths = empty_container_paths(part.job.view.structure)
        empty.update((path, part) for path in paths if part.job.selected(path))
    for path, part in empty.items():
        part.wins.add(path)
    sources = [
        (part.job.checkpoint, msgspec.structs.replace(part.options, only=frozenset(part.wins), joined=part.joined))
        for part in parts
    ]
    return _Provided(sources, found)


def _merged(trees: Sequence[object], comm: Comm, options: LoadOptions) -> object:
    """Merges several trees; `...` where none has a leaf."""
    flat = [flatten(tree, rank=comm.rank, namespace=options.namespace) for tree in trees]
    every = [(index_path(path, comm.rank), leaf) for _, leaves in flat for path, leaf in leaves]
    found = {path: leaf for path, leaf in every if leaf is not ...}
    left_out = frozenset(path for path, leaf in every if leaf is ... and path not in found)
    structure = reduce(partial(merge_sources, left_out=left_out), (structure for structure, _ in flat))
    leaves = iter([found.get(path, ...) for path, _ in paths_of(structure)])
    merged = unflatten(
        structure, leaves, resolve=resolve, build=build_tensor, rank=comm.rank, namespace=options.namespace
    )
    for own, given in flat:
        loaded = {index_path(path, comm.rank): leaf is not ... for path, leaf in given}
        update_metadata(merged, own, loaded, rank=comm.rank, namespace=options.namespace)
    return merged


class CheckpointOverlay(msgspec.Struct, frozen=True):
    """What a load reads: one opened checkpoint, or a bank whose sources are opened checkpoints."""

    source: Checkpoint | Bank

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint that is read from."""
        if isinstance(self.source, Checkpoint):
            return [self.source]
        return [one.path for one in self.source.sources if isinstance(one.path, Checkpoint)]

    def salvaging(self, comm: Comm, options: LoadOptions) -> LoadOptions:
        """Returns the options of a load, with the damaged bytes where `on_corrupt` is "skip".

        A leaf is damaged as a whole, for every rank, whatever part of it a rank wants: otherwise some ranks would
        continue with the saved half of an array and others with their own.

        Raises:
            MismatchError: of several checkpoints.
        """
        if options.fallback.on_corrupt == "error":
            return options
        checkpoints = self.checkpoints
        if len(checkpoints) != 1:
            raise MismatchError(
                "on_corrupt",
                expected="'error', or 'skip' for one checkpoint",
                found=f"'skip' for {len(checkpoints)}",
                hint="Salvage the damaged checkpoint alone, save what came of it, and load the several then",
            )
        # all is compared now: not again before the first byte is written
        read = options.read
        if read.verify == "first":
            read = msgspec.structs.replace(read, verify=True)
        return msgspec.structs.replace(options, bad=survey(checkpoints[0].own(), comm), read=read)

    def load(self, like: object, comm: Comm, options: LoadOptions) -> tuple[object, LoadReport]:
        """Loads a new tree; see `treeckpt.load`."""
        if isinstance(self.source, Checkpoint):
            return load_tree(self.source, like, comm, options)
        if options.ids is not None:
            raise MismatchError(
                "ids",
                expected="one checkpoint, whose tables have the rows",
                found=f"{len(self.source.sources)}",
                hint="Load these rows from their checkpoint alone",
            )
        provided = _provide(self.source, like, comm, options)
        reports: list[LoadReport] = []
        trees: list[object] = []
        for checkpoint, own in provided.sources:
            tree, report = load_tree(checkpoint, trees[-1] if trees and like is not None else like, comm, own)
            trees.append(tree)
            reports.append(report)
        return _merged(trees, comm, options) if like is None else trees[-1], provided.report(reports)

    def load_into(self, tree: object, comm: Comm, options: LoadOptions) -> LoadReport:
        """Fills a tree in place; see `treeckpt.load_into`."""
        if isinstance(self.source, Checkpoint):
            [report] = load_into_tree([(self.source, options)], tree, comm)
            return report
        provided = _provide(self.source, tree, comm, options, in_place=True)
        return provided.report(load_into_tree(provided.sources, tree, comm))
