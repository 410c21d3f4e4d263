"""Which paths do globs mean? Each those that it matches or names, and all that lies below a named one."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from ...errors import MismatchError

__all__ = ["Globs", "check_used", "compile_globs"]

_WILD = re.compile(r"[*?[]")


class Globs:
    """Some globs, ready to be compared: by a set of names, and by one expression for those with `*`, `?` or `[`."""

    def __init__(self, globs: Iterable[str]) -> None:
        self._all = frozenset(globs)
        self._above = frozenset(glob.rstrip("/") for glob in self._all)
        wild = sorted(glob for glob in self._all if _WILD.search(glob))
        self._wild = re.compile("|".join(map(fnmatch.translate, wild))) if wild else None

    def match(self, path: str) -> bool:
        """Whether one of them means a path."""
        if path in self._all or any(above in self._above for above in _above(path)):
            return True
        return self._wild is not None and self._wild.match(path) is not None

    def idle(self, paths: Sequence[str]) -> list[str]:
        """Those that mean none of these paths."""
        exact, above = set(paths), {name for path in paths for name in _above(path)}
        left = [glob for glob in sorted(self._all) if glob not in exact and glob.rstrip("/") not in above]
        return [glob for glob in left if not any(map(re.compile(fnmatch.translate(glob)).match, paths))]


def _above(path: str) -> Iterator[str]:
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)


@lru_cache(maxsize=64)
def compile_globs(globs: tuple[str, ...]) -> Globs:
    """The globs of a tuple, compiled once."""
    return Globs(globs)


def check_used(what: str, globs: Sequence[str] | None, paths: Iterable[str]) -> None:
    """Refuses globs that mean nothing, since those of a typo would look like success.

    Args:
        what: the argument that gave them.
        paths: all that they could mean.

    Raises:
        MismatchError: naming such a glob, and what it may have meant.
    """
    if not globs:
        return
    known = list(paths)
    for glob in compile_globs(tuple(globs)).idle(known):
        names = sorted({name for path in known for name in (path, *_above(path))})
        near = difflib.get_close_matches(glob, names[:10_000], n=3)
        raise MismatchError(
            glob,
            expected=f"each glob of {what} to mean some leaf",
            found=f"none of {len(known)}" + (f"; near to it are {', '.join(near)}" if near else ""),
            hint="Mend the name, or pass strict=False to go on without",
        )
