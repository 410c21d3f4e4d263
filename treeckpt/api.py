"""The public functions: save, save_async, prewarm, load, load_into, inspect, read_file, verify and others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from .arrays.stateful import expand_states, state_tree
from .core.format.file_names import check_step
from .core.format.records import Index
from .core.tree.flatten import flatten, replace_leaves
from .foreign.foreign_checkpoint import open_checkpoint
from .io.comm.comm import Comm, as_comm, global_rank
from .io.gc_pause import gc_paused
from .io.os_errors import wrap_read_error
from .io.storage.checkpoint import Checkpoint
from .io.storage.metadata_files import read_sidecar
from .io.storage.open import open_store
from .io.storage.store import Store
from .loading.consistent_reads import on_one_version, on_versions
from .loading.match import LoadOptions, Strict
from .loading.overlay import Bank, CheckpointOverlay, globs_of
from .loading.read_batch import Verify
from .loading.repair import repair_store
from .loading.transforms import Renaming, Transforms, as_rules
from .loading.verify import publish_rebuilt, verify_checkpoint
from .reports import LoadReport, SaveReport, VerifyReport
from .saving.background import prewarm_tree, save_async_tree
from .saving.future import Pending
from .saving.options import BusyPolicy, SaveOptions, StagingMode, WriterKind, shard_limit
from .saving.save import save_tree
from .saving.sidecar_files import SidecarContent

__all__ = [
    "abstract",
    "inspect",
    "load",
    "load_into",
    "prewarm",
    "read_file",
    "rebuild_index",
    "save",
    "save_async",
    "verify",
]

SavePath = str | os.PathLike[str] | Store
Path = SavePath | Checkpoint
AnyComm = Any  # a Comm, a torch.distributed process group, "alone", or None for the default one


def save(
    path: SavePath,
    tree: object,
    *,
    step: int | None = None,
    comm: AnyComm = None,
    custom_metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, SidecarContent] | None = None,
    overwrite: bool = False,
    verify_replicas: bool = False,
    allow_pickle: bool = False,
    max_shard_bytes: int | None = None,
    namespace: str = "",
) -> SaveReport:
    """Saves a tree; returns when it is durable and committed. Call it on every rank.

    Args:
        path: a directory, created if needed; its name is the checkpoint's. Or a URL (`s3://bucket/run/step_00000100`,
            `gs://`, `az://`, those of fsspec), or a store, as everywhere.
        tree: containers of any depth with arrays and Python values as leaves. Plain arrays and values on several
            ranks are replicas: written once, and compared if small. Mark what each rank has of its own with
            `PerRank`, and pieces of one array with `Sharded`; the pieces of a DTensor are known. An object with
            `state_dict` and `load_state_dict` stands for the result of `state_dict`.
        step: of training, 0 or more, kept in the index.
        comm: which ranks save: a process group of torch.distributed (they talk over its Store, without a collective),
            or a `Comm`; by default the default group, if that is up. "alone" saves in this process without talking.
        custom_metadata: values kept in the index: rank 0's, to which what other ranks give must be equal.
        files: small files that belong to the checkpoint, by plain names, as {"config.json": path or bytes}: up to 1,000
            of 64 MiB each, 256 MiB together; rank 0's, which alone reads paths. `read_file` reads one.
        overwrite: replaces a checkpoint at `path`, which stays valid until the new one is committed.
        verify_replicas: compares all that several ranks hold, not only values, and arrays and pieces of up to 64 KiB.
        allow_pickle: stores values of unknown kinds as pickles; load reads them with `allow_pickle=True` only.
        max_shard_bytes: a rank starts another file after this many bytes of data, 1 or more; None writes one file.
        namespace: of optree's registry of node classes.

    Raises:
        TreeError: a leaf, key or container that cannot be stored, or a file of `files` that cannot be read.
        LayoutError: pieces that do not make up their array.
        CheckpointExists: there is one, and `overwrite` is not given.
        MismatchError: ranks contradict each other.
        RankError: ranks failed or fell silent; raised on every rank.
        StoreError: an object store cannot be reached, or refuses.
    """
    options = SaveOptions(
        step=None if step is None else check_step(step),
        overwrite=overwrite,
        verify_replicas=verify_replicas,
        allow_pickle=allow_pickle,
        max_shard_bytes=shard_limit(max_shard_bytes),
        namespace=namespace,
    )
    return save_tree(open_store(path), tree, as_comm(comm), options, custom_metadata or {}, files=files)


def save_async(
    path: SavePath,
    tree: object,
    *,
    step: int | None = None,
    comm: AnyComm = None,
    custom_metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, SidecarContent] | None = None,
    overwrite: bool = False,
    verify_replicas: bool = False,
    allow_pickle: bool = False,
    max_shard_bytes: int | None = None,
    namespace: str = "",
    staging: StagingMode = "copy",
    writer: WriterKind = "process",
    busy: BusyPolicy = "wait",
    timeout: float | None = None,
) -> Pending:
    """Saves a tree in the background. Call it on every rank.

    It returns when the ranks have agreed and the bytes that this rank writes are copied into memory that is kept for
    the next save; after that the tree may be changed. They are written and committed in the background. An error in the
    call (there is a checkpoint already, ranks contradict each other) is raised here; a later one by `Pending.result`,
    or, if that is not called, by the next save.

    Args:
        staging: "copy" copies before it returns. "lazy" returns at once and copies beside the next forward and
            backward, which must not change the tree: let `training.guard` hold the optimizer's step until it is
            copied, or call `Pending.wait_staged` before anything changes. It saves time where a step's forward and
            backward take longer than the copy and leave memory bandwidth free, as on a GPU; on a CPU that trains on
            all its cores it only moves the time.
        writer: "process" writes from a process of its own, started once and kept, so that the training's interpreter
            is not slowed down; "thread" from this one. A store in this process's memory is written by the thread.
        busy: what to do where an earlier save is still under way on any rank: "wait" for it; "skip" this one; or raise
            an "error".
        timeout: seconds to wait for another rank, for the writer to write some more, and for an earlier save; by
            default the comm's, and for as long as an earlier save takes. More than 0.

    See `save` for the other arguments and errors.

    Raises:
        CheckpointError: an earlier background save failed, and its result was not requested; or one is still running,
            and `busy` is "error".
    """
    options = SaveOptions(
        step=None if step is None else check_step(step),
        overwrite=overwrite,
        verify_replicas=verify_replicas,
        allow_pickle=allow_pickle,
        max_shard_bytes=shard_limit(max_shard_bytes),
        namespace=namespace,
        busy=busy,
        staging=staging,
        writer=writer,
        timeout=timeout,
    )
    return save_async_tree(open_store(path), tree, as_comm(comm), options, custom_metadata or {}, files=files)


def prewarm(tree: object, *, writer: WriterKind = "process", comm: AnyComm = None) -> None:
    """Prepares for background saves of trees like this one, so that the first save takes no longer than others.

    Starts the writer, computes the plan, and allocates the memory for staging. Call it on every rank.

    Raises:
        TreeckptError: the tree cannot be saved.
    """
    prewarm_tree(tree, as_comm(comm), writer)


def load(
    path: Path | Bank | Sequence[Any],
    like: Any = None,
    *,
    select: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Renaming = None,
    transforms: Transforms = None,
    strict: Strict = True,
    cast: bool = False,
    device: str | None = None,
    verify: Verify = True,
    on_corrupt: Literal["error", "skip"] = "error",
    per_rank: Literal["error", "take"] = "error",
    copy: bool = False,
    mmap: bool = False,
    read: Literal["each", "once"] = "each",
    memory: int | None = None,
    allow_pickle: bool = False,
    comm: AnyComm = None,
    namespace: str = "",
    on_report: Callable[[LoadReport], None] | None = None,
) -> Any:
    """Loads a checkpoint as a new tree.

    It holds no lease: where a `Manager` may delete the checkpoint, load with `Manager.restore` or in `Manager.reading`.

    Args:
        path: as given to save, or files of other programs; or a `Bank` or list of several, of which later ones win.
        like: what is wanted: tensors, DTensors, `ArraySpec`s, anything with shape and dtype, or `...` for no leaf. None
            gives the tree as it was saved, in host memory, with distributed arrays whole.
        select, exclude: globs over paths as they are in like; a path under a named one counts. What is not wanted comes
            back as `...` (without like) or as it stands in like.
        rename, transforms: {"h.$L.*": "layers.$L.*"}, then rules or statements of `treeckpt.rules`: as if saved so.
        strict: like and checkpoint must have the same leaves ("missing": like's must be there), rules match some leaf.
        cast: converts dtypes instead of refusing them.
        device: where new tensors go; "original" puts each where it was.
        verify: compares checksums of all that is read; "first" matters to `load_into` alone.
        on_corrupt: "skip" salvages: leaves with bytes that are missing or changed come back as `...`, and are named in
            `LoadReport.damaged`. Every rank has to call: they share the comparing. Not of a `Bank`.
        per_rank: in another world size, refuse `PerRank` state, or take that of rank modulo the old world.
        copy: gives each array memory of its own, where whole ones are views of what a range of a file was read into.
        mmap: maps whole arrays: bytes come when they are touched, without checksums, from a file that must stay.
        read: "once" has what several ranks of a host want read by one and handed on; every rank has to call.
        memory: bytes of buffers, at least 1 MiB; None is 64 MiB, 512 MiB from object stores and network file systems.
        allow_pickle: unpickles values that were saved so, which can run any code: only for files you trust.
        comm: this rank, and of how many, as for `save` or by the launcher; they talk to salvage or to read "once" only.
        on_report: gets the `LoadReport`.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: the state of the files.
        MismatchError: what is wanted is not what was saved.
    """
    wanted, unwanted, rules = globs_of(select), globs_of(exclude), as_rules(rename, transforms)
    options = LoadOptions(wanted, strict, cast, device, verify, per_rank, copy, mmap, allow_pickle, namespace, read,
        memory, unwanted, rules)  # fmt: skip
    tree, report = _load(path, like, as_comm(comm, sends_messages=False), options, on_corrupt)
    if on_report is not None:
        on_report(report)
    return tree


def _load(path: Any, like: Any, comm: Comm, options: LoadOptions, on_corrupt: Any) -> tuple[Any, LoadReport]:
    if like is not None:
        like = state_tree(like, rank=comm.rank, namespace=options.namespace, mappings=not options.allow_pickle)

    def load_version(version: Checkpoint | Bank) -> tuple[Any, LoadReport]:
        overlay = CheckpointOverlay(version)
        with gc_paused():
            return overlay.load(like, comm, overlay.salvaging(comm, options, on_corrupt))

    return on_versions(path, load_version, together=options.read == "once", is_suspect=lambda found: found[1].damaged)


def load_into(
    path: Path | Bank | Sequence[Any],
    tree: Any,
    *,
    select: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Renaming = None,
    transforms: Transforms = None,
    strict: Strict = True,
    cast: bool = False,
    verify: Verify = True,
    on_corrupt: Literal["error", "skip"] = "error",
    per_rank: Literal["error", "take"] = "error",
    read: Literal["each", "once"] = "each",
    memory: int | None = None,
    allow_pickle: bool = False,
    comm: AnyComm = None,
    namespace: str = "",
) -> LoadReport:
    """Fills the arrays of a tree in place, and puts values where their containers can change.

    Keys, shapes, dtypes, layouts and files are checked before the first byte is written. Checksums are compared as the
    bytes are put in place, in one pass: a changed byte then leaves the tree partly filled, and the error says so, and
    which arrays may have changed. Values and objects follow when all arrays are in place. `verify="first"` compares all
    checksums before the first byte is written, at the price of reading twice, the second time from the page cache
    where there is room; each block is compared again when it is put in place, in case the file changes meanwhile.
    Arrays of the tree that share memory (ties, views) take arrays that are one in the checkpoint, or whose bytes agree.
    Keys of dicts are matched by name, also under `strict=False`. A list or tuple that holds values only is one value:
    one of another length takes the whole saved content, a list in place; a tuple is replaced in what holds it.
    Objects with `load_state_dict` are given their state after all else. With `on_corrupt="skip"` what is damaged stays
    as it was, an object of which a value would be missing as a whole.

    See `load` for the arguments and errors.
    """
    rules = as_rules(rename, transforms)
    options = LoadOptions(
        globs_of(select), strict, cast, None, verify, per_rank, True, False, allow_pickle, namespace, read, memory,
        globs_of(exclude), rules,
    )  # fmt: skip
    comm = as_comm(comm, sends_messages=False)
    return on_versions(
        path,
        lambda version: _load_into(CheckpointOverlay(version), tree, comm, options, on_corrupt),
        together=read == "once",
        is_suspect=lambda report: report.damaged,
    )


def _load_into(overlay: CheckpointOverlay, tree: Any, comm: Comm, options: LoadOptions, on_corrupt: Any) -> LoadReport:
    with gc_paused():
        options = overlay.salvaging(comm, options, on_corrupt)
        found = expand_states(tree, rank=comm.rank, namespace=options.namespace, mappings=not options.allow_pickle)
        if found is None:
            return overlay.load_into(tree, comm, options)

        def as_saved(at: str) -> Any:
            own = msgspec.structs.replace(options, select=(at,) if at else None, strict=False, copy=False, read="each")
            return overlay.load(None, comm, own)[0]

        report, more = found.restore(as_saved, lambda target: overlay.load_into(target, comm, options))
        return msgspec.structs.replace(report, loaded=report.loaded + more)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Checkpoint]:
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


def inspect(path: Path) -> Index:
    """The index of a checkpoint: its tree, every leaf's spec and place, without reading any array.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: the state of the files.
    """
    with opened(path) as checkpoint:
        return checkpoint.index


def read_file(path: Path, name: str) -> bytes:
    """The content of a file that was saved with `files=`, verified; `inspect(path).sidecars` lists all.

    Raises:
        MismatchError: there is none of that name.
        CheckpointNotFound, CorruptError, FormatError: the state of the files.
    """
    return on_one_version(path, lambda one: read_sidecar(one.store, one.index, name))


def verify(path: Path, *, repair: bool = False) -> VerifyReport:
    """Reads everything and compares it with its checksums, and the shards with the index.

    Args:
        repair: makes again what can be: the index from the shards' headers, a header from the index where its seal
            proves it, a shard with something behind its end. Timings that are damaged are taken away. What was there is
            kept as `<name>.<id>.damaged`. The report says what was done, and what is lost. Nothing else may be saving
            there.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: there is no index that can be read.
    """
    if not repair:
        return on_one_version(path, lambda one: verify_checkpoint(one.own()), is_suspect=lambda report: report.problems)
    with opened(path) as checkpoint:
        return repair_store(checkpoint.own().store)


def rebuild_index(path: Path, *, replace: bool = False) -> Index:
    """Makes a lost index.json again from the shards alone, and publishes it.

    Args:
        replace: also where there is an index.

    Raises:
        CheckpointExists: there is one, and `replace` is not given.
        CheckpointNotFound, CorruptError: the shards are not all there, or not intact.
    """
    with opened(path) as checkpoint:
        return publish_rebuilt(checkpoint.own().store, replace=replace)


def abstract(tree: Any, *, comm: AnyComm = None, namespace: str = "") -> Any:
    """The tree with an `ArraySpec` in the place of each array: a target for `load` that holds no data.

    Of a DTensor it also says which regions this rank holds. An object with `state_dict` and `load_state_dict` stands
    for what the first gives.
    """
    from .arrays.registry import abstract_of

    comm = as_comm(comm, sends_messages=False)
    here = global_rank(comm)
    tree = state_tree(tree, rank=comm.rank, namespace=namespace)
    _, leaves = flatten(tree, rank=comm.rank, namespace=namespace)
    specs = [abstract_of(leaf, path, here) for path, leaf in leaves]
    new = (leaf if spec is None else spec for (_, leaf), spec in zip(leaves, specs, strict=True))
    return replace_leaves(tree, new, namespace=namespace)
