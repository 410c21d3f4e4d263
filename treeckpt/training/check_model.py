"""Checks that saved arrays fit a model's tensors: in kind, shape and dtype, and where several names are one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch.nn.parameter import is_lazy

from ..arrays.plain_tensor import dtype_name
from ..arrays.registry import take_apart
from ..core.tree.flatten import flatten
from ..core.tree.spec import ArraySpec
from ..core.tree.structure import Structure, index_path
from ..core.tree.tensor_parts import check_same_tensors
from ..errors import MismatchError
from .modules import StateDictEntry, has_load_hook
from .names import key_path
from .sources import RestoreSource


def check_entry(entry: StateDictEntry, spec: ArraySpec | None, path: str, *, cast: bool) -> None:
    """Compares a tensor of the model with the saved spec; a spec of None is a value.

    Raises:
        MismatchError: kind, shape or dtype differ.
    """
    live = entry.value
    if is_lazy(live):
        raise MismatchError(
            path,
            expected="a tensor with a shape",
            found="a lazy one, which the first forward pass makes",
            hint="Run the model once before",
        )
    if not entry.live and not has_load_hook(entry):
        raise MismatchError(
            path,
            expected="a parameter or buffer of the model",
            found="a tensor that a hook of state_dict made",
            hint="Give the module a hook that takes it back (register_load_state_dict_pre_hook), "
            "or load it with treeckpt.load",
        )
    if spec is None:
        raise MismatchError(path, expected="a tensor", found="a value in the checkpoint")
    if spec.shape != tuple(live.shape):
        raise MismatchError(
            path,
            expected=f"shape {tuple(live.shape)}, as the model has it",
            found=f"{spec.shape} in the checkpoint",
            hint="Build the model with the sizes that were saved, or rename what is another parameter",
        )
    if spec.dtype != dtype_name(live.dtype) and not cast:
        raise MismatchError(
            path,
            expected=f"{dtype_name(live.dtype)}, as the model has it",
            found=f"{spec.dtype} in the checkpoint",
            hint="Pass cast=True to convert",
        )


def check_tensor_in_parts(entry: StateDictEntry, saved: Structure, path: str) -> None:
    """Compares a tensor of the model with a saved one that is made of others, see `arrays.tensor_parts`.

    Raises:
        MismatchError: it is a plain tensor, or of another class, context, shape or layout.
    """
    parts = take_apart(entry.value, path)
    if parts is None:
        _refuse_other_kind(entry.value, getattr(saved, "cls", ""), path)
    check_same_tensors(flatten(parts)[0], saved, 0, above=path)


def _refuse_other_kind(live: Any, saved: str, path: str) -> NoReturn:
    raise MismatchError(
        path,
        expected=f"a {type(live).__module__}.{type(live).__qualname__}, as the model has it",
        found=f"a {saved} in the checkpoint",
        hint="Convert the model (quantize_, convert_to_float8_training, to_sparse) as when it was saved",
    )


def without_ties(
    missing: Sequence[str], entries: Sequence[StateDictEntry], filled: Sequence[StateDictEntry]
) -> list[str]:
    """Returns the missing paths without those of tensors that are filled under another name."""
    there = {id(entry.value) for entry in filled}
    tied = {f"model/{key_path(entry.key)}" for entry in entries if entry.kind != "extra" and id(entry.value) in there}
    return [path for path in missing if path not in tied]


def resolve_ties(
    entries: Sequence[StateDictEntry],
    paths: Mapping[int, str],
    source: RestoreSource,
    *,
    strict: bool,
) -> tuple[list[StateDictEntry], list[str]]:
    """Returns the entries to fill, and the paths of those whose tensor is filled under another name.

    Args:
        paths: the saved path of each entry, by identity.
        strict: whether different saved arrays for one tensor are an error; otherwise the last name is filled.

    Raises:
        MismatchError: the saved arrays of the names of one tensor differ.
    """
    tied: dict[int, list[StateDictEntry]] = {}
    left: list[str] = []
    for entry in entries:
        others, path = tied.setdefault(id(entry.value), []), paths[id(entry)]
        if others and not _are_equal(source, paths[id(others[0])], path, entry.value):
            if strict:
                raise MismatchError(
                    path,
                    expected=f"the bytes of {paths[id(others[0])]}, which is the same tensor in the model",
                    found="others in the checkpoint",
                    hint="Untie the two, or pass strict=False to take the last of them",
                )
            left += [paths[id(other)] for other in others]
            others.clear()
        others.append(entry)
    return [entry for others in tied.values() for entry in others], left


def _are_equal(source: RestoreSource, first: str, second: str, live: Any) -> bool:
    """Whether what was saved of a live tensor at two paths is equal."""
    parts = take_apart(live, first)
    leaves = [("", live)] if parts is None else [(f"/{index_path(at, 0)}", leaf) for at, leaf in flatten(parts)[1]]
    return all(source.are_equal((first + below, second + below), leaf) for below, leaf in leaves)


def tied_when_saved(
    missing: Sequence[str], prefixes: Iterable[str], source: RestoreSource
) -> dict[str, tuple[str, str]]:
    """Returns, by path of missing state, the name of its parameter and that of one which it was tied to when saved.

    Args:
        prefixes: of the paths of each optimizer's state.
    """
    names = {path: path.removeprefix(prefix) for prefix in prefixes for path in missing if path.startswith(prefix)}
    names = {path: name for path, name in names.items() if source.leaves.get(f"model/{name}") is not None}
    if not names:
        return {}
    same: dict[object, list[str]] = {}
    for path, spec in source.leaves.items():
        if path.startswith("model/") and spec is not None and (one := source.identity(path)) is not None:
            same.setdefault(one, []).append(path.removeprefix("model/"))
    found: dict[str, tuple[str, str]] = {}
    for path, name in names.items():
        for other in same.get(source.identity(f"model/{name}"), ()):
            if other != name:
                found.setdefault(path, (name, other))
    return found
