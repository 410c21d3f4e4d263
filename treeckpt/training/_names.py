"""Parameter names that do not depend on wrappers, ties, and nested dicts of them, as plain data.

A wrapper (data parallelism, compilation, activation checkpointing) adds a step to the names of the parameters inside
it, `module.layers.0._orig_mod.weight`. The step is removed at the wrapper and nowhere else, so a child named `module`
keeps its name. A key of several steps, `("generator", "0.weight")`, is one parameter among several models. This module
does not use torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._core.tree.dict_attributes import METADATA
from .._core.tree.structure import key_text, parse_path
from ..errors import TreeError

Key = tuple[str, ...]
"""Steps from the root of the models, or of the optimizers, to an object; the last is the dotted name."""


def strip_wrappers(name: str, wrapper_steps: Mapping[str, Sequence[str]]) -> str:
    """Returns the dotted name without the steps that wrappers added.

    Args:
        wrapper_steps: by the clean name of the wrapped module, the steps that its wrappers add, from the outside in.
    """
    clean: list[str] = []
    pending = list(wrapper_steps.get("", ()))
    for step in name.split("."):
        if step in pending:  # some wrappers remove their own step already: those before it are skipped
            del pending[: pending.index(step) + 1]
        else:
            clean.append(step)
            pending = list(wrapper_steps.get(".".join(clean), ()))
    return ".".join(clean)


def key_path(key: Key) -> str:
    """Returns a key as the text of a path: `generator/0.weight`."""
    return "/".join(key_text(step) for step in key)


def parse_key(text: str) -> Key:
    """Returns the key of a path; the inverse of `key_path`."""
    return tuple(step.removeprefix("~s") if step.startswith("~s") else step for step in parse_path(text))


def nested(pairs: Iterable[tuple[Key, Any]]) -> dict[str, Any]:
    """Returns nested dicts of (key, value) pairs."""
    root: dict[str, Any] = {}
    for key, value in pairs:
        put_in(root, key, value)
    return root


def with_metadata(tree: dict[str, Any], metadata: Mapping[Key, OrderedDict[str, Any]]) -> dict[str, Any]:
    """Returns the nested dicts of several models, that of each an OrderedDict with its metadata, as torch gives one.

    Args:
        metadata: by the key of each model; empty where a model has none.
    """
    for key, own in metadata.items():
        found = get_in(tree, key)
        if found is None:
            continue  # all of this model was left out
        made: Any = OrderedDict(found)
        if own:
            setattr(made, METADATA, own)
        if key:
            get_in(tree, key[:-1])[key[-1]] = made
        else:
            tree = made
    return tree


def put_in(root: dict[str, Any], key: Key, value: Any) -> None:
    """Sets the value of a key in nested dicts.

    Raises:
        TreeError: the key, or a prefix of it, has a value.
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
    """Returns the value of a key in nested dicts, or `default`."""
    for step in key:
        if not isinstance(root, Mapping) or step not in root:
            return default
        root = root[step]
    return root


def tie_names(names: Iterable[tuple[Key, int]]) -> dict[int, tuple[Key, ...]]:
    """Returns the sorted names of each object by identity; the first is its name, independent of the model's order."""
    found: dict[int, list[Key]] = {}
    for key, identity in names:
        found.setdefault(identity, []).append(key)
    return {identity: tuple(sorted(keys)) for identity, keys in found.items()}
