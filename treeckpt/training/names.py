"""What is a parameter called, however its model is wrapped? Names, ties and nested dicts of them, as plain data.

A wrapper (data parallelism, compilation, activation checkpointing) puts a step of its own into the names of what it
wraps, `module.layers.0._orig_mod.weight`. Its hop is dropped where the wrapper stands and nowhere else, so a child
that happens to be called `module` keeps its name. A key of several steps, `("generator", "0.weight")`, stands for one
parameter among several models. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.tree.structure import key_text, parse_path
from ..errors import TreeError

__all__ = ["Key", "get_in", "key_path", "nested", "parse_key", "put_in", "strip_wrappers", "tie_names"]

Key = tuple[str, ...]
"""Steps from the root of the models, or of the optimizers, to what a name stands for; the last is the dotted name."""


def strip_wrappers(name: str, hops: Mapping[str, Sequence[str]]) -> str:
    """The dotted name without what wrappers have added.

    Args:
        hops: by the clean name of the place where wrappers stand, the steps they add there, from the outside in.
    """
    clean: list[str] = []
    pending = list(hops.get("", ()))
    for step in name.split("."):
        if step in pending:  # some wrappers take their own step out already: what comes before is skipped
            del pending[: pending.index(step) + 1]
        else:
            clean.append(step)
            pending = list(hops.get(".".join(clean), ()))
    return ".".join(clean)


def key_path(key: Key) -> str:
    """A key as the text of a path: `generator/0.weight`."""
    return "/".join(key_text(step) for step in key)


def parse_key(text: str) -> Key:
    """The inverse of `key_path`."""
    return tuple(step.removeprefix("~s") if step.startswith("~s") else step for step in parse_path(text))


def nested(pairs: Iterable[tuple[Key, Any]]) -> dict[str, Any]:
    """Nested dicts of (key, value) pairs."""
    root: dict[str, Any] = {}
    for key, value in pairs:
        put_in(root, key, value)
    return root


def put_in(root: dict[str, Any], key: Key, value: Any) -> None:
    """Puts a value where a key says.

    Raises:
        TreeError: something stands there or on the way.
    """
    node = root
    for step in key[:-1]:
        node = node.setdefault(step, {})
    if key[-1] in node:
        raise TreeError(
            key_path(key),
            expected="one value for each name",
            found="two",
            hint="Give several models or optimizers as a dict of names, {'generator': ..., 'discriminator': ...}; "
            "a list is for the parts of one, whose names differ",
        )
    node[key[-1]] = value


def get_in(root: Any, key: Sequence[Any], default: Any = None) -> Any:
    """What stands where a key says, in nested dicts; `default` if nothing does."""
    for step in key:
        if not isinstance(root, Mapping) or step not in root:
            return default
        root = root[step]
    return root


def tie_names(names: Iterable[tuple[Key, int]]) -> dict[int, tuple[Key, ...]]:
    """By identity the sorted names of one object; the first of them is its name, whatever the order of the model."""
    found: dict[int, list[Key]] = {}
    for key, identity in names:
        found.setdefault(identity, []).append(key)
    return {identity: tuple(sorted(keys)) for identity, keys in found.items()}
