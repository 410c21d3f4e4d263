"""Globs of paths. A glob means the paths that it matches or equals, and all paths below a path that it equals."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from ...errors import MismatchError

_WILD = re.compile(r"[*?[]")


class Globs:
    """A set of globs, compiled: a set of names, and one regular expression for those with `*`, `?` or `[`."""

    def __init__(self, globs: Iterable[str]) -> None:
        self._all = frozenset(globs)
        self._above = frozenset(glob.rstrip("/") for glob in self._all)
        wild = sorted(glob for glob in self._all if _WILD.search(glob))
        self._wild = re.compile("|".join(map(fnmatch.translate, wild))) if wild else None

    def match(self, path: str) -> bool:
        """Returns whether one of them means a path."""
        if path in self._all or any(above in self._above for above in _ancestors(path)):
            return True
        return self._wild is not None and self._wild.match(path) is not None

    def unused(self, paths: Sequence[str]) -> list[str]:
        """Returns the globs that mean none of these paths."""
        exact, above = set(paths), {name for path in paths for name in _ancestors(path)}
        left = [glob for glob in sorted(self._all) if glob not in exact and glob.rstrip("/") not in above]
        return [glob for glob in left if not any(map(re.compile(fnmatch.translate(glob)).match, paths))]


def _ancestors(path: str) -> Iterator[str]:
    """Yields the paths of the containers above a path."""
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)


@lru_cache(maxsize=64)
def compile_globs(globs: tuple[str, ...]) -> Globs:
    """Returns the globs of a tuple, compiled once and cached."""
    return Globs(globs)


def similar_paths(name: str, paths: Iterable[str]) -> list[str]:
    """Returns at most 3 paths, of leaves or of containers above them, that are most like a name."""
    names = sorted({known for path in paths for known in (path, *_ancestors(path))})
    return difflib.get_close_matches(name, names[:10_000], n=3)


def check_used(what: str, globs: Sequence[str] | None, paths: Iterable[str]) -> None:
    """Checks that each glob means some path, since a typo would look like success.

    Args:
        what: the name of the argument that holds the globs.
        paths: all paths that they can mean.

    Raises:
        MismatchError: naming such a glob, and similar paths.
    """
    if not globs:
        return
    known = list(paths)
    for glob in compile_globs(tuple(globs)).unused(known):
        near = similar_paths(glob, known)
        raise MismatchError(
            glob,
            expected=f"each glob of {what} to mean some leaf",
            found=f"none of {len(known)}" + (f"; near to it are {', '.join(near)}" if near else ""),
            hint="Mend the name, or pass strict=False to go on without",
        )
