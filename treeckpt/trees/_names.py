"""Flattens a tree to dotted names, as in state dicts, and builds a tree of dotted names.

A name is the keys of a leaf's path, joined by dots: {"model": {"layers": [w]}} has `model.layers.0`. Names do not
contain the kinds of containers, the types of keys, or containers without leaves; `like` supplies these, and without it
a level whose keys are the numbers from 0 on is a list. Two leaves never share a name: where they would, as `a.b` beside
{"a": {"b"}}, an error names both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._arrays.stateful import state_tree
from .._core.tree.containers import PerRank
from .._core.tree.flatten import flatten, replace_leaves
from .._core.tree.structure import index_path, parse_path
from ..errors import MismatchError, TreeError


def flatten_names(tree: Any, *, separator: str = ".", namespace: str = "") -> dict[str, Any]:
    """Returns the leaves by dotted name, as in a state dict; the same objects, not copies.

    A key that is no string is converted to text: 3 to `3`. Each leaf under `PerRank` is wrapped in `PerRank`. The name
    of a tree that is a leaf itself is "".

    >>> tc.trees.flatten_names({"model": {"layers": [1.0, 2.0]}})
    {'model.layers.0': 1.0, 'model.layers.1': 2.0}

    Raises:
        TreeError: two leaves would have the same name, as `a.b` beside {"a": {"b"}}; it names both.
    """
    return {name: leaf for name, _, leaf in _named(tree, separator, namespace)}


def _check_separator(separator: str) -> None:
    if not separator:
        raise TreeError("separator", expected="text between the keys of a name", found="none", hint='The usual is "."')


def _named(tree: Any, separator: str, namespace: str) -> list[tuple[str, str, Any]]:
    """Returns (name, path, leaf) of each leaf."""
    _check_separator(separator)
    named: list[tuple[str, str, Any]] = []
    paths: dict[str, str] = {}
    _, leaves = flatten(state_tree(tree, namespace=namespace), namespace=namespace)
    for path, leaf in ((index_path(path, 0), leaf) for path, leaf in leaves):
        steps = path.split("/") if path else []
        own = "~rank*" in steps
        keys = (step[2:] if step.startswith("~s") else parse_path(step)[0] for step in steps if step != "~rank*")
        name = separator.join(keys)
        if (other := paths.setdefault(name, path)) != path:
            raise TreeError(
                path,
                expected="a name of its own",
                found=f"{name!r}, which is that of {other} too",
                hint="Rename a key, or choose a separator that no key holds",
            )
        named.append((name, path, PerRank(leaf) if own else leaf))
    return named


def unflatten_names(named: Mapping[str, Any], like: Any = None, *, separator: str = ".", namespace: str = "") -> Any:
    """Returns a tree of named leaves: the inverse of `flatten_names`; the leaves are the same objects.

    >>> tc.trees.unflatten_names({"model.layers.0": 3.0, "model.layers.1": 4.0})
    {'model': {'layers': [3.0, 4.0]}}

    Args:
        like: a tree with the wanted containers and keys, which names do not contain. Without it the result is nested
            dicts with string keys, and lists where the keys are the numbers 0, 1, 2 and so on, without a gap; a tuple
            comes back as a list then, and so does a dict with these keys.

    Raises:
        MismatchError: with like, missing or unexpected names.
        TreeError: without like, a name that is a leaf and a container.
    """
    if like is None:
        return _nested(named, separator)
    like = state_tree(like, namespace=namespace)
    wanted = _named(like, separator, namespace)
    _check_names([name for name, _, _ in wanted], named)
    pairs = ((named[name], leaf) for name, _, leaf in wanted)
    # a wanted place under `PerRank` takes the leaf without its own
    leaves = (new.value if type(old) is PerRank and type(new) is PerRank else new for new, old in pairs)
    return replace_leaves(like, leaves, namespace=namespace)


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
    inner = {id(root)}  # ids of the dicts that are created here: a leaf may be a dict too
    places: list[tuple[dict[str, Any], str]] = []
    for name, leaf in names.items():
        *above, last = name.split(separator)
        node = root
        for depth, step in enumerate(above):
            if step not in node:
                node[step] = {}
                inner.add(id(node[step]))
                places.append((node, step))
            elif id(node[step]) not in inner:
                raise _both(name, separator.join(above[: depth + 1]))
            node = node[step]
        if last in node:
            raise _both(name, name)
        node[last] = leaf
    for node, step in reversed(places):  # those inside first
        node[step] = _as_list(node[step])
    return _as_list(root)


def _as_list(node: dict[str, Any]) -> Any:
    """Returns the children of a dict whose keys are the numbers from 0 on as a list; any other dict as it is."""
    numbers = [str(number) for number in range(len(node))]
    return [node[number] for number in numbers] if node and node.keys() == set(numbers) else node


def _both(name: str, clash: str) -> TreeError:
    return TreeError(
        name,
        expected="names of which none is the beginning of another",
        found=f"{clash!r} as a leaf and as a container",
        hint="Pass like=, which tells dots in keys from levels",
    )
