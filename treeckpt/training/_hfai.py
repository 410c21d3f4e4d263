"""`save` and `load` with the signatures of hfai.checkpoint: models, optimizers and a dict of others, in one call each.

    from treeckpt.training import load, save     # instead of hfai.checkpoint

    save(path, model, optimizer, {"epoch": 3})
    state = load(path, model, optimizer)          # in place, whatever the order of parameters is now
    state = load(path)                            # or state dicts, for load_state_dict

Ranks with the same state share the bytes of large tensors, buffers are written once, and without torch.distributed one
process writes everything. The checkpoint holds a training state as `training.state` returns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Unpack

import torch

from .. import _api
from .._core.tree.containers import PerRank
from .._core.tree.dict_attributes import copy_attributes
from .._io.comm.comm import Comm, as_comm
from .._loading.options import Fallback
from ..errors import MismatchError, TreeError
from ..reports import SaveReport
from ._capture import Buffers, PartKeywords, state
from ._groups import labels_by_member
from ._modules import collect_entries, get_in, key_path, parse_key
from ._optimizers import STATE_DICT_KEY, ParameterNumbering, join, name_optimizers, standard_form
from ._restore import restore

_RESERVED = ("model", "optimizer")


def save(
    path: Any,
    model: Any,
    optimizer: Any = None,
    others: Mapping[str, Any] | None = None,
    group: Any = None,
    *,
    step: int | None = None,
    overwrite: bool = True,
    allow_pickle: bool = False,
    buffers: Buffers = "replicated",
    **parts: Unpack[PartKeywords],
) -> SaveReport:
    """Saves models, optimizers and other state; call it on every rank of the group.

    >>> report = tc.training.save("ckpt", model, optimizer, others={"epoch": 3})

    Args:
        path: a directory; an existing checkpoint there is replaced once the new one is complete.
        model: a module or a list of several.
        optimizer: an optimizer or a list of several.
        others: further state by name; "model" and "optimizer" are reserved. State of one rank is under
            `treeckpt.PerRank`.
        group: a process group; None for all ranks, or for a single process without torch.distributed; "alone" saves in
            this process without messages.
        allow_pickle: stores others of unknown types (objects of your own classes, say) as pickles.
        buffers, parts: same as for `training.state`: `select`, `exclude` and `frozen`.

    Raises:
        TreeError: `others` is no dict, or has a reserved name.
    """
    if others is not None and not isinstance(others, Mapping):
        raise TreeError("others", expected="a dict or None", found=type(others).__qualname__)
    taken = [name for name in _RESERVED if others is not None and name in others]
    if taken:
        raise TreeError(
            taken[0], expected="another name in others", found="one that `load` returns something else under"
        )
    models, optimizers = _by_position(model), _by_position(optimizer)
    tree = state(models, optimizers, rng=False, extra=dict(others or {}), buffers=buffers, **parts)
    named = name_optimizers(optimizers, collect_entries(models))
    # by optimizer, the parameter names of each group in order
    tree["order"] = {
        live.prefix[0]: [[key_path(key) for key in group.members] for group in live.groups] for live in named
    }
    return _api.save(path, tree, step=step, overwrite=overwrite, comm=as_comm(group), allow_pickle=allow_pickle)


def load(
    path: Any,
    model: Any = None,
    optimizer: Any = None,
    *,
    nthreads: int = 8,
    group: Any = None,
    map_location: str | torch.device | None = None,
    allow_pickle: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Loads what `save` saved: {"model": ..., "optimizer": ..., and the others by their names}.

    >>> report = tc.training.save("ckpt", model, optimizer, others={"epoch": 3})
    >>> tc.training.load("ckpt", model, optimizer)["epoch"]
    3

    Args:
        model: a module, or a list as in `save`: it is filled in place, and its entry in the result is its state dict.
            An integer is taken as hfai's `nthreads`.
        optimizer: likewise; parameters are matched by name, in any order.
        nthreads: has no effect: each rank reads the ranges that it needs.
        map_location: a device for state that is not filled in place.
        allow_pickle: unpickles others that were saved as pickles. This can run any code: only for files you trust.
        options: further arguments of `training.restore` where a model is given: strict, partial, cast, ...

    Returns:
        Without `model`, state dicts of whole tensors for `load_state_dict`; those of optimizers number parameters in
        the saved order. A list of one is returned as its element.

    Raises:
        MismatchError: models or optimizers differ from the saved ones.
    """
    if isinstance(model, int):
        model, nthreads = None, model
    if nthreads < 0:
        raise MismatchError("nthreads", expected="0 or more", found=f"{nthreads}")
    comm = as_comm(group, sends_messages=False)
    if model is None:
        if optimizer is not None or options:
            alone = "an optimizer" if optimizer is not None else ", ".join(options)
            raise MismatchError("model", expected="the model, too", found=f"{alone} alone")
        return _as_state_dicts(path, comm, map_location, allow_pickle=allow_pickle)
    models, optimizers = _by_position(model), _by_position(optimizer)
    fallback = Fallback(per_rank={"extra": "take"})
    given = {"rng": False, "comm": comm, "fallback": fallback, "allow_pickle": allow_pickle}
    report = restore(path, models, optimizers, **{**given, **options})
    state_dicts = {"model": _unwrapped([m.state_dict() for m in models.values()])}
    if optimizers is not None:
        state_dicts["optimizer"] = _unwrapped([o.state_dict() for o in optimizers.values()])
    return {**state_dicts, **_plain(report.extra or {})}


