"""`save` and `load` with the signatures of hfai.checkpoint: models, optimizers and a dict of others, in one call each.

    from treeckpt.training import load, save     # instead of hfai.checkpoint

    save(path, model, optimizer, {"epoch": 3})
    state = load(path, map_location="cpu")        # state dicts, for load_state_dict
    state = load(path, model, optimizer)          # or in place, whatever the order of parameters is now

Ranks with the same state share the bytes of large tensors, buffers are written once, and without torch.distributed one
process writes everything. The checkpoint holds a training state as `training.state` returns it, with models and
optimizers by position, and beside it what the state dicts of the program have in names and order. `load` reads the
`PART_*.pt` files of hfai, too; the next `save` to their directory leaves them there, and is what counts from then on.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Unpack, get_args

import msgspec
import torch
from torch import Tensor, nn

from .. import _api
from .._core.tree.containers import FromRank, PerRank
from .._core.tree.dict_attributes import METADATA, copy_attributes
from .._core.tree.flatten import flatten
from .._io.comm.comm import as_comm
from .._io.public_calls import check_options
from .._loading.options import Device, Fallback, ReadOptions
from ..errors import MismatchError, TreeError
from ..reports import SaveReport
from ._capture import Buffers, PartKeywords, state
from ._groups import labels_by_member
from ._modules import collect_entries, get_in, key_path, parse_key, with_wrappers, wrapped_modules
from ._optimizers import (
    STATE_DICT_KEY,
    ParameterNumbering,
    join,
    name_optimizers,
    outside_parameters,
    param_groups_of,
    standard_form,
)
from ._restore import restore
from ._sources import children_of

Replicas = Literal["same", "rank0"]
"""What ranks may have otherwise than rank 0."""
_RESERVED = ("model", "optimizer")
_STATE_DICTS = "state_dicts"
"""The key at the root under which names and order of the program's state dicts stand."""
_NAMES = "param_names"
_OUTSIDE = "outside"
"""The name of the module that stands among the models for parameters that only optimizers have."""
_RANK_0 = 'replicas="rank0" keeps rank 0\'s buffers, others and hyper-parameters, as hfai does'


def save(
    fname: Any,
    model: Any,
    optimizer: Any = None,
    others: Mapping[str, Any] | None = None,
    group: Any = None,
    *,
    replicas: Replicas = "same",
    step: int | None = None,
    overwrite: bool = True,
    allow_pickle: bool = False,
    buffers: Buffers = "replicated",
    **parts: Unpack[PartKeywords],
) -> SaveReport:
    """Saves models, optimizers and other state; call it on every rank of the group.

    >>> report = tc.training.save("ckpt", model, optimizer, others={"epoch": 3})

    Args:
        fname: a directory; an existing checkpoint there is replaced once the new one is complete.
        model: a module or a list of several.
        optimizer: an optimizer or a list of several. Parameters that are none of the models' are saved beside these.
        others: further state by name; "model" and "optimizer" are reserved. State of one rank is under
            `treeckpt.PerRank`.
        group: a process group; None for all ranks, or for a single process without torch.distributed; "alone" saves in
            this process without messages.
        replicas: what differs between ranks is an error ("same"), or rank 0's buffers, others, hyper-parameters and
            what only optimizers have count, as with hfai ("rank0"). Models' parameters and moments are compared.
        allow_pickle: stores others of unknown types (objects of your own classes, say) as pickles.
        buffers, parts: same as for `training.state`: `select`, `exclude` and `frozen`.

    Raises:
        TreeError: a TypeError: `others` is no dict, or has a reserved name.
        MismatchError: a ValueError: ranks contradict each other.
    """
    extra = _checked_others(others)
    if replicas not in get_args(Replicas):
        expected = " or ".join(map(repr, get_args(Replicas)))
        raise MismatchError("replicas", expected=expected, found=f"{replicas!r:.60}")
    if first := replicas == "rank0":
        buffers = "first" if buffers == "replicated" else buffers
        extra = _of_rank_0(extra)
    if model is None:
        raise TreeError("model", expected="a module or a list of several", found="None")
    models, optimizers = _by_position(model), _by_position(optimizer)
    given = _with_outside(models, optimizers)
    tree = state(given, optimizers, rng=False, extra=extra, buffers=buffers, **parts)
    names = _names_of(models, optimizers, given)
    if first and optimizers:
        _take_from_rank_0(tree, optimizers)
    tree[_STATE_DICTS] = FromRank(names) if first else names
    comm = as_comm(group)
    try:
        return _api.save(fname, tree, step=step, overwrite=overwrite, comm=comm, allow_pickle=allow_pickle)
    except MismatchError as error:
        compared = {entry.path for entry in collect_entries(models).entries if entry.kind == "parameter"}
        if comm.size > 1 and not first and error.path not in compared:
            error.add_hint(_RANK_0)
        raise


