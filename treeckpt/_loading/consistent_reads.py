"""Reads one whole version of a checkpoint that another process may overwrite: reads again if it was replaced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from .._core.format.index import INDEX_NAME
from .._io.os_errors import shows_damage, wrap_read_error
from .._io.storage.checkpoint import Checkpoint, Replaced
from .._io.storage.far_store import for_reading
from .._io.storage.metadata_files import KnownIndex
from .._io.storage.open import open_store
from .._io.storage.store import Store
from ..errors import CheckpointError, MismatchError, StoreError, TreeckptError
from .overlay import Bank, as_bank

T = TypeVar("T")

TRIES = 20
"""Versions that are tried: a save takes longer than it takes to find out that a version was replaced."""


def open_checkpoint(path: Any) -> tuple[Store, Callable[[], Checkpoint]]:
    """Opens a path, a URL or a store; returns its store, and a function that opens a version of the checkpoint there.

    Files of another program are looked for only where there is no index of ours, and not in a store that is far away,
    where each look takes a request.

    Raises:
        StoreError, CheckpointError: as `open_store`.
    """
    store = open_store(path)
    place = store.traits.local_path
    if place is not None:
        is_ours = os.path.exists(place / INDEX_NAME)
    else:
        is_ours = store.traits.far or store.entry(INDEX_NAME) is not None
    if not is_ours:
        from .._foreign.files import foreign_at
        from .._foreign.foreign_checkpoint import ForeignCheckpoint

        if (found := foreign_at(path)) is not None:
            return found, partial(ForeignCheckpoint, found)
    store = for_reading(store)
    return store, partial(Checkpoint, store)


def on_one_version(
    path: Any,
    act: Callable[[Checkpoint], T],
    *,
    together: bool = False,
    is_suspect: Callable[[T], object] = lambda _: False,
    known: KnownIndex | None = None,
) -> T:
    """Does what `on_versions` does, for one checkpoint.

    Raises:
        CheckpointError: as `on_versions`; or the path is a bank.
    """

    if (bank := as_bank(path)) is not None:
        raise CheckpointError("path", expected="one checkpoint", found=f"{bank!r:.200}")
    return on_versions(path, cast(Any, act), together=together, is_suspect=is_suspect, known=known)


def on_versions(
    path: Any,
    act: Callable[[Checkpoint | Bank], T],
    *,
    together: bool = False,
    is_suspect: Callable[[T], object] = lambda _: False,
    known: KnownIndex | None = None,
) -> T:
    """Returns what `act` returns for a path, a store or a bank, from one version of each checkpoint.

    Args:
        path: what is opened; an opened checkpoint, or a bank of these, is passed on as it is.
        act: receives the opened checkpoint, or the bank with an opened checkpoint as the path of each source. It is
            called again if it failed and a version was replaced meanwhile.
        together: the ranks read together, and learn together that a version was replaced.
        is_suspect: whether a result may come from a replaced version, as a report of damage may.
        known: the index of the first checkpoint, where it has just been read: it is not decoded again unless the
            version was replaced, and from a far store not read again.

    Raises:
        MismatchError: of `act`, with the paths of the checkpoints added, as they were given.
        CheckpointNotFound: a checkpoint was deleted meanwhile.
        CheckpointError: it was replaced again and again.
    """
    bank = as_bank(path)
    given = [path] if bank is None else [source.path for source in bank.sources]
    if all(isinstance(one, Checkpoint) for one in given):
        return act(path if bank is None else bank)
    with contextlib.ExitStack() as stack:
        stores: list[Store] = []
        versions: list[Callable[[], Checkpoint]] = []
        for one in given:
            store, opened = (one.store, one.reopened) if isinstance(one, Checkpoint) else open_checkpoint(one)
            stores.append(stack.enter_context(contextlib.closing(store)))
            versions.append(opened)
        for _ in range(TRIES):
            checkpoints = [opened() for opened in versions]
            try:
                if known is not None:
                    before, known = known, None
                    _take_known(checkpoints[0], before)
                found = act(checkpoints[0] if bank is None else bank.opened(checkpoints))
                if not is_suspect(found) or not any(one.is_replaced() for one in checkpoints):
                    return found
            except Replaced:
                pass
            except (TreeckptError, OSError) as error:
                if together or not _are_replaced(checkpoints, error):
                    if isinstance(error, OSError):
                        raise wrap_read_error(error, stores[0].url) from error
                    if isinstance(error, MismatchError):
                        _name_checkpoints(error, given, [one.url for one in checkpoints])
                    raise
    raise CheckpointError(
        ", ".join(store.url for store in stores),
        expected="a checkpoint that stays for as long as it takes to read it",
        found=f"another save in its place, {TRIES} times",
        hint="Read it when nobody saves there, or save each step at a path of its own",
    )


def _take_known(checkpoint: Checkpoint, known: KnownIndex) -> None:
    """Has a checkpoint take an index that has just been read, if it still is its own."""
    if checkpoint.store.traits.far:  # it takes a round trip to read it again
        checkpoint.index_bytes = known.data
    if checkpoint.index_bytes == known.data:
        checkpoint.index = known.index


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
