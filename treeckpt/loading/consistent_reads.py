"""Reading one whole version of a checkpoint that others may overwrite: again where it is replaced meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ..errors import CheckpointError, TreeckptError
from ..io.os_errors import wrap_read_error
from ..io.storage.open import open_store
from ..io.storage.versions import Replaced, Version
from .overlay import Bank, as_bank

__all__ = ["on_one_version"]

T = TypeVar("T")

TRIES = 20
"""Versions that are tried: a save takes longer than to find out that it was replaced."""


def on_one_version(
    path: Any, act: Callable[[Any], T], *, together: bool = False, doubt: Callable[[T], object] = lambda _: False
) -> T:
    """What `act` gives for a path, a store or a bank, from one version of each checkpoint.

    Args:
        act: is called with a version of the path; again where it failed, and the version was replaced meanwhile.
        together: ranks read together, and learn together that a version was replaced.
        doubt: whether what was found may come of that too.

    Raises:
        CheckpointNotFound: a checkpoint was deleted meanwhile.
        CheckpointError: it was replaced again and again.
    """
    bank = as_bank(path)
    given = [path] if bank is None else [source.path for source in bank.sources]
    if all(isinstance(one, Version) for one in given):
        return act(path)
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(contextlib.closing(open_store(one))) for one in given]
        for _ in range(TRIES):
            versions = [Version(store) for store in stores]
            try:
                found = act(versions[0] if bank is None else _with(bank, versions))
                if not doubt(found) or not _is_replaced(versions):
                    return found
            except Replaced:
                pass
            except (TreeckptError, OSError) as error:
                if together or not _is_replaced(versions):
                    if isinstance(error, OSError):
                        raise wrap_read_error(error, stores[0].url) from error
                    raise
    raise CheckpointError(
        ", ".join(store.url for store in stores),
        expected="a checkpoint that stays for as long as it takes to read it",
        found=f"another save in its place, {TRIES} times",
        hint="Read it when nobody saves there, or save each step at a path of its own",
    )


def _is_replaced(versions: list[Version]) -> bool:
    return any(version.is_replaced() for version in versions)


def _with(bank: Bank, versions: list[Version]) -> Bank:
    """The bank with versions in the place of its paths."""
    pairs = zip(bank.sources, versions, strict=True)
    return Bank([msgspec.structs.replace(source, path=version) for source, version in pairs])
