"""Paths as text, as indexes, reports and errors have them, and as the keys of a tree; and globs of paths.

A glob means the paths that it matches or equals, and all paths below a path that it equals.
"""

# Paths are given in many forms, and their keys are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from optree import NamedTupleEntry, PyTreeAccessor, PyTreeEntry, StructSequenceEntry

from ...errors import MismatchError, TreeError
from .containers import PerRank, struct_sequence_fields
from .structure import NamedTupleNode, PerRankNode, StructSequenceNode, Structure, containers_of, key_text, rank_key

Selection = str | int | Sequence[Any] | None
"""Globs over paths, and paths as keys; see `globs_of`."""
MAX_KEY_DEPTH = 100
"""Levels of tuples in a key."""
_RANK = re.compile(r"~rank(\*|0|[1-9][0-9]{0,8})")
_TOKEN = re.compile(r"~[(,)]")


def path_text(keys: Iterable[object]) -> str:
    """Returns the path of a leaf or container as text: `("model", "layers.0.weight")` is `model/layers.0.weight`.

    A `/` in a key is written `~1`, a `~` `~0`; positions and integer keys are numbers, and a string that would read as
    one is marked: `("opt", 0, "1")` is `opt/0/~s1`. Such texts are in `Index.entries`, reports, errors and globs.

    >>> tc.path_text(("opt", 0, "a/b"))
    'opt/0/a~1b'

    Args:
        keys: dict keys, field names and positions from the root on, or an accessor of optree; below a `PerRank`
            `PerRank(3)` is the step of rank 3, and `PerRank(...)` that of each rank, `~rank*`.

    Raises:
        TreeError: a key of a kind that no checkpoint holds.
    """
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = "Give a tuple, of one key for a path of one step"
        raise TreeError("keys", expected="the keys of a path, in order", found=f"{keys!r:.60}", hint=hint)
    steps = [_key_of_entry(key) if isinstance(key, PyTreeEntry) else key for key in keys]
    return "/".join(_step(key, f"keys[{number}]") for number, key in enumerate(steps) if key is not _NO_STEP)


def path_keys(text: str) -> tuple[object, ...]:
    """Returns the keys of a path; the inverse of `path_text`: `opt/0/~s1` gives `("opt", 0, "1")`.

    Dict keys have their types (bool, int, float, None, bytes, tuples); positions are integers, fields of namedtuples
    and dataclasses strings. The steps `~rank3` and `~rank*` below a `PerRank` are `PerRank(3)` and `PerRank(...)`.

    >>> tc.path_keys("opt/0/a~1b")
    ('opt', 0, 'a/b')

    Raises:
        MismatchError: no key has that text.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = "path_text(keys) makes it of keys"
        raise MismatchError("path", expected="a path as text", found=f"{text!r:.60}", hint=hint)
    return tuple(_key_of(step, text) for step in text.split("/")) if text else ()


_NO_STEP = object()


def _key_of_entry(entry: PyTreeEntry) -> object:
    """Returns the key of an entry of an accessor; `_NO_STEP` for one into a mark that has no step in paths."""
    if entry.type is PerRank:
        return PerRank(...)
    if "__treeckpt_leaf__" in vars(entry.type):
        return _NO_STEP
    # fields have their names in paths, positions in optree
    if isinstance(entry, StructSequenceEntry):
        return struct_sequence_fields(entry.type)[0][entry.entry]
    return entry.field if isinstance(entry, NamedTupleEntry) else entry.entry


def _step(key: object, where: str) -> str:
    if type(key) is not PerRank:
        return key_text(key, where)
    if key.value is ...:
        return "~rank*"
    if type(key.value) is not int or key.value < 0:
        raise TreeError(where, expected="PerRank of a rank, or PerRank(...)", found=f"PerRank({key.value!r:.40})")
    return rank_key(key.value)


def _key_of(step: str, text: str) -> object:
    if rank := _RANK.fullmatch(step):
        return PerRank(... if rank[1] == "*" else int(rank[1]))
    try:
        key = _Parser(step).key(0)
        if key_text(key) == step:  # one key has one text
            return key
    except (ValueError, TreeError):
        pass
    raise MismatchError(
        text[:200],
        expected="steps as path_text writes them",
        found=f"the step {step!r:.80}",
        hint="Write ~ in a key as ~0, / as ~1, and a string that reads as a number, or is empty, after ~s",
    )


_MARKED: dict[str, Callable[[str], object]] = {
    "s": str,
    "b": lambda text: {"0": False, "1": True}.get(text),
    "n": lambda text: None,
    "f": float,
    "x": bytes.fromhex,
}
"""The function that makes a key of the text behind a mark, by the letter of the mark; the text may have any form."""


class _Parser:
    """Parses the text of one key, from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def key(self, depth: int) -> object:
        """Parses a key: all of the text, or within a tuple up to the next part.

        Raises:
            ValueError: it is none.
        """
        text = self._text
        if text.startswith("~(", self._at):
            return self._tuple(depth)
        end = _TOKEN.search(text, self._at) if depth else None
        stop = end.start() if end is not None else len(text)
        own, self._at = text[self._at : stop], stop
        if own[:1] == "~" and own[1:2] in _MARKED:
            return _MARKED[own[1]](own[2:])
        if re.fullmatch(r"-?[0-9]+", own):
            return int(own)
        return own.replace("~1", "/").replace("~0", "~")

    def _tuple(self, depth: int) -> tuple[object, ...]:
        if depth == MAX_KEY_DEPTH:
            raise ValueError(self._text)
        parts: list[object] = []
        self._at += 2
        if self._text.startswith("~)", self._at):
            self._at += 2
            return ()
        while True:
            parts.append(self.key(depth + 1))
            token = self._text[self._at : self._at + 2]
            self._at += 2
            if token == "~)":
                return tuple(parts)
            if token != "~,":
                raise ValueError(self._text)


