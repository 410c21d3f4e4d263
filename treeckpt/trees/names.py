"""Dotted names for the leaves of a tree, as state dicts have them, and the way back.

A name is the keys on the way to a leaf, joined by dots: {"model": {"layers": [w]}} has `model.layers.0`. Names forget
what kind a container is, what type a key has, and containers without leaves; `like` gives that back. Two leaves never
share a name: where they would, as `a.b` beside {"a": {"b"}}, an error names both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..arrays.stateful import expanded
from ..core.tree.containers import PerRank, flatten_one_level
from ..core.tree.flatten import replace_leaves
from ..core.tree.recursion import Recursive, trampoline
from ..core.tree.structure import key_text
from ..errors import MismatchError, TreeError

__all__ = ["flatten_names", "unflatten_names"]


def flatten_names(tree: Any, *, separator: str = ".", namespace: str = "") -> dict[str, Any]:
    """The leaves of a tree by dotted name, in order; the very objects, not copies.

    A key that is not text stands by its text: 3 as `3`. What is under `PerRank` keeps that mark, leaf by leaf. A tree
    that is a leaf itself has the name "".

    Raises:
        TreeError: two leaves would have the same name.
    """
    return {name: leaf for name, _, leaf in _named(tree, separator, namespace)}


def _check_separator(separator: str) -> None:
    if not separator:
        raise TreeError("separator", expected="text between the keys of a name", found="none", hint='The usual is "."')


def _named(tree: Any, separator: str, namespace: str) -> list[tuple[str, str, Any]]:
    """(name, path, leaf) of each leaf."""
    _check_separator(separator)
    found: list[tuple[str, str, Any]] = []
    paths: dict[str, str] = {}

    def walk(node: Any, steps: tuple[str, ...], path: str, own: bool) -> Recursive[None]:
        taken = flatten_one_level(node, path, namespace, 0)
        if taken is None:
            name = separator.join(steps)
            if (other := paths.setdefault(name, path)) != path:
                raise TreeError(
                    path,
                    expected="a name of its own",
                    found=f"{name!r}, which is that of {other} too",
                    hint="Rename a key, or choose a separator that no key holds",
                )
            found.append((name, path, PerRank(node) if own else node))
        elif type(node) is PerRank:
            yield walk(node.value, steps, f"{path}/~rank*" if path else "~rank*", True)
        else:
            for key, child in zip(taken.keys, taken.children, strict=True):
                text = key_text(key, path)
                yield walk(
                    child, (*steps, key if isinstance(key, str) else text), f"{path}/{text}" if path else text, own
                )

    trampoline(walk(expanded(tree, namespace=namespace), (), "", False))
    return found


def unflatten_names(names: Mapping[str, Any], like: Any = None, *, separator: str = ".", namespace: str = "") -> Any:
    """A tree of named leaves; the inverse of `flatten_names`.

    Args:
        like: a tree with the wanted containers and keys; its leaves do not matter. Without it the names become dicts
            in dicts, all keys text.

    Raises:
        MismatchError: with like, a name that it lacks or has beyond.
        TreeError: without like, a name that is a leaf and a container: `a` beside `a.b`.
    """
    if like is None:
        return _nested(names, separator)
    like = expanded(like, namespace=namespace)
    wanted = _named(like, separator, namespace)
    _check_names([name for name, _, _ in wanted], names)
    leaves = (_bare(names[name], leaf) for name, _, leaf in wanted)
    return replace_leaves(like, leaves, namespace=namespace)


def _bare(leaf: Any, wanted: Any) -> Any:
    """A leaf for a place under `PerRank` without the mark, which that place has already."""
    return leaf.value if type(wanted) is PerRank and type(leaf) is PerRank else leaf


def _check_names(wanted: Iterable[str], names: Mapping[str, Any]) -> None:
    asked = dict.fromkeys(wanted)
    missing = [name for name in asked if name not in names]
    unexpected = [name for name in names if name not in asked]
    if missing or unexpected:
        texts = [f"{len(some)} {what}: {', '.join(map(repr, some[:5]))}" for what, some in
                 (("missing", missing), ("not asked for", unexpected)) if some]  # fmt: skip
        raise MismatchError(
            (missing or unexpected)[0],
            expected="the names of like",
            found="; ".join(texts),
            hint="Leave out what like lacks, and add what it has beyond",
        )


def _nested(names: Mapping[str, Any], separator: str) -> Any:
    _check_separator(separator)
    root: dict[str, Any] = {}
    inner = {id(root)}  # of the dicts made here: a leaf may be a dict too
    for name, leaf in names.items():
        *above, last = name.split(separator)
        node = root
        for depth, step in enumerate(above):
            if step not in node:
                node[step] = {}
                inner.add(id(node[step]))
            elif id(node[step]) not in inner:
                raise _both(name, separator.join(above[: depth + 1]))
            node = node[step]
        if last in node:
            raise _both(name, name)
        node[last] = leaf
    return root


def _both(name: str, clash: str) -> TreeError:
    return TreeError(
        name,
        expected="names of which none is the beginning of another",
        found=f"{clash!r} as a leaf and as a container",
        hint="Pass like=, which tells dots in keys from levels",
    )
