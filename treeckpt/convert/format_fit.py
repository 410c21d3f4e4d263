"""The containers, values, dtypes and ties that each format holds, and the changes to all else, found before writing."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ..arrays.lazy import LazyArray
from ..arrays.registry import encodable
from ..core.tree.recursion import Recursive, trampoline
from ..core.tree.structure import DictNode, ListNode, OrderedDictNode, Structure, TupleNode, key_text, keys_of
from ..errors import TreeError
from ..trees.names import flatten_names
from .contents import Contents, Finding, lower_containers, map_leaves, tree_of
from .pickle_reader import brief
from .safetensors_files import TAGS
from .ties import Tie, ties_of

__all__ = ["NOTHING", "FittedContents", "fit_dcp", "fit_safetensors", "fit_torch", "refuse_losses"]

NOTHING = "nothing"
"""What a leaf becomes that is not written."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_WRITTEN = "tensors of torch's dtypes"
_TREE = "None, numbers, text, bytes, sets of these, and torch's dtypes, sizes and devices"


class FittedContents(msgspec.Struct, frozen=True):
    """The part of some contents that a format holds."""

    contents: Contents
    ties: dict[str, Tie]
    names: dict[str, str] = {}
    """By path, the name in a format with flat names."""


class _FormatCheck:
    """Leaves of one format, one by one; what it meets it notes."""

    def __init__(self, holds: str) -> None:
        self.holds = holds
        self.findings: list[Finding] = []
        self.forms: dict[tuple[str, str], list[str]] = {}
        """Changes of form that concern many leaves alike: said once."""

    def lose(self, path: str, found: str, becomes: str) -> None:
        self.findings.append(Finding(path, self.holds, found, becomes, True))

    def note(self, path: str, found: str, becomes: str) -> None:
        self.forms.setdefault((found, becomes), []).append(path)

    def all(self) -> tuple[Finding, ...]:
        notes = [
            Finding(
                paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more", self.holds, found, becomes
            )
            for (found, becomes), paths in self.forms.items()
        ]
        return (*self.findings, *notes)


def _torch_has(dtype: str) -> bool:
    import torch

    return isinstance(vars(torch).get(dtype), torch.dtype)


def _array(check: _FormatCheck, path: str, lazy: LazyArray, *, kinds: bool) -> LazyArray | None:
    """An array as a tensor; None if it cannot be one."""
    spec = lazy.spec
    if spec.kind == "numpy":
        if not _torch_has(spec.dtype):
            check.lose(path, f"an array of {spec.dtype}", "None")
            return None
        check.note(path, "an array of numpy", "a tensor")
    elif spec.kind == "buffer" or (not kinds and (spec.kind != "tensor" or spec.requires_grad)):
        check.note(path, f"a {spec.kind}" + ", requires_grad" * spec.requires_grad, "a plain tensor")
        return LazyArray(msgspec.structs.replace(spec, kind="tensor", requires_grad=False), lazy.read, lazy.storage)
    return (
        LazyArray(msgspec.structs.replace(spec, kind="tensor"), lazy.read, lazy.storage)
        if spec.kind == "numpy"
        else lazy
    )


def _is_plain(value: Any) -> bool:
    """Whether torch.load takes a value with weights_only=True."""
    if type(value) in (set, bytearray):
        return type(value) is bytearray or all(type(item) in _SCALARS for item in value)
    if type(value) is collections.Counter:
        return all(type(item) in _SCALARS for pair in value.items() for item in pair)
    if type(value).__module__.partition(".")[0] == "torch":
        return encodable(value)
    return type(value) in _SCALARS


def _value(check: _FormatCheck, path: str, value: Any) -> Any:
    if isinstance(value, (np.bool_, np.integer, np.floating, np.complexfloating)) and type(value.item()) in _SCALARS:
        check.note(path, f"a {type(value).__name__} of numpy", f"a Python {type(value.item()).__name__}")
        return value.item()
    if _is_plain(value):
        return value
    check.lose(path, f"{type(value).__module__}.{type(value).__qualname__} {brief(value)}", "None")
    return None


def _leaves(contents: Contents, check: _FormatCheck, *, kinds: bool) -> Contents:
    made: dict[int, LazyArray | None] = {}  # the same array is met again where it is tied

    def change(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, LazyArray):
            return _value(check, path, leaf)
        if id(leaf) not in made:
            made[id(leaf)] = _array(check, path, leaf, kinds=kinds)
        return made[id(leaf)]

    changed = map_leaves(contents, change)
    return msgspec.structs.replace(changed, findings=(*changed.findings, *check.all()))