def load(
    fname: Any,
    model: Any = None,
    optimizer: Any = None,
    *,
    nthreads: int = 8,
    group: Any = None,
    map_location: Any = None,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    allow_pickle: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Loads what `save` or hfai saved: {"model": ..., "optimizer": ..., and the others by their names}.

    Without `model` these are new state dicts for `load_state_dict`, by the names that the program's own had (`module.`
    of DistributedDataParallel); those of optimizers number parameters in the saved order. A list of one is its element.

    >>> report = tc.training.save("ckpt", model, optimizer, others={"epoch": 3})
    >>> tc.training.load("ckpt", model, optimizer)["epoch"]
    3

    Args:
        fname: what `save` wrote, or a directory with hfai's `PART_*.pt`, which is read as it is; so are
            other state dicts under these names, as in a file of torch.save.
        model: a module, or a list as in `save`: it is filled in place, and its entry in the result is its state dict.
            An integer is taken as hfai's `nthreads`.
        optimizer: likewise; parameters are matched by name, in any order. Of one that is split over ranks the result
            has this rank's part.
        nthreads: has no effect: each rank reads the ranges that it needs.
        map_location: where new tensors go, as for `torch.load`: a device, a dict of devices by where each was, a
            function, or None for where each was. A function is called once for each device, with an empty storage: the
            device of what it returns counts. With `model`, others go to the host.
        weights_only: True refuses `allow_pickle=True`; False changes nothing, as no pickle is run because of it.
        mmap: maps the files in place of reading them, as `ReadOptions(mmap=True)`, which refuses a model.
        allow_pickle: unpickles others that `save` stored as pickles. This can run any code: only for files you trust.
            Objects in hfai's files are never made; an error names them.
        options: further arguments of `training.restore` where a model is given: strict, cast, ...; without one
            `exclude`, as for `treeckpt.load`, for what cannot be read: `...` is in its place.

    Raises:
        MismatchError: a ValueError: models or optimizers differ from the saved ones, or a wrong argument.
    """
    if isinstance(model, int):
        model, nthreads = None, model
    if nthreads < 0:
        raise MismatchError("nthreads", expected="0 or more", found=f"{nthreads}")
    if weights_only and allow_pickle:
        raise MismatchError("allow_pickle", expected="False, with weights_only=True", found="True")
    if mmap:
        options["read"] = msgspec.structs.replace(options.get("read") or ReadOptions(), mmap=True)
    check_options(options, inspect.signature(restore).parameters, "training.load, nor of training.restore")
    given = {"comm": as_comm(group, sends_messages=False), "allow_pickle": allow_pickle, **options}
    if model is not None:
        return _fill(fname, _by_position(model), _by_position(optimizer), map_location, given)
    alone = ["an optimizer"] if optimizer is not None else sorted(options.keys() - {"exclude", "read"})
    if alone:
        raise MismatchError("model", expected="the model, too", found=f"{', '.join(alone)} alone")
    tree = _api.load(fname, fallback=Fallback(per_rank="take"), device=_device_of(map_location), **given)
    return _as_state_dicts(fname, tree)


def _fill(fname: Any, models: Any, optimizers: Any, map_location: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Fills models and optimizers in place; see `load`."""
    if map_location is not None and str(map_location) != "cpu":
        found = f"{map_location!r:.60}, with a model, which is filled where it is"
        raise MismatchError("map_location", expected="None or 'cpu', for others", found=found)
    every, others = _with_outside(models, optimizers), None
    targets = every, optimizers
    saved = children_of(_api.inspect(fname).structure)
    if _STATE_DICTS not in saved:
        # in state dicts of programs models and optimizers have numbers where there are several only
        targets = [
            list(each.values()) if len(own) == 1 else each
            for own, each in ((models, every), (optimizers or (), optimizers))
        ]
        apart = [part for part in _RESERVED if part in saved]
        others = _api.load(fname, comm=given["comm"], exclude=apart)
        others = {name: value for name, value in others.items() if name not in apart}
    given = {"rng": False, "fallback": Fallback(per_rank={"extra": "take"}), **given}
    try:
        report = restore(fname, *targets, **given)
    except MismatchError as error:
        if every is not models and others is not None:
            error.add_hint("Optimizers' own parameters are not in state dicts: strict=False leaves them as they are")
        raise
    others = _values(report.extra or {}) if others is None else others
    state_dicts = {"model": _unwrapped({name: one.state_dict() for name, one in models.items()})}
    if optimizers is not None:
        lives = name_optimizers(optimizers, collect_entries(every))
        state_dicts["optimizer"] = _unwrapped({live.prefix[0]: live.stateful.state_dict() for live in lives})
    return {**state_dicts, **others}


