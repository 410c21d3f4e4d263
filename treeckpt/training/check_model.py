"""Whether what was saved fits a model's tensors: in kind, shape and dtype, and where names here are one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn.parameter import is_lazy

from ..arrays.plain_tensor import dtype_name
from ..core.tree.spec import ArraySpec
from ..errors import MismatchError
from .modules import Entry, takes_back
from .names import key_path

__all__ = ["check_entry", "settle_ties", "without_ties"]


def check_entry(entry: Entry, spec: ArraySpec | None, path: str, *, cast: bool) -> None:
    """Compares a tensor of the model with what was saved; None for a value.

    Raises:
        MismatchError: of kind, shape or dtype.
    """
    live = entry.value
    if is_lazy(live):
        raise MismatchError(
            path,
            expected="a tensor with a shape",
            found="a lazy one, which the first forward pass makes",
            hint="Run the model once before",
        )
    if not entry.live and not takes_back(entry):
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


def without_ties(missing: Sequence[str], entries: Sequence[Entry], filled: Sequence[Entry]) -> list[str]:
    """The missing paths but those of tensors that are filled under another name."""
    there = {id(entry.value) for entry in filled}
    tied = {f"model/{key_path(entry.key)}" for entry in entries if entry.kind != "extra" and id(entry.value) in there}
    return [path for path in missing if path not in tied]


def settle_ties(
    entries: Sequence[Entry],
    paths: Mapping[int, str],
    are_equal: Callable[[tuple[str, str], Any], bool],
    *,
    strict: bool,
) -> tuple[list[Entry], list[str]]:
    """The entries to fill, and the paths of those that are not, as another name of the same tensor is filled.

    Args:
        paths: of the entries as they were saved, by identity.
        are_equal: (two paths, the tensor) -> whether what was saved at both is the same.
        strict: where it is not, that is an error; else the last name is filled.

    Raises:
        MismatchError: names of one tensor stand for arrays that differ.
    """
    tied: dict[int, list[Entry]] = {}
    left: list[str] = []
    for entry in entries:
        others, path = tied.setdefault(id(entry.value), []), paths[id(entry)]
        if others and not are_equal((paths[id(others[0])], path), entry.value):
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