def fit_torch(contents: Contents) -> FittedContents:
    """For a file of torch.save that opens with weights_only=True."""
    contents = lower_containers(contents, frozenset((DictNode, OrderedDictNode, ListNode, TupleNode)))
    contents = _leaves(contents, _FormatCheck(f"{_WRITTEN}, {_TREE}"), kinds=True)
    return FittedContents(contents, ties_of(contents))


def fit_dcp(contents: Contents) -> FittedContents:
    """For a DCP directory: a dict at the root, keys as text, each tensor by itself.

    Raises:
        TreeError: the root is no dict, or two leaves would have one name.
    """
    if not isinstance(contents.structure, (DictNode, OrderedDictNode)):
        raise TreeError(
            contents.label, expected="a dict at the root of a DCP checkpoint", found="another tree",
            hint="Take a part that is a dict (subtree=...)",
        )  # fmt: skip
    contents = lower_containers(contents, frozenset((DictNode, ListNode, TupleNode)))
    check = _FormatCheck(f"{_WRITTEN}, {_TREE}, in dicts with text as keys")
    trampoline(_check_keys(contents.structure, "", check))
    contents = _leaves(contents, check, kinds=False)
    ties = ties_of(contents)
    told = [Finding(path, "each array by itself", f"a tie of {tie.of}", "a copy") for path, tie in ties.items()]
    _names(contents)
    return FittedContents(msgspec.structs.replace(contents, findings=(*contents.findings, *told)), {})


def _check_keys(node: Structure, path: str, check: _FormatCheck) -> Recursive[None]:
    if node is None:
        return
    for key, child in zip(keys_of(node, path), node.children, strict=True):
        below = f"{path}/{key_text(key, path)}" if path else key_text(key, path)
        if isinstance(node, DictNode) and type(key) is not str:
            check.note(below, f"a key of type {type(key).__name__}", "text")
        if isinstance(child, DictNode) and not child.children:
            check.note(below, "an empty dict", "nothing")
        yield _check_keys(child, below, check)


def _names(contents: Contents) -> dict[str, str]:
    """By path, dotted names.

    Raises:
        TreeError: two leaves have the same.
    """
    numbered = map_leaves(contents, lambda path, _: path)
    return {path: name for name, path in flatten_names(tree_of(numbered)).items()}


def fit_safetensors(contents: Contents) -> FittedContents:
    """For safetensors: arrays by name.

    Raises:
        TreeError: two leaves would have one name, or there are no arrays.
    """
    contents = lower_containers(contents, frozenset((DictNode, ListNode, TupleNode)))
    check = _FormatCheck(f"tensors of {', '.join(TAGS.values())}")
    left: set[str] = set()

    def change(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, LazyArray):
            check.lose(path, f"a value, {brief(leaf)}", NOTHING)
        elif leaf.spec.dtype not in TAGS.values():
            check.lose(path, f"an array of {leaf.spec.dtype}", NOTHING)
        else:
            return _array(check, path, leaf, kinds=False)
        left.add(path)
        return None

    made: dict[int, Any] = {}
    contents = map_leaves(contents, lambda path, leaf: _once(made, leaf, lambda: change(path, leaf)))
    names = _names(contents)
    if any(isinstance(child, DictNode | ListNode | TupleNode) for child in getattr(contents.structure, "children", ())):
        check.note("", "nested containers", "names with dots")
    kept = {path: name for path, name in names.items() if path not in left}
    ties = ties_of(contents)
    for path, tie in ties.items():
        if tie.view is not None:
            check.note(path, f"a view of {tie.of}", "a copy")
    whole = {path: tie for path, tie in ties.items() if tie.view is None}
    contents = msgspec.structs.replace(contents, findings=(*contents.findings, *check.all()))
    return FittedContents(contents, whole, kept)


def _once(made: dict[int, Any], leaf: Any, make: Callable[[], Any]) -> Any:
    """The same for an array that is met again."""
    if not isinstance(leaf, LazyArray):
        return make()
    if id(leaf) not in made:
        made[id(leaf)] = make()
    return made[id(leaf)]


def refuse_losses(contents: Contents, name: str) -> None:
    """Raises for the first leaf that would be lost.

    Raises:
        TreeError: naming it, and how many there are.
    """
    lost = [finding for finding in contents.findings if finding.lost]
    if not lost:
        return
    more = f", and {len(lost) - 1} more leaves like it" if len(lost) > 1 else ""
    raise TreeError(
        f"{lost[0].path}: {contents.label}",
        expected=f"what {name} holds: {lost[0].expected}",
        found=lost[0].found + more,
        hint="Select what is wanted (select=, exclude=, subtree=), or pass lossy=True (--lossy) to go without; "
        "dry_run=True (--dry-run) lists all",
    )