# globs --------------------------------------------------------------------------------------------------------------
_WILD = re.compile(r"[*?[]")
_FOREIGN_STEP = re.compile(r"(^|/)([0-9]+|value)(/|$)")
"""A step that a path of optree has in the place of another one."""


class Globs:
    """A set of globs, compiled: a set of names, and one regular expression for those with `*`, `?` or `[`."""

    def __init__(self, globs: Iterable[str]) -> None:
        self._all = frozenset(globs)
        # `model/` means what is below `model`
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
    slash = path.find("/")
    while slash >= 0:
        yield path[:slash]
        slash = path.find("/", slash + 1)


@lru_cache(maxsize=64)
def compile_globs(globs: tuple[str, ...]) -> Globs:
    """Returns the globs of a tuple, compiled once and cached."""
    return Globs(globs)


def similar_paths(name: str, paths: Iterable[str]) -> list[str]:
    """Returns at most 3 paths, of leaves or of containers above them, that are most like a name."""
    # difflib takes a second for 10,000 names: more would keep an error waiting
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


def globs_of(given: Selection, what: str = "select") -> tuple[str, ...] | None:
    """Returns globs as a tuple; a path given as keys becomes its text, as `path_text` writes it.

    A text is a glob. A tuple with a key that is no text (`("opt", 0)`), a number or an accessor of optree is one path.
    Every other sequence holds several of these; in it each tuple is a path, of texts alone too.

    Args:
        what: the name of the argument.

    Raises:
        MismatchError: something else was given, as a compiled regular expression.
    """
    if given is None:
        return None
    if isinstance(given, str):
        return (given,)
    several: Any = given  # narrowed types of tuples are partly unknown
    if isinstance(given, (int, PyTreeAccessor)) or (isinstance(given, tuple) and any(map(_is_key, given))):
        several = [given]
    if isinstance(several, (bytes, bytearray, Mapping)) or not isinstance(several, Iterable):
        raise _no_glob(given, what)
    return tuple([as_path(one, what) for one in several])


def with_field_names(structure: Structure) -> Callable[[str], str]:
    """Returns a function that gives a glob the steps of our paths in the place of those that optree's paths have.

    A field of a namedtuple has its name in a path, and its number in optree; a `PerRank` has `~rank*`, and `value` in
    optree. Neither means anything else there. A glob with `*`, `?` or `[` stays as it is.
    """
    kinds = (NamedTupleNode, StructSequenceNode, PerRankNode)

    @cache
    def steps() -> dict[str, dict[str, str]]:
        return {
            path: {"value": "~rank*"}
            if isinstance(node, PerRankNode)
            else {str(number): key_text(field) for number, field in enumerate(node.fields)}
            for node, path, _ in containers_of(structure)
            if isinstance(node, kinds)
        }

    def ours(glob: str) -> str:
        if not _FOREIGN_STEP.search(glob) or _WILD.search(glob):
            return glob
        path = ""
        for step in glob.split("/"):
            path = "/".join(filter(None, (path, steps().get(path, {}).get(step, step))))
        return path

    return ours


def as_path(given: Any, what: str) -> str:
    """Returns a path as text: a text as it is, or the text of its keys.

    Raises:
        MismatchError: something else was given.
    """
    return given if isinstance(given, str) else _path_of(given, what)


def _is_key(element: object) -> bool:
    """Whether an element of a tuple is a key of a path, and neither a glob nor a path."""
    return not isinstance(element, (str, PyTreeAccessor, re.Pattern))


def _path_of(path: Any, what: str) -> str:
    """Returns the text of a path that is given as keys."""
    keys: Any = (path,) if isinstance(path, int) and not isinstance(path, bool) else path
    if not isinstance(keys, tuple):
        raise _no_glob(path, what)
    try:
        return path_text(keys)
    except TreeError as error:
        raise _no_glob(path, what) from error


def _no_glob(given: object, what: str) -> MismatchError:
    hint = "A path is a text, as treeckpt show prints it, or its keys, as treeckpt.path_keys gives them"
    if isinstance(given, re.Pattern):
        hint = "Globs know *, ? and [...]; or list the paths of treeckpt.inspect(path).by_path that it matches"
    return MismatchError(what, expected="globs, or paths as tuples of keys", found=f"{given!r:.80}", hint=hint)
