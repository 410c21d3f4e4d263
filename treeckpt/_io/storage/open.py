"""Opens a path or URL as the store of a checkpoint, or as a run: by the scheme that `register` was given."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...errors import CheckpointError, StoreError, TreeckptError
from .local_store import OBJECT_SCHEMES, LocalRun, LocalStore, is_url, local_path
from .object_store import ObjectRun, ObjectStore
from .store import RunStore, Store

T = TypeVar("T")


class _Scheme(msgspec.Struct, frozen=True):
    """What opens the URLs of a scheme."""

    store: Callable[[str], Store]
    run: Callable[[str], RunStore] | None


_SCHEMES: dict[str, _Scheme] = {}
"""The schemes that are registered; URLs of others are those of fsspec."""
_OF_FSSPEC = _Scheme(ObjectStore, ObjectRun)


def is_same_function(first: Any, second: Any) -> bool:
    """Whether two functions or classes are one, or one that was defined again, as a cell of a notebook that is run."""
    return first is second or all(
        getattr(first, name, None) == getattr(second, name, second) for name in ("__module__", "__qualname__")
    )


def register(scheme: str, store: Callable[[str], Store], run: Callable[[str], RunStore] | None = None) -> None:
    """Has URLs of a scheme open a store of one's own, wherever a path is taken.

    >>> shelf = {}
    >>> def take(url):
    ...     return shelf.setdefault(url, tc.MemoryStore(url))
    >>> tc.stores.register("shelf", take)
    >>> report = tc.save("shelf://top/left", {"step": 7})
    >>> tc.load("shelf://top/left")
    {'step': 7}

    Args:
        scheme: what stands before `://`.
        store: returns the store of a checkpoint for its URL.
        run: returns that of a run, for `Manager` and commands; without it, URLs of runs are refused.

    Raises:
        TreeckptError: it is no scheme of a URL, or another one is registered for it, or no functions are given.
    """
    if not isinstance(scheme, str) or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) or scheme in ("file", "local"):
        expected = "a scheme, as mine of mine://path: lower case letters, digits and + . -"
        raise TreeckptError("scheme", expected=expected, found=f"{scheme!r:.80}")
    if not callable(store) or not (run is None or callable(run)):
        raise TreeckptError("scheme", expected="functions of a URL", found=f"{store!r:.80} and {run!r:.80}")
    known = _SCHEMES.get(scheme)
    if known is not None and not (is_same_function(known.store, store) and is_same_function(known.run, run)):
        raise TreeckptError("scheme", expected="one that is not registered", found=f"{scheme!r}, which is")
    _SCHEMES[scheme] = _Scheme(store, run)


for name in OBJECT_SCHEMES:
    register(name, ObjectStore, ObjectRun)


def _scheme_of(url: str) -> _Scheme:
    return _SCHEMES.get(url.partition("://")[0], _OF_FSSPEC)


def following(path: Any, follow_links: bool) -> Any:
    """Returns a local path, or those among several, as a store that follows links; without `follow_links` as it is."""
    if not follow_links:
        return path
    if isinstance(path, (list, tuple)):
        return [following(each, follow_links) for each in path]
    is_path = isinstance(path, (str, os.PathLike)) and not is_url(os.fspath(path))
    return LocalStore(local_path(os.fspath(path)), follow_links=True) if is_path else path


def is_path_or_store(given: object) -> bool:
    """Whether `open_store` takes it."""
    return isinstance(given, (str, os.PathLike, Store))


def open_store(path: str | os.PathLike[str] | Store) -> Store:
    """Returns the store of a path or URL; a store is returned as it is.

    Raises:
        StoreError: the URL's scheme is not known, or its library is not installed.
        CheckpointError: `path` is not a path, or is empty.
    """
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        return _opened(text, _scheme_of(text).store, Store) if is_url(text) else LocalStore(local_path(text))
    if not isinstance(path, Store):
        raise CheckpointError(
            "path",
            expected="a path, a URL or a store",
            found=type(path).__qualname__,
            hint="The path comes first: save(path, tree), load(path, like)",
        )
    return path


def open_run(run: str | os.PathLike[str] | RunStore, *, follow_links: bool | None = None) -> RunStore:
    """Returns the run of a path or URL; a run is returned as it is. Raises as `open_store`."""
    if not isinstance(run, (str, os.PathLike)):
        if isinstance(run, RunStore):
            return run
        raise CheckpointError(
            "run",
            expected="the path or URL of a run, or an ObjectRun",
            found=type(run).__qualname__,
            hint="A store holds one checkpoint; a run is the directory of several" if isinstance(run, Store) else "",
        )
    text = os.fspath(run)
    if not is_url(text):
        return LocalRun(local_path(text), follow_links=follow_links)
    opener = _scheme_of(text).run
    if opener is None:
        expected, scheme = "a scheme whose runs can be opened", text.partition("://")[0]
        hint = f"Give treeckpt.stores.register({scheme!r}, ...) a `run` too"
        raise StoreError(text, expected=expected, found="one registered for checkpoints alone", hint=hint)
    return _opened(text, opener, RunStore)


def _opened(url: str, opener: Callable[[str], T], kind: type[T]) -> T:
    """Returns what a registered function opens.

    Raises:
        StoreError: it is something else.
    """
    opened = opener(url)
    if not isinstance(opened, kind):
        expected = f"a {kind.__name__} from the function that is registered for its scheme"
        raise StoreError(url, expected=expected, found=f"a {type(opened).__qualname__}")
    return opened


def local_directory(path: Any) -> Path | None:
    """Returns the local path that a path leads to, or in which a store has its files; None for anything else."""
    if isinstance(path, Store):
        return path.traits.local_path
    is_path = isinstance(path, (str, os.PathLike)) and os.fspath(path) and not is_url(os.fspath(path))
    return Path(local_path(os.fspath(path))) if is_path else None
