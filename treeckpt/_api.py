"""The public functions: save, save_async, prewarm, load, load_into, inspect, read_file, verify and others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Unpack, cast

import msgspec
import optree

from ._arrays.digests import Comparison
from ._arrays.registry import abstract_of
from ._arrays.stateful import state_tree
from ._core.format.files import check_step
from ._core.tree.flatten import flatten, replace_leaves
from ._core.tree.leaf_differences import Strict
from ._core.tree.paths import Selection
from ._io.comm.collective import ending_together
from ._io.comm.comm import Comm, as_comm, background_comm, global_rank
from ._io.public_calls import call_back, check_options, checks_options, saves, takes_no_save
from ._io.storage.open import following, open_store
from ._io.storage.store import Store
from ._loading.background import PendingLoad, start_load
from ._loading.match import LoadOptions
from ._loading.options import (
    IN_PLACE,
    Device,
    Fallback,
    LoadAsyncKeywords,
    LoadKeywords,
    ReadOptions,
    choice_of,
    fallback_of,
    fallback_of_load,
    read_of,
)
from ._loading.overlay import Bank
from ._loading.partial_ranks import PartialRanks, partial_ranks
from ._loading.run_load import (
    CheckpointPath,
    exists,
    inspect,
    read_file,
    rebuild_index,
    run_load,
    run_load_into,
    verify,
)
from ._saving.background import prewarm_tree, save_async_tree
from ._saving.options import (
    BackgroundOptions,
    GivenBase,
    IncrementalOptions,
    SaveOptions,
    SidecarContent,
    background_of,
    shard_limit,
)
from ._saving.save import save_tree
from ._saving.session import Pending
from .errors import MismatchError
from .reports import LoadReport, SaveReport
from .rules import Renaming, Transforms

__all__ = [
    "abstract",
    "exists",
    "inspect",
    "load",
    "load_abstract",
    "load_async",
    "load_into",
    "prewarm",
    "read_file",
    "rebuild_index",
    "save",
    "save_async",
    "verify",
]

SavePath = str | os.PathLike[str] | Store
_DROPPED = "This rank's tree, if it was loaded, is dropped"
_NO_ARRAY = "No array is read here: leave it out"
AnyComm = Any  # what `as_comm` takes


@checks_options
@saves
def save(
    path: SavePath,
    tree: object,
    *,
    step: int | None = None,
    comm: AnyComm = None,
    custom_metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, SidecarContent] | None = None,
    overwrite: bool = False,
    base: SavePath | None = None,
    verify_replicas: Comparison = "sample",
    allow_pickle: bool = False,
    max_shard_bytes: int | None = None,
    namespace: str = "",
) -> SaveReport:
    """Saves a tree; returns when it is durable and committed. Call it on every rank.

    >>> tc.save("run/step_00000200", {"w": np.zeros((2, 3)), "step": 200}, step=200).nbytes
    48

    Args:
        path: a directory, created if needed; its name is the checkpoint's. Or a URL (`s3://bucket/run/step_00000100`,
            `gs://`, `az://`, those of fsspec), or a store, as everywhere. Private disks get the shards of their ranks.
        tree: containers of any depth with arrays and Python values as leaves. Plain arrays and values on several
            ranks are replicas: written once, and compared if small. Mark what each rank has of its own with
            `PerRank`, and pieces of one array with `Sharded`; the pieces of a DTensor are known. An object with
            `state_dict` and `load_state_dict` stands for the result of `state_dict`.
        step: of training, 0 or more, kept in the index.
        comm: which ranks save: a process group of torch.distributed, by default the default one, if it is up; what
            `treeckpt.comm` returns, or (rank, size, store); mpi4py's communicator; "alone" saves in this process alone.
        custom_metadata: values kept in the index: rank 0's, to which what other ranks give must be equal.
        files: small files that belong to the checkpoint, by plain names, as {"config.json": path or bytes}: up to 1,000
            of 64 MiB each, 256 MiB in all; rank 0's, read there. `read_file` reads one, others open `path/config.json`.
        overwrite: replaces a checkpoint at `path`, which stays valid until the new one is committed.
        base: an earlier checkpoint in a directory beside `path`: its files that have what is saved here, byte for byte,
            are not written again, nor rows of a `KeyedTable` that have stayed since this process saved it there.
        verify_replicas: how what several ranks hold is compared: up to 64 KiB always as a whole; larger arrays by
            samples, 1 KiB of each 256 KiB ("sample"), by all bytes (True), or not (False); any rank's is saved.
        allow_pickle: stores values of unknown kinds as pickles; load reads them with `allow_pickle=True` only.
        max_shard_bytes: a rank starts another file after this many bytes of data, 1 or more; None writes one file.
        namespace: of optree's registry of node classes.

    Raises:
        TreeError, LayoutError: what cannot be stored, a file that cannot be read, pieces that are no whole array.
        CheckpointExists: there is one, and `overwrite` is not given; or a file of others has a name of `files`.
        MismatchError, RankError: ranks contradict each other, failed or fell silent; raised on every rank.
        StoreError: an object store cannot be reached, or refuses.
    """
    options = SaveOptions(
        step=None if step is None else check_step(step),
        custom_metadata=custom_metadata,
        files=files,
        overwrite=overwrite,
        incremental=None if base is None else IncrementalOptions(source=GivenBase(open_store(base))),
        verify_replicas=verify_replicas,
        allow_pickle=allow_pickle,
        max_shard_bytes=shard_limit(max_shard_bytes),
        namespace=namespace,
    )
    return save_tree(open_store(path), tree, as_comm(comm), options)


@checks_options
@saves
def save_async(
    path: SavePath,
    tree: object,
    *,
    step: int | None = None,
    comm: AnyComm = None,
    custom_metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, SidecarContent] | None = None,
    overwrite: bool = False,
    base: SavePath | None = None,
    verify_replicas: Comparison = "sample",
    allow_pickle: bool = False,
    max_shard_bytes: int | None = None,
    namespace: str = "",
    background: BackgroundOptions | None = None,
) -> Pending:
    """Saves a tree in the background. Call it on every rank.

    It returns when the ranks have agreed and the bytes that this rank writes are copied into memory that is kept for
    the next save; after that the tree may be changed. They are written and committed in the background. An error in the
    call (there is a checkpoint already, ranks contradict each other) is raised here; a later one by `Pending.result`,
    or, if that is not called, by the next save.

    >>> tc.save_async("run/step_00000200", model.state_dict()).result().nbytes
    40

    Args:
        background: how it goes: `BackgroundOptions(staging=..., writer=..., busy=..., timeout=...)`.

    See `save` for the other arguments and errors.

    Raises:
        CheckpointError: an earlier background save failed, and its result was not requested; or one is still running,
            and `background.busy` is "error".
    """
    options = SaveOptions(
        step=None if step is None else check_step(step),
        custom_metadata=custom_metadata,
        files=files,
        overwrite=overwrite,
        incremental=None if base is None else IncrementalOptions(source=GivenBase(open_store(base))),
        verify_replicas=verify_replicas,
        allow_pickle=allow_pickle,
        max_shard_bytes=shard_limit(max_shard_bytes),
        namespace=namespace,
        background=background_of(background, "save_async"),
    )
    return save_async_tree(open_store(path), tree, as_comm(comm), options)


@checks_options
@saves
def prewarm(tree: object, *, background: BackgroundOptions | None = None, comm: AnyComm = None) -> None:
    """Prepares for background saves of trees like this one, so that the first save takes no longer than others.

    Starts the writer, computes the plan, and allocates the memory for staging. Call it on every rank.

    >>> tc.prewarm(model.state_dict())

    Args:
        background: that of the saves.

    Raises:
        TreeckptError: the tree cannot be saved.
    """
    prewarm_tree(tree, as_comm(comm), background_of(background, "prewarm").writer)


@checks_options
@takes_no_save
def load(
    path: CheckpointPath | Bank | Sequence[Any],
    like: Any = None,
    *,
    select: Selection = None,
    exclude: Selection = None,
    rename: Renaming = None,
    transforms: Transforms = None,
    strict: Strict = True,
    partial: bool = False,
    ids: Any = None,
    cast: bool = False,
    device: Device = None,
    read: ReadOptions | None = None,
    fallback: Fallback | None = None,
    allow_pickle: bool = False,
    comm: AnyComm = None,
    namespace: str = "",
    together: bool = False,
    on_report: Callable[[LoadReport], None] | None = None,
) -> Any:
    """Loads a checkpoint as a new tree; dense arrays have like's order of dimensions in memory, else the saved one.

    It holds no lease: where a `Manager` may delete the checkpoint, load with `Manager.restore` or in `Manager.reading`.

    >>> tree = tc.load("run/step_00000100", {"model": {"weight": torch.empty(2, 4), "bias": ...}, "step": 0})

    Args:
        path: as for save, or of a checkpoint of another program; a `Bank` or a list: later ones win,
            in tables row by row.
        like: tensors, DTensors, `ArraySpec`s, anything with shape and dtype, `...` for no leaf. None: as saved, whole;
            an `optree.PyTreeSpec`: what it names, as saved.
        select, exclude: globs over paths, or a path as keys, and what is below; the rest is as in like, else `...`.
        rename, transforms: {"h.$L.*": "layers.$L.*"}, then rules or statements of `treeckpt.rules`: as if saved so.
        strict: like and checkpoint have the same leaves, rules match; "missing": like's are there; False: one in both.
        partial: like is this rank's part: strict holds for all ranks together, which all call.
        ids: the rows to load of each `KeyedTable`, in this order; int64[N], or a dict of it by path; see there.
        cast, device: converts other dtypes; where new tensors go, "original" for where each was, or a function of that.
        read: how bytes are read: `ReadOptions(verify=..., memory=..., once=..., mmap=..., copy=..., follow_links=...)`.
        fallback: what is done with damage and `PerRank` state of other ranks: `Fallback(on_corrupt=..., per_rank=...)`.
        allow_pickle: unpickles values that were saved so, which can run any code: only for files you trust.
        comm, together: this rank, of how many, as for `save` or by the launcher; all call, what fails fails on all.
        on_report: gets the `LoadReport`.

    Raises:
        CheckpointNotFound, CorruptError, FormatError, MismatchError: the state of the files, or what is wanted.
    """
    with _ending(comm, path, together=together, partial=partial, hint=_DROPPED) as (comm, ranks):
        options = LoadOptions(
            **choice_of(select, exclude, rename, transforms), strict=strict, ids=ids, cast=cast, device=device,
            read=read_of(read, "load"), fallback=fallback_of_load(fallback, "load"), allow_pickle=allow_pickle,
            namespace=namespace, partial=ranks,
        )  # fmt: skip
        tree, report = run_load(following(path, options.read.follow_links), like, comm, options)
    if on_report is not None:
        call_back(on_report, report)
    return tree


@checks_options
@takes_no_save
def load_abstract(
    path: CheckpointPath | Bank | Sequence[Any],
    *,
    select: Selection = None,
    exclude: Selection = None,
    rename: Renaming = None,
    transforms: Transforms = None,
    read: ReadOptions | None = None,
    fallback: Fallback | None = None,
    allow_pickle: bool = False,
    comm: AnyComm = None,
    namespace: str = "",
) -> Any:
    """The tree of a checkpoint with its values, and an `ArraySpec` in the place of each array; it reads no array.

    It is what `load` takes as `like` to load the same; `treeckpt show --structure` prints it. The specs name no device.

    >>> tc.load_abstract("run/step_00000100")["model"]["bias"].shape
    (2,)

    Args:
        path, select, exclude, rename, transforms, allow_pickle, namespace: as for `load`.
        read, fallback: as for `load`, but that no array is read: `mmap`, `copy`, `once` and `on_corrupt` are refused,
            and `per_rank` is "take" by default.
        comm: which rank this is, as for `load`.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: the state of the files.
        MismatchError: a glob means nothing, or a class is not in this program.
    """
    read = read_of(read, "load_abstract", dict.fromkeys(("mmap", "copy", "once"), _NO_ARRAY))
    fallback = fallback_of_load(fallback, "load_abstract", {"on_corrupt": _NO_ARRAY})
    if fallback.per_rank is None:
        fallback = msgspec.structs.replace(fallback, per_rank="take")
    options = LoadOptions(
        **choice_of(select, exclude, rename, transforms),
        read=read,
        fallback=fallback,
        allow_pickle=allow_pickle,
        namespace=namespace,
        specs_only=True,
    )
    return run_load(following(path, read.follow_links), None, as_comm(comm, sends_messages=False), options)[0]


@checks_options
@takes_no_save
def load_into(
    path: CheckpointPath | Bank | Sequence[Any],
    tree: Any,
    *,
    select: Selection = None,
    exclude: Selection = None,
    rename: Renaming = None,
    transforms: Transforms = None,
    strict: Strict = True,
    partial: bool = False,
    cast: bool = False,
    read: ReadOptions | None = None,
    fallback: Fallback | None = None,
    allow_pickle: bool = False,
    comm: AnyComm = None,
    namespace: str = "",
    together: bool = False,
) -> LoadReport:
    """Fills the arrays of a tree in place, and puts values where their containers can change.

    Keys, shapes, dtypes, layouts and files are checked before the first byte is written. Checksums are compared as the
    bytes are put in place, in one pass: a changed byte then leaves the tree partly filled, and the error says so, and
    which arrays may have changed. Values and objects follow when all arrays are in place. `ReadOptions(verify="first")`
    compares all checksums before the first byte is written, at the price of reading twice, the second time from the
    page cache where there is room; each block is compared again when it is put in place, as the file may change.
    Arrays of the tree that share memory (ties, views) take arrays that are one in the checkpoint, or whose bytes agree.
    Keys of dicts are matched by name, also under `strict=False`; the report lists what is `missing` then. A list or
    tuple that holds values only is one value: one of another length takes the whole saved content, a list in place; a
    tuple is replaced in what holds it. Objects with `load_state_dict` are given their state after all else. With
    `Fallback(on_corrupt="skip")` what is damaged stays as it was, an object of which a value would be missing wholly.

    See `load` for the arguments and errors.

    >>> print(tc.load_into("run/step_00000100", {"model": model, "step": 0}).loaded)
    3
    """
    hint = "What was to be filled may be filled on some ranks only"
    with _ending(comm, path, together=together, partial=partial, hint=hint) as (comm, ranks):
        # what is new in the tree, as an array in the state of an object, is to have memory of its own
        read = msgspec.structs.replace(read_of(read, "load_into", IN_PLACE), copy=True)
        options = LoadOptions(
            **choice_of(select, exclude, rename, transforms),
            strict=strict,
            cast=cast,
            read=read,
            fallback=fallback_of_load(fallback, "load_into"),
            allow_pickle=allow_pickle,
            namespace=namespace,
            partial=ranks,
        )
        return run_load_into(following(path, read.follow_links), tree, comm, options)


def _ending(
    comm: AnyComm, path: Any, *, together: bool, hint: str, partial: bool | PartialRanks = False
) -> AbstractContextManager[tuple[Comm, PartialRanks | None]]:
    """Returns what gives the comm of a load, and with `partial` the ranks that are strict together, for its body.

    With `together` its end is that of all ranks.
    """
    if not isinstance(together, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MismatchError("together", expected="True or False", found=f"{together!r:.60}")
    comm, url = as_comm(comm, sends_messages=together or bool(partial)), f"{getattr(path, 'url', path)}"

    @contextmanager
    def ending() -> Iterator[tuple[Comm, PartialRanks | None]]:
        end = ending_together(comm, "load", url, hint=hint) if together else nullcontext()
        with end, partial_ranks(comm, url, partial) as ranks:
            yield comm, ranks

    return ending()


def load_async(
    path: CheckpointPath | Bank | Sequence[Any], like: Any = None, **options: Unpack[LoadAsyncKeywords]
) -> PendingLoad:
    """Loads a checkpoint as a new tree in a thread, beside what a program does at its start.

    `result()` waits for the tree; what fails is raised there. `like` must not be changed before. The end of the process
    does not wait for a load: nothing is read any more. CUDA's current device is that of the calling thread.

    >>> tc.load_async("run/step_00000100").result()["step"]
    100

    Args:
        path, like, options: as for `load`. Ranks may exchange messages for `together` alone, beside other loads and
            saves: call it on every rank in the same order then, and `result` raises the same on all. To read once, and
            to salvage on several ranks, is refused. `on_report` is called in the thread.

    Raises:
        MismatchError: an option with which ranks would exchange messages.
        TypeError: `load` has no such option.
    """
    check_options(options, LoadAsyncKeywords.__optional_keys__, "load_async, nor of load")
    together = options.pop("together", False)
    comm = as_comm(options.pop("comm", None), sends_messages=together)
    hint = f"On {comm.size} ranks these exchange messages while they load so: use load, on every rank"
    if comm.size > 1 and options.get("partial"):
        raise MismatchError("partial", expected="False, in load_async", found="True", hint=hint)
    # options are checked here, so that this call refuses them, and not `result`
    read = read_of(options.get("read"), "load_async", {"once": hint} if comm.size > 1 else {})
    fallback_of(options.get("fallback"), "load_async", {"on_corrupt": hint} if comm.size > 1 else {})
    talk = background_comm(comm) if together else comm
    ending = _ending(talk, path, together=together, hint=_DROPPED)
    path, own = following(path, read.follow_links), cast(LoadKeywords, options)

    def run(source: Any) -> Any:
        with ending:
            return load(source, like, comm=comm, **own)

    return start_load(path, run)


def abstract(tree: Any, *, treespec: bool = False, comm: AnyComm = None, namespace: str = "") -> Any:
    """The tree with an `ArraySpec` in the place of each array: a target for `load` that holds no data.

    Of a DTensor it also says which regions this rank holds. An object with `state_dict` and `load_state_dict` stands
    for what the first gives.

    >>> tc.abstract({"w": np.zeros((2, 3)), "step": 1})["w"].shape
    (2, 3)
    >>> tc.load("run/step_00000100", tc.abstract({"model": model, "step": 0}, treespec=True))["step"]
    100

    Args:
        treespec: returns its structure alone, an `optree.PyTreeSpec` with None as a leaf: as a target of `load` it
            names leaves, which come as they were saved, also a container that optree does not know.
        comm, namespace: as for `save`.
    """
    comm = as_comm(comm, sends_messages=False)
    here = global_rank(comm)
    tree = state_tree(tree, rank=comm.rank, namespace=namespace)
    _, leaves = flatten(tree, rank=comm.rank, namespace=namespace)
    specs = [abstract_of(leaf, path, here) for path, leaf in leaves]
    new = (leaf if spec is None else spec for (_, leaf), spec in zip(leaves, specs, strict=True))
    made: Any = replace_leaves(tree, new, namespace=namespace)
    return optree.tree_structure(made, none_is_leaf=True, namespace=namespace) if treespec else made
