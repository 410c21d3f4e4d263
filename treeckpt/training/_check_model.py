"""Checks that saved arrays fit a model's tensors: in kind, shape and dtype, and where several names are one tensor.

At the end `check_keys` refuses leaves that the targets or the source alone have; its error says what to do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NoReturn

import msgspec
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._arrays.registry import take_apart
from .._arrays.torch import dtype_name
from .._core.tree.flatten import flatten
from .._core.tree.leaf_differences import LeafDifferences, Strict, disjoint, rename_hint, some_of
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import Structure, index_path, key_text
from .._core.tree.tensor_parts import check_same_tensors
from ..errors import MismatchError
from ..rules._rules import check_scaled
from ._groups import BY_SCHEDULERS
from ._modules import StateDictEntry
from ._sources import RestoreSource


def check_entry(entry: StateDictEntry, leaves: Mapping[str, ArraySpec | None], path: str, *, cast: bool) -> None:
    """Compares a tensor of a module without load code of its own with what was saved at a path.

    Raises:
        MismatchError: kind, shape or dtype differ; or a cast of float8 would leave out the scales beside it.
    """
    live, spec = entry.value, leaves[path]
    if entry.kind != "value" and is_lazy(live):
        raise MismatchError(
            path,
            expected="a tensor with a shape",
            found="a lazy one, which the first forward pass makes",
            hint="Run the model once before",
        )
    if not entry.live:
        raise MismatchError(
            path,
            expected="a parameter or buffer of the model",
            found=f"a {'value' if entry.kind == 'value' else 'tensor'} that a hook of state_dict made",
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
    if spec.dtype == (dtype := dtype_name(live.dtype)):
        return
    if not cast:
        raise MismatchError(
            path,
            expected=f"{dtype}, as the model has it",
            found=f"{spec.dtype} in the checkpoint",
            hint="Pass cast=True to convert",
        )
    check_scaled(path, (spec.dtype, dtype), leaves)


def check_extra_state(entry: StateDictEntry, path: str) -> None:
    """Compares whether a module takes the extra state that it gives.

    Raises:
        MismatchError: it does not.
    """
    if type(entry.module).set_extra_state is nn.Module.set_extra_state:
        raise MismatchError(
            path,
            expected="a module that has set_extra_state",
            found=f"{type(entry.module).__qualname__}, which has get_extra_state alone",
        )


def check_tensor_in_parts(entry: StateDictEntry, saved: Structure, path: str) -> None:
    """Compares a tensor of the model with a saved one that is made of others, see `_arrays.tensor_parts`.

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
    tied = {entry.path for entry in entries if isinstance(entry.value, Tensor) and id(entry.value) in there}
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


_NO_NAME_ALIKE = (
    "Not one name of the model is in the checkpoint: pass rename={saved name: name here}, with globs, or transforms="
)
_OF_OPTIMIZER = "optimizer/", "param_groups/"
_SAVED_CLASS = "Give an optimizer of the class and options that were saved; optimizer=None leaves it as it is"


class Sides(msgspec.Struct, frozen=True):
    """What is known of the leaves of both sides of a restore."""

    alike: bool
    """Whether any leaf of the model is in both, or is left as it is."""
    left_out: Set[str]
    """Names of the model that were left out on purpose."""
    extra: Collection[str]
    """The names that were saved in `extra`."""
    given: Any
    """The tree that is given for it."""
    here: Mapping[str, tuple[int, ...] | None]
    """The shapes of the model's leaves, by path."""
    saved: Mapping[str, ArraySpec | None]
    """Those of the checkpoint."""
    tied: Mapping[str, tuple[str, str]]
    """By path of missing state: the name of its parameter, and of one which it was tied to when this was saved."""
    reasons: Mapping[str, str]
    """By path in the optimizers' state: why one side alone has it, and what to do, where that is known."""
    lengths: Mapping[str, tuple[int, int]] = {}
    """Sequences in `extra` of other lengths: (items here, items saved)."""


def check_keys(missing: Sequence[str], unexpected: Sequence[str], strict: Strict, sides: Sides) -> None:
    """Checks that the targets and the source of a restore have the same leaves.

    Args:
        missing: leaves of the targets that the source lacks.
        unexpected: the reverse.

    Raises:
        MismatchError: they have not, by `strict`; without it, not one of the model's is in both.
    """
    refused = LeafDifferences(missing, unexpected, common=sides.alike).refused(strict)
    bad = refused.paths
    if not bad:
        return
    if not strict:
        raise disjoint(refused, _renamed(missing, unexpected, sides) or _NO_NAME_ALIKE)
    _check_lengths(bad, sides)
    reasons = {path: why for path, why in sides.reasons.items() if path not in sides.tied}
    texts = some_of("missing in the checkpoint", missing), some_of("not here", refused.unexpected)
    part = {re.sub("^(model|optimizer)/", "", path) for path in missing} <= sides.left_out
    part = part and not any(path.startswith(_OF_OPTIMIZER[1]) for path in bad)
    raise MismatchError(
        bad[0],
        expected="the same names in extra here as in the checkpoint"
        if all(path.startswith("extra/") for path in bad)
        else "the same parameters and moments here as in the checkpoint",
        found="; ".join(filter(None, texts)),
        hint=_hint_on_extra(bad, sides)
        or (reasons[bad[0]] if reasons.keys() >= set(bad) else "")
        or (part and "Pass strict='missing' if one is a part of the other")
        or _renamed(missing, unexpected, sides, whole=strict is True or not sides.alike)
        or _hint(missing, unexpected, sides),
    )


