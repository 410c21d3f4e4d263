"""Opens the source of a restore: a checkpoint, a tree in memory, or several checkpoints of which later ones win."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import msgspec

from ..core.tree.globs import compile_globs
from ..core.tree.structure import DictNode, keys_of, parse_path
from ..errors import MismatchError
from ..io.comm.comm import Comm
from ..io.storage.checkpoint import Checkpoint
from ..loading.match import LoadOptions
from ..loading.overlay import Bank, From, as_bank
from ..loading.transforms import Renaming, Transforms, as_rules, carried
from ..loading.transforms.rules import Rule, placed_below
from .sources import CheckpointSource, RestoreSource, TreeSource, children_of

OTHER_NAMES = (
    "State dicts under other names: old = treeckpt.load(path), then treeckpt.save(new, {'model': old[...], "
    "'optimizer': old[...]}) with their names there, and restore new"
)


def rules_of(rename: Renaming, transforms: Transforms, under: str, *, from_root: bool) -> tuple[Rule, ...]:
    """Returns the rules of a restore, for what it reads once it is placed; see `restore`."""
    rules = as_rules(rename, transforms)
    rules = placed_below(rules, under) if under else rules
    return (carried(*rules),) if rules and not from_root else rules


def place_under(given: Any, under: str) -> Any:
    """Returns a checkpoint, or a bank of opened ones, as if all that it holds were saved under a path; or a tree."""
    if isinstance(given, Mapping):
        return reduce(lambda tree, key: {key: tree}, reversed(parse_path(under)), given)
    if isinstance(given, Bank):
        return given.opened([place_under(source.path, under) for source in given.sources])
    index = given.index
    structure = reduce(lambda node, key: DictNode((key,), (node,)), reversed(parse_path(under)), index.structure)
    return given.with_index(msgspec.structs.replace(index, structure=structure))


def check_globs(source: RestoreSource, options: LoadOptions, entries: Sequence[str], *, with_extra: bool) -> None:
    """Refuses globs of `select` and `exclude` that mean nothing of the model's, under `strict`.

    Args:
        entries: the paths of the live model, which globs may mean too.
        with_extra: whether "extra" may be meant, as there is one, and no tree to fill was given for it.

    Raises:
        MismatchError: naming one, and the arguments for other parts.
    """
    if not options.strict or not (options.select or options.exclude):
        return
    names = sorted(source.names)
    saved = [name for name in names if name.startswith("model/")]
    ours = [*dict.fromkeys([*entries, *saved]), *(["extra"] if with_extra else [])]
    for what, globs in (("select", options.select), ("exclude", options.exclude)):
        for glob in compile_globs(globs or ()).unused(ours):
            if other := next((name for name in names if compile_globs((glob,)).match(name)), None):
                raise MismatchError(
                    f"{what}={glob!r:.80}",
                    expected="globs of model/..., which the optimizers' state follows",
                    found=f"one that means {other}",
                    hint="Leave other parts alone by their arguments: extra=False, rng=False, optimizer=None, "
                    "scheduler=None, loader=None",
                )
    try:
        options.check_used(lambda: ours)
    except MismatchError as error:
        error.add_hint("Globs mean model/..., by the names that rules give")
        raise


def missing_part(part: str, how: str, parts: Iterable[object], *, in_memory: bool = False) -> MismatchError:
    """Returns the error that a source lacks a part of a training state.

    Args:
        how: what would have saved it.
        parts: those that it has.
        in_memory: whether the source is a tree in memory, in which state dicts of optimizers are not read.
    """
    if in_memory and part in parts:
        return MismatchError(
            part,
            expected=f"in a tree in memory, what {how} gives",
            found="a state dict, which restore reads from files only",
            hint="Give the path of the file in place of its tree; or treeckpt.save(new, tree), and restore new. "
            f"To leave what is here as it is, pass {part}=None",
        )
    hint = f"To leave what is here as it is, pass {part}={False if part == 'rng' else None}"
    return MismatchError(
        part,
        expected=f"a state saved with {how}",
        found=f"only {', '.join(map(str, parts))} in the checkpoint",
        hint=hint + (f". {OTHER_NAMES}" if part == "optimizer" else ""),
    )


def is_stored(given: Any) -> bool:
    """Whether a source is a path, a store, or several of them, and no tree in memory."""
    return isinstance(given, (str, os.PathLike, Checkpoint)) or hasattr(given, "sizes") or as_bank(given) is not None


def open_source(given: Any, comm: Comm, options: LoadOptions, *, from_root: bool = False) -> RestoreSource:
    """Opens a path or store, several of them, or a tree.

    Args:
        from_root: as for `restore`, of the rules on each of several checkpoints.

    Raises:
        MismatchError: the root is no training state.
    """
    stored = given if isinstance(given, Checkpoint) else as_bank(given)
    source: Any
    if isinstance(given, Mapping):
        source = TreeSource(given, comm, options)
    elif stored is not None:

        def own_rules(one: From) -> tuple[Rule, ...]:
            return rules_of(one.rename, one.transforms, "", from_root=from_root)

        source = CheckpointSource(stored, comm, options, own_rules)
    else:
        raise MismatchError(
            "",
            expected="a path, a store, a bank of them, or a tree as training.state gives it",
            found=f"{type(given).__name__}",
            hint="The path comes first: restore(path, model, optimizer)",
        )
    root = source.structure
    if "model" not in children_of(root) and not any(name.startswith("model/") for name in source.names):
        keys = ", ".join(map(str, keys_of(root, ""))) if root is not None else "a single leaf"
        raise MismatchError(
            source.url,
            expected="a training state, with `model` at its root",
            found=keys[:200],
            hint="Save treeckpt.training.state(model, optimizer), or load this with treeckpt.load. Where the model's "
            "state dict is the root, pass under='model'; where it has another name, from_root=True with rename=. "
            + OTHER_NAMES,
        )
    return source
