"""The report of a restore, and the error where its targets and the source have other leaves, which says what to do."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec

from .._core.text import bytes_text, count_text, seconds_text
from .._core.tree.leaf_differences import LeafDifferences, Strict, disjoint, rename_hint, some_of
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import key_text
from ..errors import MismatchError, visible
from ._groups import BY_SCHEDULERS
from ._sources import RestoreSource

_LISTED = (
    "missing",
    "on_meta",
    "ignored",
    "unexpected",
    "dropped",
    "left_alone",
    "world_changed",
    "replaced",
    "cleared",
    "passed_over",
)
"""The fields of a report whose paths are printed, a line for each."""


class RestoreReport(msgspec.Struct, frozen=True):
    """What a restore filled, and what it did not find.

    >>> report = tc.training.restore(tc.training.state(model, optimizer), model, optimizer)
    >>> report.missing, report.unexpected
    ((), ())

    Attributes:
        path: of the checkpoint.
        step: training step, as it was passed to save.
        loaded: leaves of models, optimizers, extra and of what is registered with a manager that were filled.
        nbytes: bytes of the requested arrays, with those of extra states of modules and of an `extra` that comes back
            here.
        read_nbytes: bytes of arrays that this rank read.
        seconds: that the restore took.
        missing: leaves of the targets that the checkpoint lacks; they stay unchanged.
        unexpected: leaves of the checkpoint that no target has, as moments and hyper-parameters of another class of
            optimizer.
        materialised: tensors that were on the meta device and have memory now.
        on_meta: tensors that are still on the meta device because they are not saved (non-persistent buffers) or
            missing. Give them memory and values before the model runs.
        ignored: what of the checkpoint is without use here: moments of frozen parameters and of options that `keep`
            turns off, generators of missing devices, state that an optimizer's or a scheduler's `load_state_dict` does
            not use, and parts at the root that were not asked for ("scheduler"); and, where no optimizer is restored,
            what this program cannot make of an `extra` that comes back (a class that it lacks), which is `...` there.
        loader: what was saved as the loader's position, where that was a tree of values and not an object's state.
        extra: the saved tree, or the given one, filled; None where it was turned down or not selected. It is read with
            the rest: checked before anything changes, and not lost with the checkpoint.
        dropped: leaves that a rule dropped, by their names in the checkpoint.
        renamed: (saved path, new path) of leaves that rules only renamed.
        joined: tables of which several checkpoints have rows: (path, checkpoint, rows here that are of it), as in
            `LoadReport`.
        passed_over: of `Manager.resume`: the newer checkpoints that could not be loaded, each with what is wrong.
        left_alone: leaves of the model that stayed as they were, as they were left out on purpose when the checkpoint
            was saved; and "rng", where it has no random generators and they were not insisted on.
        world_changed: where another number of ranks had saved it: what this rank got of each part that was each rank's
            own.
        replaced: hyper-parameters, and arguments of schedulers, of which the checkpoint's were taken in place of others
            here; those that a training changes by itself, as learning rates, do not count.
        cleared: state of optimizers here that the checkpoint has none of, as before the first gradient of a parameter:
            it is gone, and begins anew.
    """

    path: str
    step: int | None
    loaded: int
    nbytes: int
    read_nbytes: int
    seconds: float
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    materialised: tuple[str, ...]
    on_meta: tuple[str, ...]
    ignored: tuple[str, ...]
    loader: Any = None
    extra: Any = None
    dropped: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    passed_over: tuple[str, ...] = ()
    joined: tuple[tuple[str, str, int], ...] = ()

    left_alone: tuple[str, ...] = ()
    world_changed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [
            f"restored {self.path}  {count_text(self.loaded, 'leaf', 'leaves')}, "
            f"{bytes_text(self.nbytes)} in {seconds_text(self.seconds)}"
        ]
        for name in _LISTED:
            rows += [f"  {name.replace('_', ' '):<10}  {path}" for path in getattr(self, name)]
        rows += [f"  renamed     {before} -> {now}" for before, now in self.renamed]
        rows += [f"  joined      {path}: {count_text(count, 'row')} of {url}" for path, url, count in self.joined]
        return "\n".join(map(visible, rows))


# leaves of one side alone ---------------------------------------------------------------------------------------------


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
        if path.startswith("model/") and spec is not None and (array := source.identity(path)) is not None:
            same.setdefault(array, []).append(path.removeprefix("model/"))
    tied: dict[str, tuple[str, str]] = {}
    for path, name in names.items():
        for other in same.get(source.identity(f"model/{name}"), ()):
            if other != name:
                tied.setdefault(path, (name, other))
    return tied


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
    """The names of the model that were left out on purpose."""
    extra: Collection[str]
    """The names that were saved in `extra`."""
    given: Any
    """The tree that is given for it."""
    here: Mapping[str, tuple[int, ...] | None]
    """The shapes of the model's leaves, by path."""
    saved: Mapping[str, ArraySpec | None]
    """The specs of the leaves of the checkpoint, by path; None for values."""
    tied: Mapping[str, tuple[str, str]]
    """The name of the parameter of a missing state, and of one which it was tied to when this was saved, by path."""
    reasons: Mapping[str, str]
    """Why one side alone has a path in the optimizers' state, and what to do, where that is known."""
    lengths: Mapping[str, tuple[int, int]] = {}
    """Sequences in `extra` of other lengths: (items here, items saved)."""
    under: str = ""
    """Where the source was placed: rules see the names below that."""


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
    above = f"{sides.under}/" if sides.under else ""
    own = [[path.removeprefix(above) for path in paths if path.startswith(above)] for paths in (ours, others)]
    if (text := rename_hint(*own) if len(own[0]) == len(ours) else "") or not whole:
        return text
    others = [path for path in others if path.startswith("model/")]
    left, pairs = set(ours), dict[str, str]()
    while left:
        pair = _renamed_part(min(left), left, set(others), sides)
        if pair is None:
            return ""
        pairs[f"{pair[0].removeprefix(above)}*"] = f"{pair[1].removeprefix(above)}*"
        left = {path for path in left if not path.startswith(pair[1])}
        others = [path for path in others if not path.startswith(pair[0])]
    return f"Leaves of the same shapes were saved under other names: pass rename={pairs}"


def _renamed_part(path: str, missing: Set[str], unexpected: Set[str], sides: Sides) -> tuple[str, str] | None:
    """Returns (saved prefix, prefix here) of the largest part with a leaf whose leaves one saved part alone has too.

    Parts that differ by numbers alone are other layers, experts or stages of the model.
    """

    def below(leaves: Mapping[str, Any], prefix: str, free: Set[str]) -> dict[str, Any]:
        shapes = {name: getattr(leaf, "shape", leaf) for name, leaf in leaves.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): shape for name, shape in shapes.items()} if shapes.keys() <= free else {}

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