def _by_position(given: Any) -> Any:
    if given is None:
        return None
    several = list(given) if isinstance(given, Sequence) else [given]
    return {str(position): item for position, item in enumerate(several)}


def _unwrapped(several: list[Any]) -> Any:
    return several[0] if len(several) == 1 else several


# as state dicts -------------------------------------------------------------------------------------------------------


def _as_state_dicts(path: Any, comm: Comm, map_location: Any, *, allow_pickle: bool) -> dict[str, Any]:
    if not isinstance(map_location, (str, torch.device, NoneType)):
        raise MismatchError("map_location", expected="a device or None", found=f"{type(map_location).__qualname__}")
    device = None if map_location is None else str(map_location)
    tree = _api.load(path, comm=comm, fallback=Fallback(per_rank="take"), device=device, allow_pickle=allow_pickle)
    if not isinstance(tree, dict) or not {"model", "order"} <= set(tree):
        raise MismatchError(
            str(path),
            expected="what training.save wrote",
            found="another tree",
            hint="Use treeckpt.training.restore, or treeckpt.load",
        )
    models = tree["model"]
    state_dicts: dict[str, Any] = {"model": _unwrapped([_plain(models[name]) for name in sorted(models, key=int)])}
    if "optimizer" in tree:
        names = sorted(tree["order"], key=int)
        several = [
            _numbered(tree["optimizer"][name], tree["param_groups"][name], tree["order"][name]) for name in names
        ]
        state_dicts["optimizer"] = _unwrapped(several)
    return {**state_dicts, **_plain(tree.get("extra", {}))}


def _plain(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a dict with the values of `PerRank` in the place of these; of a state dict, one with its metadata."""
    values = {key: value.value if isinstance(value, PerRank) else value for key, value in tree.items()}
    return copy_attributes(tree, OrderedDict(values)) if type(tree) is OrderedDict else values


def _numbered(moments: dict[str, Any], groups: dict[str, Any], order: list[list[str]]) -> dict[str, Any]:
    """Returns an optimizer's state dict in its saved form, with torch's numbers for parameters."""
    members = [[parse_key(name) for name in group] for group in order]
    of = labels_by_member(groups["members"])
    without = (label for label, names in groups["members"].items() if not names)
    labels = [of[group[0]][0] if group else next(without, "") for group in order]
    numbering = ParameterNumbering(members, labels, {key: key[-1] for group in members for key in group})
    forms = groups.get(STATE_DICT_KEY, {})
    form = next(iter(forms.values())) if forms else standard_form(groups.get("shared"))
    own = {
        key: {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in get_in(moments, key, {}).items()}
        for key in numbering.keys
    }

    def grouped(values: Mapping[str, Any] | None) -> list[Any]:
        by_label = groups["values"] if values is None else values
        return [by_label.get(label, {}) for label in labels]

    return join(form, numbering, own, grouped, None)
