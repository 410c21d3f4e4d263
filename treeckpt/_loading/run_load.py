"""Carries out the calls that read checkpoints, each on one whole version that another process may overwrite meanwhile.

`on_versions` opens a version of each checkpoint, and does all again if one was replaced. On it `run_load` and
`run_load_into` load a tree, with objects that have a state; `inspect`, `exists`, `read_file`, `verify` and
`rebuild_index` are the public functions that load none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
from optree import PyTreeSpec

from .._arrays.registry import in_parts_if_needed
from .._arrays.stateful import expand_states, state_tree
from .._core.format.index import INDEX_NAME
from .._core.format.records import Index
from .._core.tree.flatten import flatten, replace_leaves
from .._core.tree.treespec import LEAF, tree_of
from .._io.comm.comm import Comm
from .._io.os_errors import shows_damage, wrap_read_error
from .._io.public_calls import gc_paused, takes_no_save
from .._io.storage.checkpoint import Checkpoint, KnownIndex, OnShardsRead, Replaced, read_sidecar, taken_index
from .._io.storage.kept_files import hold_lease
from .._io.storage.local_store import for_reading
from .._io.storage.open import following, open_store
from .._io.storage.store import Store
from ..errors import CheckpointError, MismatchError, StoreError, TreeckptError
from ..reports import LoadReport, VerifyReport
from .disks import LoadingRanks, on_all_disks
from .load import SavedTargets, load_into_tree, load_tree
from .match import LoadOptions
from .overlay import Bank, as_bank, fill_from_bank, load_bank, loads_of
from .repair import repair_store
from .verify import publish_rebuilt, survey, verify_checkpoint

T = TypeVar("T")

TRIES = 20
"""Versions that are tried: a save takes longer than it takes to find out that a version was replaced."""


def open_checkpoint(path: Any, *, joined: bool = False) -> tuple[Store, Callable[[], Checkpoint]]:
    """Returns the store of a path, URL or store, and a function that opens a version of the checkpoint there.

    `joined` is that of `Checkpoint`.

    Files of another program are looked for only where there is no index of ours, and not in a store that is far away,
    where each look takes a request.

    Raises:
        StoreError, CheckpointError: as `open_store`.
    """
    if isinstance(path, Checkpoint):
        return path.store, path.reopened
    store = open_store(path)
    place = store.traits.local_path
    if place is not None:
        is_ours = os.path.exists(place / INDEX_NAME)
    else:
        try:
            is_ours = store.traits.far or store.entry(INDEX_NAME) is not None
        except OSError as error:
            raise wrap_read_error(error, store.url) from error
    if not is_ours:
        # imported here: only where another program wrote the files are these modules needed
        from .._foreign.files import foreign_at
        from .._foreign.foreign_checkpoint import ForeignCheckpoint

        if (found := foreign_at(path)) is not None:
            return found, partial(ForeignCheckpoint, found)
    store = for_reading(store)
    return store, partial(Checkpoint, store, joined=joined)


def on_one_version(
    path: Any,
    act: Callable[[Checkpoint], T],
    *,
    together: bool = False,
    is_suspect: Callable[[T], object] = lambda _: False,
    known: KnownIndex | None = None,
    across: LoadingRanks | None = None,
    joined: bool = True,
) -> T:
    """Does what `on_versions` does, for one checkpoint.

    Raises:
        CheckpointError: as `on_versions`; or the path is a bank.
    """
    if (bank := as_bank(path)) is not None:
        raise CheckpointError("path", expected="one checkpoint", found=f"{bank!r:.200}")
    options = {"known": known, "across": across, "joined": joined}
    return on_versions(path, cast(Any, act), together=together, is_suspect=is_suspect, **options)


def on_versions(
    path: Any,
    act: Callable[[Checkpoint | Bank], T],
    *,
    together: bool = False,
    is_suspect: Callable[[T], object] = lambda _: False,
    known: KnownIndex | None = None,
    across: LoadingRanks | None = None,
    joined: bool = True,
) -> T:
    """Returns what `act` returns for a path, a store or a bank, from one version of each checkpoint.

    Args:
        path: what is opened; an opened checkpoint, or a bank of these, is passed on as it is.
        act: receives the opened checkpoint, or the bank of them; called again if a version was replaced meanwhile.
        together: the ranks read together, and learn together that a version was replaced.
        is_suspect: whether a result may come from a replaced version.
        known: the index of the first checkpoint, just read: decoded again only if the version was replaced.
        across: the ranks that make this call, if they give each other files of their disks; see `joined_disks`.
        joined: as for `Checkpoint`.

    Raises:
        MismatchError: of `act`, with the paths of the checkpoints added, as they were given.
        CheckpointNotFound: a checkpoint was deleted meanwhile.
        CheckpointError: it was replaced again and again.
    """
    bank = as_bank(path)
    given: list[Any] = [path] if bank is None else bank.paths
    if all(isinstance(each, Checkpoint) for each in given):
        return act(given[0] if bank is None else bank)  # who has opened them does all again if one is replaced
    with contextlib.ExitStack() as stack:
        opened: list[tuple[Store, Callable[[], Checkpoint]]] = []
        for each in given:
            opened.append(open_checkpoint(each, joined=joined))
            stack.enter_context(contextlib.closing(opened[-1][0]))
        for _ in range(TRIES):
            checkpoints = [version() for _, version in opened]
            try:
                _take_known(checkpoints[0], known)
                known = None  # another try is there because this version was replaced
                with _joined(checkpoints, across) as found:
                    result = act(found[0] if bank is None else bank.opened(found))
                if not is_suspect(result) or not any(each.is_replaced() for each in checkpoints):
                    return result
            except Replaced:  # all ranks that share their reads have learnt it: they try the next version together
                pass
            except (TreeckptError, OSError) as error:
                # a rank that tried again alone would wait for ranks that do not: together they learn it by Replaced
                if together or not _are_replaced(checkpoints, error):
                    if isinstance(error, OSError):
                        raise wrap_read_error(error, opened[0][0].url) from error
                    if isinstance(error, MismatchError):
                        _name_checkpoints(error, given, [each.url for each in checkpoints])
                    raise
    raise CheckpointError(
        ", ".join(store.url for store, _ in opened),
        expected="a checkpoint that stays for as long as it takes to read it",
        found=f"another save in its place, {TRIES} times",
        hint="Read it when nobody saves there, or save each step at a path of its own",
    )


def _joined(
    checkpoints: Sequence[Checkpoint], across: LoadingRanks | None
) -> contextlib.AbstractContextManager[Sequence[Checkpoint]]:
    """Returns what `on_all_disks` does; the same checkpoints where this rank reads for itself."""
    return contextlib.nullcontext(checkpoints) if across is None else on_all_disks(checkpoints, across)


def _take_known(checkpoint: Checkpoint, known: KnownIndex | None) -> None:
    """Has a checkpoint take an index that has just been read, if it still is its own."""
    if known is None:
        return
    if checkpoint.store.traits.far:  # it takes a round trip to read it again
        checkpoint.index_bytes = known.data
    if checkpoint.index_bytes == known.data:
        checkpoint.take_index(known.index)


def _are_replaced(checkpoints: Sequence[Checkpoint], error: Exception) -> bool:
    """Whether another save has replaced a version since it was read, of which an error came.

    Raises:
        StoreError: that could not be read. Without it an error that shows damage may be none of the checkpoint.
    """
    try:
        return any(one.is_replaced() for one in checkpoints)
    except StoreError:
        if shows_damage(error):
            raise
        return False


def _name_checkpoints(error: MismatchError, given: Sequence[Any], urls: Sequence[str]) -> None:
    """Adds the paths of the checkpoints to an error, as they were given, unless it names one."""
    if not any(url in str(error) for url in urls):
        pairs = zip(given, urls, strict=True)
        names = (str(one) if isinstance(one, (str, os.PathLike)) else url for one, url in pairs)
        error.add_hint(f"Checkpoint: {', '.join(names)}")


def run_load(path: Any, like: Any, comm: Comm, options: LoadOptions) -> tuple[Any, LoadReport]:
    """Loads a new tree; see `treeckpt.load`."""

    def load_version(source: Checkpoint | Bank) -> tuple[Any, LoadReport]:
        own, target = _salvaging(source, comm, options), like
        if (treespec := like if type(like) is PyTreeSpec else None) is not None:
            own = msgspec.structs.replace(own, namespace=own.namespace or treespec.namespace)
            tree = state_tree(tree_of(treespec), rank=comm.rank, namespace=own.namespace, layouts=False)
            target = SavedTargets(loads_of(source, comm, own)).fill(tree, comm.rank, own.namespace)

        def run(layouts: bool) -> tuple[Any, LoadReport]:
            wanted = target
            if target is not None:
                wanted = state_tree(
                    target,
                    rank=comm.rank,
                    namespace=own.namespace,
                    mappings=not options.allow_pickle,
                    layouts=layouts,
                )
            loaded, report = _load(source, wanted, comm, own)
            if treespec is not None and report.missing:
                leaves = flatten(loaded, rank=comm.rank, namespace=own.namespace)[1]
                found = (... if leaf is LEAF else leaf for _, leaf in leaves)
                loaded = replace_leaves(loaded, found, namespace=own.namespace)
            return loaded, report

        with gc_paused():
            # with shared reads a rank that begins again alone would leave the others waiting
            return in_parts_if_needed(run, always=bool(options.read.once) or options.partial is not None)

    once = bool(options.read.once)
    return on_versions(
        path,
        load_version,
        together=once or options.partial is not None,
        is_suspect=lambda result: result[1].damaged,
        across=LoadingRanks(comm) if once else None,
    )


def _load(source: Checkpoint | Bank, like: Any, comm: Comm, options: LoadOptions) -> tuple[Any, LoadReport]:
    if isinstance(source, Checkpoint):
        return load_tree(source, like, comm, options)
    return load_bank(source, like, comm, options)


def _salvaging(source: Checkpoint | Bank, comm: Comm, options: LoadOptions) -> LoadOptions:
    """Returns the options of a load, with the damaged bytes where `on_corrupt` is "skip".

    A leaf is damaged as a whole, for every rank, whatever part of it a rank wants: otherwise some ranks would continue
    with the saved half of an array and others with their own.

    Raises:
        MismatchError: of several checkpoints.
    """
    if options.fallback.on_corrupt == "error":
        return options
    [checkpoint, *others] = [source] if isinstance(source, Checkpoint) else source.paths
    if others:
        raise MismatchError(
            "on_corrupt",
            expected="'error', or 'skip' for one checkpoint",
            found=f"'skip' for {1 + len(others)}",
            hint="Salvage the damaged checkpoint alone, save what came of it, and load the several then",
        )
    # all is compared now: not again before the first byte is written
    read = options.read
    if read.verify == "first":
        read = msgspec.structs.replace(read, verify=True)
    return msgspec.structs.replace(options, bad=survey(checkpoint.own(), comm), read=read)


_BYTES = "nbytes", "read_nbytes", "unverified_nbytes"
"""What a report counts of each read."""


def run_load_into(path: Any, tree: Any, comm: Comm, options: LoadOptions) -> LoadReport:
    """Fills a tree in place; see `treeckpt.load_into`."""
    if type(tree) is PyTreeSpec:
        raise MismatchError(
            "tree",
            expected="a tree with arrays to fill",
            found="an optree.PyTreeSpec, which has none",
            hint="treeckpt.load takes it as like",
        )
    once = bool(options.read.once)
    return on_versions(
        path,
        lambda source: fill_tree(source, tree, comm, options),
        together=once or options.partial is not None,
        is_suspect=lambda report: report.damaged,
        across=LoadingRanks(comm) if once else None,
    )


def fill_tree(source: Checkpoint | Bank, tree: Any, comm: Comm, options: LoadOptions) -> LoadReport:
    """Fills a tree in place from an open checkpoint, or several; objects and tensors in parts as `load_into` does."""
    options = _salvaging(source, comm, options)

    def fill_all(target: Any) -> LoadReport:
        if isinstance(source, Checkpoint):
            [report] = load_into_tree([(source, options)], target, comm)
            return report
        return fill_from_bank(source, target, comm, options)

    def fill(layouts: bool) -> Any:
        mappings = not options.allow_pickle
        expanded = expand_states(tree, rank=comm.rank, namespace=options.namespace, mappings=mappings, layouts=layouts)
        if expanded is None:
            return fill_all(tree)
        before: list[LoadReport] = []

        def as_saved(path: str, *, arrays: bool) -> Any:
            # an object asks for what it needs, on whichever ranks have it: no rank may wait for others here
            read = msgspec.structs.replace(options.read, copy=False, once=False)
            own = msgspec.structs.replace(
                options, below=path, strict=False, partial=None, read=read, specs_only=not arrays
            )
            saved, report = _load(source, None, comm, own)
            before.append(report)
            return saved

        report, more = expanded.restore(as_saved, fill_all)
        read = {name: sum(getattr(one, name) for one in (report, *before)) for name in _BYTES}
        return msgspec.structs.replace(report, loaded=report.loaded + more, **read)

    with gc_paused():
        return in_parts_if_needed(fill, always=bool(options.read.once) or options.partial is not None)


CheckpointPath = str | os.PathLike[str] | Store | Checkpoint


@contextlib.contextmanager
def opened(path: CheckpointPath) -> Iterator[Checkpoint]:
    """Opens a checkpoint; what reading has opened is closed at the end."""
    if isinstance(path, Checkpoint):
        yield path
        return
    store, version = open_checkpoint(path)
    try:
        yield version()
    except OSError as error:
        raise wrap_read_error(error, store.url) from error
    finally:
        store.close()


@takes_no_save
def inspect(path: CheckpointPath, *, follow_links: bool = False) -> Index:
    """The index of a checkpoint: its tree, every leaf's spec and place, without reading any array.

    >>> [leaf.path for leaf in tc.inspect("run/step_00000100").entries]
    ['model/weight', 'model/bias', 'step']

    Args:
        follow_links: reads files that are links out of the run.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: the state of the files.
    """
    with opened(following(path, follow_links)) as checkpoint:
        return checkpoint.index


@takes_no_save
def exists(path: str | os.PathLike[str] | Store, *, follow_links: bool = False) -> bool:
    """Whether a committed checkpoint of treeckpt is at a path, URL or store: its index is there; nothing is read.

    >>> tc.exists("run/step_00000100"), tc.exists("run/step_00000999")
    (True, False)

    It is False for a save that has not ended or never finished, for a run, and for files of other programs. `verify`
    says whether a checkpoint is intact.

    Args:
        follow_links: same as for `inspect`.

    Raises:
        StoreError: it could not be looked at, or an object store cannot be reached, or refuses.
    """
    store = open_store(following(path, follow_links))
    try:
        if (index := store.entry(INDEX_NAME)) is not None:
            return index.regular
        return taken_index(store, store.entries()) is not None
    except OSError as error:
        raise wrap_read_error(error, store.url) from error


@takes_no_save
def read_file(path: CheckpointPath, name: str, *, follow_links: bool = False) -> bytes:
    """The content of a file that was saved with `files=`, verified; `inspect(path).sidecars` lists all.

    >>> report = tc.save("run/step_00000200", {}, files={"config.json": b"{}"})
    >>> tc.read_file("run/step_00000200", "config.json")
    b'{}'

    Args:
        follow_links: same as for `inspect`.

    Raises:
        MismatchError: there is none of that name.
        CheckpointNotFound, CorruptError, FormatError: the state of the files.
    """
    return on_one_version(
        following(path, follow_links), lambda checkpoint: read_sidecar(checkpoint.store, checkpoint.index, name)
    )


@takes_no_save
def verify(path: CheckpointPath, *, repair: bool = False, follow_links: bool = False) -> VerifyReport:
    """Reads everything and compares it with its checksums, and the shards with the index.

    >>> tc.verify("run/step_00000100").ok
    True

    Args:
        repair: makes again what can be: the index from the shards' headers, a header from the index where its seal
            proves it, a shard with something behind its end. Timings that are damaged are taken away. What was there is
            kept as `<name>.<id>.damaged`. The report says what was done, and what is lost. Nothing else may be saving
            there. A link is replaced, never written through.
        follow_links: same as for `inspect`.

    Returns:
        The report. What could not be read this time is no fault: it stands in `unread`, and another call may read it.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: there is no index, or it is damaged.
        StoreError: the index or a listing could not be read, or an object store cannot be reached, or refuses.
    """
    path = following(path, follow_links)
    if not repair:
        return on_one_version(path, verify_checkpoint, is_suspect=lambda report: report.problems, joined=False)
    with opened(path) as checkpoint:
        store = checkpoint.own().store
        with hold_lease(store):  # so that deletions ask what the checkpoint shares, and leave what is copied
            return repair_store(store)


@takes_no_save
def rebuild_index(path: CheckpointPath, *, replace: bool = False, on_read: OnShardsRead | None = None) -> Index:
    """Makes a lost index.json again from the shards alone, and publishes it.

    >>> tc.rebuild_index("run/step_00000100", replace=True).world
    1

    Args:
        replace: also where there is an index.
        on_read: takes how many shards were read, and of how many, from any thread.

    Raises:
        CheckpointExists: there is one, and `replace` is not given.
        CheckpointNotFound, CorruptError: the shards are not all there, or not intact.
    """
    with opened(path) as checkpoint:
        store = checkpoint.own().store
        with hold_lease(store):
            return publish_rebuilt(store, replace=replace, on_read=on_read)