def _check_lengths(bad: Sequence[str], sides: Sides) -> None:
    """Names a sequence in `extra` of another length than the saved one, which it cannot take.

    Raises:
        MismatchError: there is one.
    """
    for path, (here, saved) in sides.lengths.items():
        if bad[0].startswith(f"{path}/"):
            raise MismatchError(
                path,
                expected=f"a sequence of {saved} item{'s' * (saved != 1)}, as in the checkpoint",
                found=f"one of {here} here" + (", with arrays or objects that would be lost" * (here > saved)),
                hint=(
                    f"Shorten it before the restore, as by `del the_list[{saved}:]`"
                    if here > saved
                    else "Give a list, or a deque with room for them: it takes what was saved"
                )
                + "; or give `...` in its place",
            )


def _renamed(missing: Sequence[str], unexpected: Sequence[str], sides: Sides, *, whole: bool = True) -> str:
    """Returns what to do where the model's missing leaves were saved under other names, which their state follows.

    Args:
        whole: whether all that was saved is to be here: what a part of a model leaves has no other name in it.
    """
    ours = [path for path in missing if path.startswith("model/")]
    if not ours:
        return ""
    others = [path for path in unexpected if not path.startswith(_OF_OPTIMIZER)]
    if (text := rename_hint(ours, others)) or not whole:
        return text
    others = [path for path in others if path.startswith("model/")]
    left, pairs = set(ours), dict[str, str]()
    while left:
        pair = _renamed_part(min(left), left, set(others), sides)
        if pair is None:
            return ""
        pairs[f"{pair[0]}*"] = f"{pair[1]}*"
        left = {path for path in left if not path.startswith(pair[1])}
        others = [path for path in others if not path.startswith(pair[0])]
    return f"Leaves of the same shapes were saved under other names: pass rename={pairs}"


def _renamed_part(path: str, missing: Set[str], unexpected: Set[str], sides: Sides) -> tuple[str, str] | None:
    """Returns (saved prefix, prefix here) of the largest part with a leaf whose leaves one saved part alone has too.

    Parts that differ by numbers alone are other layers, experts or stages of the model.
    """

    def below(leaves: Mapping[str, Any], prefix: str, free: Set[str]) -> dict[str, Any]:
        found = {name: getattr(leaf, "shape", leaf) for name, leaf in leaves.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): shape for name, shape in found.items()} if found.keys() <= free else {}

    for step in re.finditer("[./]", path.removeprefix("model/")):
        end = len("model/") + step.end()
        here, tail = below(sides.here, path[:end], missing), path[end - 1 :]
        heads = {name[: 1 - len(tail)] for name in unexpected if name.endswith(tail)} - {"model/"} if here else ()
        heads = {head for head in heads if re.sub("[0-9]+", "", head) != re.sub("[0-9]+", "", path[:end])}
        if fits := [head for head in heads if below(sides.saved, head, unexpected) == here]:
            return (fits[0], path[:end]) if len(fits) == 1 else None
    return None


def _hint_on_extra(bad: Sequence[str], sides: Sides) -> str:
    """Returns what to do where names in `extra` are only saved, or only given; "" where anything else differs."""
    if not isinstance(sides.given, Mapping) or not all(path.startswith("extra/") for path in bad):
        return ""
    given, names = [key_text(key) for key in sides.given], {path.split("/")[1] for path in bad}
    if names & {*sides.extra} & {*given}:
        return ""
    absent = [name for name in sides.extra if name not in given]
    what = f"{', '.join(absent)} too" if names == {*absent} else "the names that were saved"
    return (
        f"The checkpoint has in extra: {', '.join(sides.extra)}; given here: {', '.join(given) or 'nothing'}. "
        f"Give {what}, and `...` for what stays as it is"
    )


def _hint(missing: Sequence[str], unexpected: Sequence[str], sides: Sides) -> str:
    if not sides.alike:
        return _NO_NAME_ALIKE
    if missing and all(path.startswith("extra/") for path in missing):
        names = ", ".join(sides.extra)
        return f"The checkpoint has in extra: {names}. Give these names, and `...` for what stays as it is"
    if not all(path.startswith(_OF_OPTIMIZER) for path in missing):
        others = "Pass strict=False to restore what both have"
        renamed = all(any(path.startswith("model/") for path in paths) for paths in (missing, unexpected))
        return f"For what has another name here, pass rename={{saved name: name here}}. {others}" if renamed else others
    if missing and all(path in sides.tied for path in missing):
        name, other = sides.tied[missing[0]]
        return (
            f"{name} was tied to {other} when this was saved, which has the state of both. Tie them here too, or pass "
            f"strict=False: the state of {name} begins anew"
        )
    if any(path.startswith(_OF_OPTIMIZER[1]) for path in unexpected):
        return f"The optimizer here is of another class than the saved one. {_SAVED_CLASS}"
    options = {path.rpartition("/")[2] for path in missing if path.startswith(_OF_OPTIMIZER[1])}
    if len(options) < len(missing) or any(path.startswith(_OF_OPTIMIZER[0]) for path in unexpected):
        return _SAVED_CLASS
    if options <= BY_SCHEDULERS:
        return "A scheduler added them here, as OneCycleLR does, and not when this was saved. Make it after the restore"
    return "Pass strict=False to keep these options as they are here, as with a checkpoint of an older torch"
