"""What is given to a save beside the tree, checked before anything is written: options, metadata, sidecar files."""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol, SupportsIndex, get_args

import msgspec

from .._arrays.digests import Comparison
from .._core.format.files import (
    MAX_SIDECAR_NBYTES,
    MAX_SIDECARS,
    MAX_SIDECARS_NBYTES,
    NAME_RULE,
    alike_names,
    checksum,
    is_own_name,
    is_sidecar_name,
)
from .._core.format.lineage import Lineage
from .._core.tree.structure import check_unicode
from .._io.public_calls import check_group
from .._io.storage.local_files import read_head
from .._io.storage.store import Store
from ..errors import CorruptError, TreeckptError, TreeError

BusyPolicy = Literal["wait", "skip", "error"]
StagingMode = Literal["copy", "lazy"]
WriterKind = Literal["process", "thread"]
UNLIMITED_SHARD = 1 << 62
SidecarContent = str | os.PathLike[str] | bytes | bytearray | memoryview
"""The path of a local file, or its content."""


class LineageSource(Protocol):
    """Gives one save of a manager its place in the run."""

    def lineage(self, save_id: str) -> Lineage:
        """Returns the lineage of the save with this id; raises nothing.

        It is called on rank 0 after the ranks have agreed, and for a background save in the thread that saves.
        """
        ...


class FailureSink(Protocol):
    """Keeps what is known of saves of a run that were not committed; for one save of a manager, on rank 0.

    No method raises an error, or waits longer than the save itself would.
    """

    def failed(self, save_id: str, world: int, began_ns: int, error: BaseException) -> None:
        """Keeps that the save has ended with an error."""
        ...

    def before_removal(self, folder: Store, names: Collection[str]) -> None:
        """Keeps what these files, which are about to be deleted, show of dead saves."""
        ...


class BaseSource(Protocol):
    """What knows the checkpoint that an incremental save follows, on rank 0."""

    def bases(self) -> Iterable[tuple[Store, str]]:
        """Yields the directories that may have it and the id of its save there, "" for any; the best one first."""
        ...


class GivenBase(msgspec.Struct, frozen=True):
    """The checkpoint that a caller of `save` names."""

    store: Store

    def bases(self) -> Iterable[tuple[Store, str]]:
        return ((self.store, ""),)


class IncrementalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a save is incremental."""

    source: BaseSource | None = None
    full_every: int | None = None
    """The number of saves of which one takes nothing from others; None for no such rule."""


class BackgroundOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a save in the background goes: `background=` of `save_async`, `prewarm` and `Manager`.

    >>> in_thread = tc.BackgroundOptions(writer="thread")
    >>> tc.save_async("run/step_00000200", model.state_dict(), background=in_thread).result().nbytes
    40

    Args:
        staging: "copy" copies before the call returns. "lazy" returns at once and copies beside the next forward and
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

    Raises:
        TreeckptError: a field has another value.
    """

    staging: StagingMode = "copy"
    writer: WriterKind = "process"
    busy: BusyPolicy = "wait"
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name, literal in (("staging", StagingMode), ("writer", WriterKind), ("busy", BusyPolicy)):
            if (given := getattr(self, name)) not in get_args(literal):
                known = " or ".join(map(repr, get_args(literal)))
                raise TreeckptError(name, expected=known, found=f"{given!r:.60}")
        if self.timeout is not None and not (isinstance(self.timeout, numbers.Real) and 0 < self.timeout < math.inf):
            raise TreeckptError(
                "timeout",
                expected="a timeout of more than 0 seconds, or None for the comm's",
                found=f"{self.timeout!r:.60}",
                hint='To give up at once where an earlier save is under way, pass busy="skip" or busy="error"',
            )


def background_of(given: BackgroundOptions | None, call: str, refused: Mapping[str, str] = {}) -> BackgroundOptions:
    """Returns the argument `background` of a call.

    Args:
        refused: the fields that the call cannot honour, each with what to do.

    Raises:
        TypeError: it is something else.
        MismatchError: a field is given that is refused.
    """
    return check_group(given, BackgroundOptions, "background", 'writer="thread"', call, refused)


class CommonOptions(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The options of a save that must be equal on every rank."""

    step: int | None = None
    overwrite: bool = False
    verify_replicas: Comparison = "sample"
    max_shard_bytes: int = UNLIMITED_SHARD
    busy: BusyPolicy = "wait"
    plan_only: bool = False
    incremental: bool = False


class SaveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All that a save is given beside the tree, the place and the ranks; see `treeckpt.save` and `save_async`."""

    step: int | None = None
    custom_metadata: Mapping[str, object] | None = None
    files: Mapping[str, SidecarContent] | None = None
    overwrite: bool = False
    verify_replicas: Comparison = "sample"
    allow_pickle: bool = False
    max_shard_bytes: int = UNLIMITED_SHARD
    namespace: str = ""
    background: BackgroundOptions = BackgroundOptions()
    plan_only: bool = False
    """Whether ranks only agree on the plan: nothing is written, and the path is not looked at."""
    lineage: LineageSource | None = None
    """What gives a save of a manager its place in the run."""
    failures: FailureSink | None = None
    """What keeps failures of saves in the run of a manager."""
    incremental: IncrementalOptions | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.verify_replicas, bool) and self.verify_replicas != "sample":  # pyright: ignore
            raise TreeckptError(
                "verify_replicas",
                expected='True, "sample" or False',
                found=f"{self.verify_replicas!r:.60}",
                hint='"sample", the default, compares samples of what is above 64 KiB; False trusts that it is equal',
            )

    @property
    def common(self) -> CommonOptions:
        """The options that ranks compare."""
        return CommonOptions(
            step=self.step,
            overwrite=self.overwrite,
            verify_replicas=self.verify_replicas,
            max_shard_bytes=self.max_shard_bytes,
            busy=self.background.busy,
            plan_only=self.plan_only,
            incremental=self.incremental is not None,
        )


