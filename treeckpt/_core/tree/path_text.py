"""Public conversions between the text of a path, as indexes, reports and errors have it, and the keys of a tree."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ...errors import MismatchError, TreeError
from .containers import PerRank
from .structure import key_text, rank_key

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
        keys: dict keys, field names and positions from the root on; below a `PerRank` `PerRank(3)` is the step of rank
            3, and `PerRank(...)` that of each rank, `~rank*`.

    Raises:
        TreeError: a key of a kind that no checkpoint holds.
    """
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = "Give a tuple, of one key for a path of one step"
        raise TreeError("keys", expected="the keys of a path, in order", found=f"{keys!r:.60}", hint=hint)
    steps = list(keys)
    return "/".join(_step(key, f"keys[{position}]") for position, key in enumerate(steps))


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


def _step(key: object, where: str) -> str:
    if type(key) is not PerRank:
        return key_text(key, where)
    if key.value is ...:
        return "~rank*"
    if type(key.value) is not int or key.value < 0:
        raise TreeError(where, expected="PerRank of a rank, or PerRank(...)", found=f"PerRank({key.value!r:.40})")
    return rank_key(key.value)


def _key_of(step: str, text: str) -> object:
    if found := _RANK.fullmatch(step):
        return PerRank(... if found[1] == "*" else int(found[1]))
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
"""By the letter of a mark: the function that returns the key of the rest, of a text that may be of another form."""


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
