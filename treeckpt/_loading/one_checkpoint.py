"""The public functions about one checkpoint that load no tree: inspect, read_file, verify, rebuild_index."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from .._core.format.records import Index
from .._io.os_errors import wrap_read_error
from .._io.public_calls import takes_no_save
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.metadata_files import OnShardsRead, read_sidecar
from .._io.storage.open import following
from .._io.storage.store import Store
from ..reports import VerifyReport
from .consistent_reads import on_one_version, open_checkpoint
from .repair import repair_store
from .verify import publish_rebuilt, verify_checkpoint

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
    return on_one_version(following(path, follow_links), lambda one: read_sidecar(one.store, one.index, name))


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
        return on_one_version(path, verify_checkpoint, is_suspect=lambda report: report.problems)
    with opened(path) as checkpoint:
        return repair_store(checkpoint.own().store)


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
        return publish_rebuilt(checkpoint.own().store, replace=replace, on_read=on_read)