def check_metadata(metadata: object) -> Mapping[str, object]:
    """Returns the argument `custom_metadata`, an empty mapping for None.

    Raises:
        TreeError: it is no mapping, or a key is no name.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        expected, found = 'values by name, as {"commit": "1f3a"}', f"{type(metadata).__name__} {metadata!r:.60}"
        raise TreeError(
            "custom_metadata", expected=expected, found=found, hint="Give it a name, as a dict of one entry"
        )
    for key in metadata:
        if not isinstance(key, str):
            found = f"a key of {type(key).__name__}: {key!r:.60}"
            raise TreeError("custom_metadata", expected="names of type str", found=found, hint="Use str(key)")
        check_unicode(key, "custom_metadata")
    return metadata


def shard_limit(limit: object) -> int:
    """Returns the largest number of data bytes in a shard, from an integer of any type; None is no limit.

    Raises:
        TreeckptError: it is not an integer, or it is below 1.
    """
    if limit is None:
        return UNLIMITED_SHARD
    # True is an integer to Python, and would limit shards to one byte
    if isinstance(limit, bool) or not isinstance(limit, SupportsIndex) or operator.index(limit) < 1:
        hint = "None has each rank write one file"
        raise TreeckptError("max_shard_bytes", expected="bytes, 1 or more", found=f"{limit!r:.60}", hint=hint)
    return operator.index(limit)


# sidecar files --------------------------------------------------------------------------------------------------------


def read_sidecars(files: Mapping[str, SidecarContent]) -> dict[str, bytes]:
    """Returns the contents of sidecar files by name.

    Raises:
        TreeError: as `check_files`; or a size that is not allowed, or a path that is no file that can be read.
    """
    check_files(files)
    contents: dict[str, bytes] = {}
    total = 0
    for name, given in files.items():
        contents[name] = data = _read_path(name, given) if isinstance(given, (str, os.PathLike)) else bytes(given)
        total += len(data)
        if len(data) > MAX_SIDECAR_NBYTES or total > MAX_SIDECARS_NBYTES:
            raise TreeError(
                f"files/{name}",
                expected=f"at most {MAX_SIDECAR_NBYTES} bytes a file, and {MAX_SIDECARS_NBYTES} together",
                found=f"more than {len(data) - 1} bytes, {total - 1} together",
                hint="Sidecar files are for what is small; arrays belong into the tree",
            )
    return contents


def check_files(files: Mapping[str, SidecarContent]) -> None:
    """Raises TreeError, naming the file, for names and types that are not allowed, and for too many files."""
    if not isinstance(files, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        expected, found = 'contents or paths by name, as {"config.json": path}', f"{type(files).__name__} {files!r:.60}"
        raise TreeError("files", expected=expected, found=found, hint="Say under which name each is to be kept")
    if len(files) > MAX_SIDECARS:
        hint = "Pack them into one archive"
        raise TreeError("files", expected=f"at most {MAX_SIDECARS}", found=f"{len(files)}", hint=hint)
    for name, given in files.items():
        if not isinstance(name, str) or not is_sidecar_name(name):
            raise TreeError(f"files/{name!r:.80}", expected=NAME_RULE, found=f"{name!r:.160}")
        if is_own_name(name):
            expected = "a name that no file of treeckpt has in the directory"
            raise TreeError(f"files/{name}", expected=expected, found=f"{name!r}")
        if not isinstance(given, (str, os.PathLike, bytes, bytearray, memoryview)):
            raise TreeError(f"files/{name}", expected="a path or bytes", found=type(given).__name__)
    # some file systems keep one file under names that differ in case
    for name in alike_names(files):
        raise TreeError(f"files/{name}", expected="names that differ not only in case", found="two that do")


def sidecar_digests(files: Mapping[str, SidecarContent], contents: Mapping[str, bytes]) -> dict[str, str]:
    """Returns the checksum of each file, "" for a path that was not read into `contents`."""
    found = {name: checksum(data) for name, data in contents.items()}
    for name, given in files.items():
        if name not in found:
            # rank 0 alone reads paths: what other ranks mean by one is not compared
            found[name] = "" if isinstance(given, (str, os.PathLike)) else checksum(bytes(given))
    return found


def _read_path(name: str, given: str | os.PathLike[str]) -> bytes:
    path = os.fspath(given)
    expected, hint = f"a readable file at {path}", "Give a path on the host of rank 0, or the content as bytes"
    try:
        # the byte beyond the limit shows a file that is too large, without reading it whole
        return read_head(Path(path), MAX_SIDECAR_NBYTES + 1)
    except CorruptError as error:
        raise TreeError(
            f"files/{name}", expected=expected, found=f"something else than a file: {error.found}", hint=hint
        ) from error
    except OSError as error:
        found = f"{type(error).__name__}: {error.strerror}"
        raise TreeError(f"files/{name}", expected=expected, found=found, hint=hint) from error
