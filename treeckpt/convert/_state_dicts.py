"""Training states of ours as the state dicts that torch's optimizers load: by number in a file, by name for DCP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .._arrays.base import LazyArray
from .._core.tree.flatten import flatten
from .._core.tree.structure import DictNode, key_text, parse_path
from ._contents import Contents, Finding, subtree, tree_of

_OWN_FORM = "state_dict"
"""The key of param groups that have the state of an optimizer with a `state_dict` of its own."""


def with_state_dicts(contents: Contents, *, numbered: bool) -> Contents:
    """Returns a training state with the state dict of each optimizer at `optimizer`; any other tree as it is.

    Numbers count parameters in the order of the groups, and in a group in that of the model's state dict.

    Args:
        numbered: parameters have numbers, as `Optimizer.state_dict` has it; else names, as `get_state_dict`.
    """
    root = contents.structure
    if not isinstance(root, DictNode) or not {"model", "optimizer", "param_groups"} <= set(root.keys):
        return contents
    groups, state = (tree_of(subtree(contents, name)) for name in ("param_groups", "optimizer"))
    if not isinstance(groups, dict) or not isinstance(state, dict):
        return contents
    made = _state_dicts(groups, state, _positions(contents), numbered=numbered)
    if made is None:
        found = Finding("param_groups", "groups as torch's optimizers have them", "others", "what they are")
        return msgspec.structs.replace(contents, findings=(*contents.findings, found))
    structure, leaves = flatten(made)
    keys = tuple(key for key in root.keys if key != "param_groups")
    children = dict(zip(root.keys, root.children, strict=True)) | {"optimizer": structure}
    by_key: dict[str, list[tuple[str, Any]]] = {key_text(key): [] for key in keys}
    for path, leaf in contents.leaves:
        by_key.get(path.partition("/")[0], []).append((path, leaf))
    by_key["optimizer"] = [(f"optimizer/{path}", leaf) for path, leaf in leaves]
    style = "by number" if numbered else "by name"
    note = Finding("optimizer", "state dicts", "state by parameter", f"the optimizer's state dict, parameters {style}")
    return msgspec.structs.replace(
        contents,
        structure=DictNode(keys, tuple(children[key] for key in keys)),
        leaves=tuple(pair for key in keys for pair in by_key[key_text(key)]),
        findings=(*contents.findings, note),
    )


def _positions(contents: Contents) -> dict[str, int]:
    """Returns the place of each parameter in the model's state dict, that of the first one that it is tied to."""
    found: dict[str, int] = {}
    firsts: dict[Any, int] = {}
    for position, (path, leaf) in enumerate(contents.leaves):
        if path.startswith("model/"):
            storage = leaf.storage if isinstance(leaf, LazyArray) else None
            key = path if storage is None else (storage.address, leaf.spec.shape)
            found[path.removeprefix("model/")] = firsts.setdefault(key, position)
    return found


def _state_dicts(
    groups: Mapping[str, Any], state: Mapping[str, Any], positions: Mapping[str, int], *, numbered: bool
) -> dict[Any, Any] | None:
    """Returns the state dict of an optimizer, or of several by name; None for groups of another form."""
    if {"members", "values"} <= groups.keys():
        return None if _OWN_FORM in groups else _state_dict(groups, state, positions, numbered=numbered)
    found: dict[Any, Any] = {}
    for name, inner in groups.items():
        made = None
        if isinstance(inner, dict):
            made = _state_dicts(inner, state.get(name, {}), positions, numbered=numbered)
        if made is None:
            return None
        found[name] = made
    return found


def _state_dict(
    groups: Mapping[str, Any], state: Mapping[str, Any], positions: Mapping[str, int], *, numbered: bool
) -> dict[str, Any]:
    """Returns the state dict of one optimizer."""
    order: Sequence[str] = groups.get("order", ())
    places = {name: number for number, name in enumerate(order)} or positions
    own: dict[Any, Any] = {}
    made: list[dict[str, Any]] = []
    count = 0
    for label, values in groups["values"].items():
        names = sorted(groups["members"][label], key=lambda name: places.get(name, len(places)))
        steps = [tuple(step.removeprefix("~s") for step in parse_path(name)) for name in names]
        ids = list(range(count, count + len(names))) if numbered else [".".join(one) for one in steps]
        count += len(names)
        for key, one in zip(ids, steps, strict=True):
            node: Any = state
            for step in one:
                node = node.get(step, {})
            if node:
                own[key] = node
        made.append({**values, "params": ids})
    return {"state": own | groups.get("shared", {}), "param_groups": made}