def _checked_others(others: Any) -> Any:
    """Returns a dict of others.

    Raises:
        TreeError: it is none, or has a reserved name.
    """
    if others is not None and not isinstance(others, Mapping):
        raise TreeError("others", expected="a dict or None", found=type(others).__qualname__)
    made = dict[str, Any](others or {})
    if taken := [name for name in _RESERVED if name in made]:
        found = "one that `load` returns something else under"
        raise TreeError(taken[0], expected="another name in others", found=found)
    return made


def _of_rank_0(value: Any) -> Any:
    """Returns a value of which rank 0's counts, without what each rank has of its own in dicts."""
    if isinstance(value, PerRank) or not isinstance(value, Mapping):
        return value if isinstance(value, PerRank) else FromRank(value)
    parts = {key: _of_rank_0(part) for key, part in value.items()}
    return FromRank(value) if all(isinstance(part, FromRank) for part in parts.values()) else parts


def _by_position(given: Any) -> Any:
    if given is None:
        return None
    several = list(given) if isinstance(given, Sequence) else [given]
    return {str(position): item for position, item in enumerate(several)}


def _unwrapped(several: Mapping[str, Any]) -> Any:
    """Returns the only one of several, as hfai does; a list of more."""
    return next(iter(several.values())) if len(several) == 1 else list(several.values())


def _with_outside(models: dict[str, Any], optimizers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the models, and a module with the parameters that only optimizers have, if there are any."""
    known = {id(p) for model in models.values() if isinstance(model, nn.Module) for p in model.parameters()}
    groups = [group for optimizer in (optimizers or {}).values() for group in param_groups_of(optimizer) or ()]
    if all(id(p) in known for group in groups for p in group["params"]):
        return models
    ties, found = collect_entries(models).ties, dict[int, tuple[str, Tensor]]()
    for name, optimizer in (optimizers or {}).items():
        for place, parameter in outside_parameters(optimizer, ties).items():
            found.setdefault(id(parameter), (f"{name}_{place}", parameter))
    outside: Any = nn.Module()
    outside._parameters.update(found.values())  # register_parameter takes no plain tensors
    return {**models, _OUTSIDE: outside} if found else models


def _take_from_rank_0(tree: dict[str, Any], names: Iterable[str]) -> None:
    """Has rank 0's count of what is hyper-parameters of optimizers, or only theirs.

    Args:
        names: of the optimizers.
    """
    tree["param_groups"] = FromRank(tree["param_groups"])
    for part in (tree["model"], *(tree["optimizer"].get(name, {}) for name in names)):
        if _OUTSIDE in part:
            part[_OUTSIDE] = FromRank(part[_OUTSIDE])


def _names_of(models: Mapping[str, Any], optimizers: Mapping[str, Any] | None, given: Any) -> dict[str, Any]:
    """Returns what the state dicts of models and optimizers have in names and order, by the names of these.

    Args:
        given: the models with what stands beside them.
    """
    named = name_optimizers(optimizers, collect_entries(given))
    wrapped = {name: own for name, model in models.items() if (own := wrapped_modules(model))}
    order = {live.prefix[0]: [[key_path(key) for key in group.members] for group in live.groups] for live in named}
    groups = {live.prefix[0]: param_groups_of(live.optimizer) for live in named}
    names = {name: [group.get(_NAMES) for group in own] for name, own in groups.items() if any(map(_has_names, own))}
    return {"order": order, "wrapped": wrapped, _NAMES: names}


def _has_names(group: Mapping[str, Any]) -> bool:
    return _NAMES in group


def _device_of(map_location: Any) -> Device:
    """Returns where tensors go by an argument of torch.load.

    Raises:
        MismatchError: it is none, or a function that returns no storage.
    """
    if map_location is None:
        return "original"
    if isinstance(map_location, (str, torch.device)):
        return str(map_location)
    if isinstance(map_location, Mapping):
        return lambda where: str(map_location.get(where, where))
    if not callable(map_location):
        expected, found = "a device, a dict, a function or None", type(map_location).__qualname__
        raise MismatchError("map_location", expected=expected, found=found)

    @functools.cache
    def placed(where: str) -> str:
        storage: Any = map_location(torch.UntypedStorage(0), where)
        if storage is not None and not hasattr(storage, "device"):
            raise MismatchError("map_location", expected="a storage or None of it", found=f"{storage!r:.60}")
        return where if storage is None else str(storage.device)

    return placed


# as state dicts -------------------------------------------------------------------------------------------------------


def _as_state_dicts(fname: Any, tree: Any) -> dict[str, Any]:
    """Returns state dicts and others of a loaded tree; see `load`.

    Raises:
        MismatchError: it has none.
    """
    models: Any = tree.get("model") if isinstance(tree, dict) else None
    listed = isinstance(models, list)
    several: Any = models if listed else [models]
    # of `training.state` without names and order no state dicts of optimizers can be made
    if not all(isinstance(one, Mapping) for one in several) or (_STATE_DICTS not in tree and "param_groups" in tree):
        raise MismatchError(
            str(fname),
            expected="what training.save or hfai wrote, or state dicts by these names",
            found="another tree",
            hint="Use treeckpt.training.restore, or treeckpt.load",
        )
    if _STATE_DICTS not in tree:
        return {**tree, "model": list(map(_plain, several)) if listed else _plain(models)}
    names = tree[_STATE_DICTS]
    if any(leaf is ... for _, leaf in flatten(names)[1]):
        raise MismatchError("exclude", expected=f"globs that leave {_STATE_DICTS}", found="one that does not")
    several = {name: _plain(models[name]) for name in sorted(models.keys() - {_OUTSIDE}, key=int)}
    several = {name: _with_wrappers(own, names["wrapped"].get(name, {})) for name, own in several.items()}
    state_dicts: dict[str, Any] = {"model": ... if _is_left_out(tree["model"]) else _unwrapped(several)}
    if "optimizer" in tree and _is_left_out(tree["optimizer"]):
        state_dicts["optimizer"] = ...
    elif "optimizer" in tree:
        order = names["order"]
        several = {
            name: _numbered(tree["optimizer"][name], tree["param_groups"][name], order[name], names[_NAMES].get(name))
            for name in sorted(order, key=int)
        }
        state_dicts["optimizer"] = _unwrapped(several)
    return {**state_dicts, **_values(tree.get("extra", {}))}


def _is_left_out(tree: object) -> bool:
    """Whether `exclude` has left out all leaves of a part."""
    leaves = flatten(tree)[1]
    return bool(leaves) and all(leaf is ... for _, leaf in leaves)


def _values(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a dict with the values of `PerRank` in the place of these."""
    return {key: value.value if isinstance(value, PerRank) else value for key, value in tree.items()}


def _plain(saved: Mapping[str, Any]) -> Any:
    """Returns the state dict of a model as torch gives it: plain tensors, also in the place of `PerRank`."""
    values, made = _values(saved), dict[int, Tensor]()
    for key, value in values.items():
        if isinstance(value, Tensor) and (value.requires_grad or isinstance(value, (nn.Parameter, nn.Buffer))):
            # one tensor for one, so that ties stay
            values[key] = made.setdefault(id(value), value.detach())
    return copy_attributes(saved, OrderedDict(values)) if isinstance(saved, OrderedDict) else values


def _with_wrappers(saved: Any, wrapped: Mapping[str, str]) -> Any:
    """Returns a state dict with the names that it had of a model in wrappers."""
    if not wrapped:
        return saved
    state_dict: Any = OrderedDict((with_wrappers(name, wrapped), value) for name, value in saved.items())
    metadata = getattr(saved, METADATA, {})
    state_dict._metadata = OrderedDict((with_wrappers(name, wrapped), own) for name, own in metadata.items())
    return state_dict


def _numbered(
    moments: dict[str, Any], groups: dict[str, Any], order: list[list[str]], names: list[list[str] | None] | None
) -> dict[str, Any]:
    """Returns an optimizer's state dict in its saved form, with torch's numbers for parameters.

    Args:
        names: those that the program gave to the parameters of each group, if it did.
    """
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
        given = ({} if own is None else {_NAMES: own} for own in names or [None] * len(labels))
        return [by_label.get(label, {}) | own for label, own in zip(labels, given, strict=True)]

    return join(form, numbering, own, grouped, None)
