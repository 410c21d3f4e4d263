"""The state of optimizers, keyed by the names of their parameters.

`name_optimizers` finds the names of an optimizer's parameters in the model, `trees_of` builds its two trees: `state`,
by parameter and moment, and its groups. A parameter without state is kept with an empty one, which differs from one
that is not the optimizer's. LBFGS joins all its parameters into one vector, so their order is saved too.

The state is that of `.state`; for an optimizer that changes `state_dict` or `load_state_dict`, by a method or a hook,
as wrappers do, it is the result of `state_dict()`.

torch numbers parameters by their place in the groups. Optimizers that have a `state_dict` of their own add entries,
nest the state dicts of optimizers that they wrap, and key tensors by number, by (group, place), by the parameter itself
or by list position. `split` takes out what belongs to parameters; what is left is the *form*: the same dict with a mark
in the place of each such part. `join` makes the dict again for parameters in another order.

Some moments each rank has of its own: plain arrays in the state of a parameter that is spread over ranks. Codes and
block scales of 8-bit optimizers and sums of rows are made of a rank's part of its parameter: they are saved under
`PerRank`, and restored where each rank holds the same part as then. No other rank's fit, and only the optimizer could
make those of another layout. A number, and an array of the shape of the whole parameter, are the same on all ranks.
What is so of one parameter is so of all that the optimizer has, by the name of the moment: the part of a small
parameter may look like either.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from .._arrays.dtensor import is_dtensor
from .._arrays.sharded import Sharded
from .._arrays.stateful import is_optimizer
from .._core.tree.containers import PerRank
from .._core.tree.flatten import flatten, replace_leaves
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import PerRankNode, Structure, TensorNode, key_text
from .._core.tree.tensor_parts import tensors_as_leaves
from ..errors import MismatchError, TreeError
from ._groups import ParamGroup, is_same, labels_of, torch_options, tree_of_groups
from ._modules import Key, ModelEntries, key_path, named_objects, put_in
from ._sources import OWN, RestoreSource, children_of, leaves_below

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]


class NamedOptimizer(msgspec.Struct, dict=True):
    """A live optimizer, with names for its parameters."""

    prefix: Key
    optimizer: Any
    """The optimizer that has the groups."""
    stateful: Any
    """The optimizer that has the state: another one where this one is split over ranks."""
    groups: tuple[ParamGroup, ...]
    numbering: ParameterNumbering
    """The parameters whose state is here, in the order of the groups."""
    own: dict[Key, Mapping[Any, Any]]
    """The state of each parameter."""
    shared: dict[Any, Any]
    """State that belongs to no parameter."""
    shards: Mapping[int, tuple[Any, Any]]
    """The (global shape, offset) of each parameter that is a shard of an array, by identity."""
    form: Any = None
    """The rest of the state dict, for an optimizer whose `state_dict` is used; None for those of torch."""

    @property
    def parameters(self) -> Mapping[Key, Tensor]:
        """The parameters whose state is here, in the order of the groups."""
        return self.numbering.parameters

    @cached_property
    def innermost(self) -> Any:
        """The innermost optimizer, which creates the state of parameters; None if its wrappers add state."""
        inner = optimizer_chain(self.stateful)[-1]
        if self.form is not None and has_own_forms(self.form):
            return None
        theirs = {id(p) for group in param_groups_of(inner) for p in group["params"]}
        return inner if theirs == set(map(id, self.parameters.values())) else None

    @cached_property
    def own_moments(self) -> frozenset[str]:
        """The names of the moments that each rank has of its own: paths in the state of a parameter."""
        names = set[str]()
        for key, parameter in self.parameters.items():
            shard = self.shards.get(id(parameter))
            if is_spread(parameter, shard):
                # of a shard, what has its shape is a part of an array too
                same = {tuple(parameter.shape), tuple(shard[0])} if shard is not None else {tuple(parameter.shape)}
                arrays = _plain_arrays(self.own[key])
                names |= {
                    name for name, array in arrays if math.prod(array.shape) != 1 and tuple(array.shape) not in same
                }
        return frozenset(names)

    def spread(self, key: Key, own: Mapping[Any, Any], own_moments: frozenset[str]) -> dict[Any, Any]:
        """The state of a parameter, where what has its shape is a part of an array if the parameter is.

        Args:
            own_moments: names of what each rank has of its own, if the parameter is spread.
        """
        parameter = self.parameters[key]
        shard = self.shards.get(id(parameter))
        if shard is not None:
            shape = parameter.shape
            own = {k: Sharded(v, *shard) if isinstance(v, Tensor) and v.shape == shape else v for k, v in own.items()}
        return with_own(own, own_moments) if own_moments and is_spread(parameter, shard) else dict(own)

    @property
    def label(self) -> str:
        """A name that other optimizers of the same prefix, with other parameters, do not have."""
        return self.numbering.labels[0] if self.numbering.labels else ""


def name_optimizers(optimizer: Optimizers | None, model: ModelEntries) -> list[NamedOptimizer]:
    """Returns the optimizers with names for their parameters.

    Raises:
        TreeError: a parameter that is not the model's; DeepSpeed has the state.
    """
    if optimizer is None:
        return []
    pairs = named_objects(optimizer, torch.optim.Optimizer, "optimizer")
    if "deepspeed" in sys.modules:
        _refuse_zero(pairs, model)
    groups = [_named_groups(prefix, live, model.ties) for prefix, live in pairs]
    prefixes = [prefix for prefix, _ in pairs]
    labels: list[list[str]] = [[] for _ in pairs]
    for prefix in dict.fromkeys(prefixes):
        numbers = [number for number, other in enumerate(prefixes) if other == prefix]
        each = iter(labels_of([group for number in numbers for group in groups[number]]))
        for number in numbers:
            labels[number] = list(itertools.islice(each, len(groups[number])))
    optimizers = zip(pairs, groups, labels, strict=True)
    return [_name_one(prefix, live, model, mine, theirs) for (prefix, live), mine, theirs in optimizers]


def _refuse_zero(pairs: Sequence[tuple[Key, Any]], model: ModelEntries) -> None:
    """Refuses optimizers whose state DeepSpeed has, in flat parts of all parameters together."""
    partitioned = any(hasattr(entry.value, "ds_shape") for entry in model.entries)
    for prefix, live in pairs:
        kinds = [kind for part in optimizer_chain(live) for kind in type(part).__mro__]
        zero = next((kind for kind in kinds if kind.__module__.startswith("deepspeed.runtime.")), None)
        if zero is not None or partitioned:
            name = type(live).__qualname__ if zero is None else f"DeepSpeed's {zero.__qualname__}"
            raise TreeError(
                key_path(("optimizer", *prefix)),
                expected="an optimizer that has the state of the model's parameters",
                found=f"{name}, which has flat parts of these (ZeRO)",
                hint=_ZERO_ADVICE,
            )


def _named_groups(prefix: Key, optimizer: Any, ties: Mapping[int, tuple[Key, ...]]) -> list[ParamGroup]:
    """Returns the groups of an optimizer, or of the one that it wraps.

    Raises:
        TreeError: it has none, or a parameter that is not the model's.
    """
    groups = param_groups_of(optimizer)
    if groups is None:
        raise TreeError(
            key_path(("optimizer", *prefix)),
            expected="an optimizer with param_groups, or one in an attribute of what wraps it",
            found=f"a {type(optimizer).__module__}.{type(optimizer).__qualname__} without",
            hint="Give the optimizer that it wraps",
        )
    ties = {**ties, **_masters(optimizer, ties)}
    return [
        ParamGroup(
            tuple(_name_of(p, ties, f"param_groups/{position}") for p in group["params"]),
            # The names are in `members`.
            {k: v for k, v in group.items() if k not in ("params", "param_names")},
        )
        for position, group in enumerate(groups)
    ]


_ZERO_ADVICE = (
    "Save training.state(engine.module) for the weights, and the optimizer with engine.save_checkpoint beside it. With "
    "fully_shard (FSDP2) in place of ZeRO, training.state(model, optimizer) has both, for any number of ranks"
)


def _masters(optimizer: Any, ties: Mapping[int, tuple[Key, ...]]) -> dict[int, tuple[Key, ...]]:
    """Returns the names of copies of parameters that an optimizer trains in their place, by identity.

    What wraps it has a list of the model's parameters, of the same shapes in the same order.
    """
    chain = optimizer_chain(optimizer)
    copies = [p for group in param_groups_of(chain[-1]) or () for p in group["params"]]
    if all(id(p) in ties for p in copies):
        return {}
    for attribute in (value for part in chain for value in getattr(part, "__dict__", {}).values()):
        flat = [p for part in attribute for p in part] if _is_list_of(list, attribute) else attribute
        if not _is_list_of(Tensor, flat) or not all(id(p) in ties for p in flat):
            continue
        if [p.shape for p in flat] == [p.shape for p in copies]:
            return {id(copy): ties[id(p)] for copy, p in zip(copies, flat, strict=True)}
    return {}


def outside_parameters(optimizer: Any, ties: Mapping[int, tuple[Key, ...]]) -> dict[str, Tensor]:
    """Returns the parameters of an optimizer that are not the models', by group and place: "0_3"."""
    known = {**ties, **_masters(optimizer, ties)}
    groups = (group["params"] for group in param_groups_of(optimizer) or ())
    return {
        f"{number}_{place}": parameter
        for number, group in enumerate(groups)
        for place, parameter in enumerate(group)
        if id(parameter) not in known
    }


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(part, kind) for part in value)


def _name_one(
    prefix: Key, optimizer: Any, model: ModelEntries, groups: list[ParamGroup], labels: list[str]
) -> NamedOptimizer:
    zero = (part for part in optimizer_chain(optimizer) if type(part).__name__ == "ZeroRedundancyOptimizer")
    stateful = next((wrapper.optim for wrapper in zero), optimizer)  # which has the parameters of this rank alone
    theirs, ties = param_groups_of(stateful) or [], {**model.ties, **_masters(optimizer, model.ties)}
    names = [tuple(_name_of(p, ties, "param_groups") for p in group["params"]) for group in theirs]
    mine = [p for group in theirs for p in group["params"]]
    parameters = dict(zip((key for group in names for key in group), mine, strict=True))
    numbering = ParameterNumbering(names, labels, parameters)
    form, shared = None, {}
    if is_plain(stateful):
        own = {key: stateful.state.get(parameter, {}) for key, parameter in parameters.items()}
        shared = {key: value for key, value in stateful.state.items() if not isinstance(key, Tensor)}
    else:
        parts = split(stateful.state_dict(), numbering)
        form, own, shared = parts.form, parts.own, parts.shared or {}
        if parts.values is not None and stateful is optimizer:
            groups = [ParamGroup(group.members, values) for group, values in zip(groups, parts.values, strict=True)]
    live = NamedOptimizer(
        prefix,
        optimizer,
        stateful=stateful,
        groups=tuple(groups),
        numbering=numbering,
        own=dict(own),
        shared=shared,
        shards=model.shards,
        form=form,
    )
    _check(live)
    return live


def is_plain(optimizer: Any) -> bool:
    """Whether `.state` and `.param_groups` are all of an optimizer's state: it does not change torch's own methods."""
    # A wrapper may also replace a method on the object alone, where the class does not show it.
    if not isinstance(optimizer, torch.optim.Optimizer) or _METHODS & vars(optimizer).keys():
        return False
    kind, base = type(optimizer), torch.optim.Optimizer
    return all(getattr(kind, name) is getattr(base, name) for name in _METHODS) and not any(
        getattr(optimizer, name, None) for name in _HOOKS
    )


_METHODS = {"state_dict", "load_state_dict"}
_HOOKS = tuple(f"_optimizer_{method}_{when}_hooks" for method in sorted(_METHODS) for when in ("pre", "post"))


def optimizer_chain(optimizer: Any) -> list[Any]:
    """Returns an optimizer and those that it wraps, from the outside in."""
    chain = [optimizer]
    while not is_plain(chain[-1]):
        attributes = getattr(chain[-1], "__dict__", {}).values()
        # An inner optimizer may refer back to its wrapper: one that was found is not followed again.
        inner = next((value for value in attributes if is_optimizer(value) and value not in chain), None)
        if inner is None:
            break
        chain.append(inner)
    return chain


def all_groups(optimizer: Optimizers | bool | None) -> list[dict[str, Any]]:
    """Returns the groups of optimizers and of those that they wrap, each once; none for None and False."""
    pairs = named_objects(optimizer, torch.optim.Optimizer, "optimizer") if optimizer not in (None, False) else ()
    chain = (part for _, outer in pairs for part in optimizer_chain(outer))
    return list({id(group): group for part in chain for group in getattr(part, "param_groups", ())}.values())


def param_groups_of(optimizer: Any) -> Any:
    """Returns the groups of an optimizer; those of the one that it wraps, if it has none itself; None if neither."""
    return next((part.param_groups for part in optimizer_chain(optimizer) if hasattr(part, "param_groups")), None)


def options_of(optimizer: Any) -> frozenset[str]:
    """Returns the names of the options of torch's optimizers, and of the class of an innermost one."""
    return torch_options() | inspect.signature(type(optimizer_chain(optimizer)[-1])).parameters.keys()


def _name_of(parameter: Tensor, ties: Mapping[int, tuple[Key, ...]], where: str) -> Key:
    names = ties.get(id(parameter))
    if names is None:
        raise TreeError(
            where,
            expected="parameters of the model that is given",
            found=f"a tensor of shape {tuple(parameter.shape)} that is none of them",
            hint=_ZERO_ADVICE
            if "deepspeed" in sys.modules
            else "Give every module whose parameters the optimizer has. If the model was moved, materialised or "
            "sharded (fully_shard, parallelize_module) after the optimizer was made, make the optimizer after that",
        )
    return names[0]


def _check(live: NamedOptimizer) -> None:
    known = {id(parameter) for parameter in live.parameters.values()}
    for key in live.stateful.state if live.form is None else ():
        if isinstance(key, Tensor) and id(key) not in known:
            raise TreeError(
                "optimizer",
                expected="state of parameters in the optimizer's groups",
                found=f"state of a tensor of shape {tuple(key.shape)} that is in none",
                hint=_ZERO_ADVICE
                if "deepspeed" in sys.modules
                else "Remove it from optimizer.state, or add the parameter to a group",
            )
    if is_lbfgs(live.stateful) and any(is_dtensor(parameter) for parameter in live.parameters.values()):
        raise TreeError(
            "optimizer",
            expected="whole parameters under LBFGS, which joins them into one vector",
            found="distributed ones, of which it joins the local parts",
            hint="No other layout can take this state up; train LBFGS with plain parameters",
        )


def is_lbfgs(optimizer: object) -> bool:
    """Whether an optimizer keeps one state for the vector of all its parameters."""
    return isinstance(optimizer_chain(optimizer)[-1], torch.optim.LBFGS)


def optimizer_names(lives: Sequence[NamedOptimizer]) -> list[Key]:
    """Returns the names of the optimizers, each once; `()` for a single one."""
    return list(dict.fromkeys(live.prefix for live in lives))


def groups_of(lives: Sequence[NamedOptimizer], prefix: Key) -> list[ParamGroup]:
    """Returns the groups of an optimizer, of all its parts."""
    return [group for live in lives if live.prefix == prefix for group in live.groups]


def trees_of(lives: Sequence[NamedOptimizer], left_out: Container[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (state, groups) of all optimizers, without the state of the parameters that are left out, by name."""
    state: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for live in lives:
        for key, own in live.own.items():
            if key_path(key) not in left_out:
                put_in(state, (*live.prefix, *key), live.spread(key, own, live.own_moments))
    for prefix in optimizer_names(lives):
        parts = [live for live in lives if live.prefix == prefix]
        tree: dict[str, Any] = {**tree_of_groups(groups_of(lives, prefix)), **_beside(parts)}
        order = [key_path(key) for live in parts if is_lbfgs(live.stateful) for key in live.parameters]
        if order:
            tree["order"] = order
        if prefix:
            put_in(groups, prefix, tree)
        else:
            groups = tree
    return state, groups


def _beside(parts: Sequence[NamedOptimizer]) -> dict[str, Any]:
    """Returns the state that belongs to no parameter: `shared` where all parts agree, else by part."""
    forms = {
        live.label: live.form for live in parts if live.form is not None and live.form != standard_form(live.shared)
    }
    if not forms and all(is_same(parts[0].shared, live.shared) for live in parts):
        return {"shared": parts[0].shared} if parts[0].shared else {}
    return {STATE_DICT_KEY: {live.label: forms.get(live.label, standard_form(live.shared)) for live in parts}}


# moments of which each rank has its own -------------------------------------------------------------------------------


State = Mapping[Any, Any]
"""The state of one parameter, by moment."""
Shard = tuple[tuple[int, ...], Any]
"""(global shape, offset) of a parameter that is a shard of an array."""


def is_spread(parameter: Any, shard: Shard | None) -> bool:
    """Whether ranks hold different parts of a parameter."""
    if not is_dtensor(parameter):
        return shard is not None and tuple(parameter.shape) != tuple(shard[0])
    mesh = parameter.device_mesh
    return any(
        not placement.is_replicate() and mesh.size(dim) > 1 for dim, placement in enumerate(parameter.placements)
    )


def _plain_arrays(state: State) -> Iterator[tuple[str, Any]]:
    """Yields (name, array) for the plain tensors and arrays of numpy in the state of a parameter."""
    for key, value in state.items():
        if isinstance(value, (Tensor, np.ndarray)):
            leaves = [("", value)]
        elif isinstance(value, (int, float, str, type(None), Sharded)):
            continue
        else:
            leaves = flatten(value)[1]
        for below, leaf in leaves:
            if isinstance(leaf, (Tensor, np.ndarray)) and not is_dtensor(leaf):
                yield f"{key_text(key)}/{below}" if below else key_text(key), leaf


def with_own(state: State, names: frozenset[str]) -> dict[Any, Any]:
    """Returns the state of a parameter with what each rank has of its own under `PerRank`."""
    own = {name for name, _ in _plain_arrays(state)} & names
    if not own:
        return dict(state)
    marked: Any = replace_leaves(
        dict(state), iter([PerRank(leaf) if path in own else leaf for path, leaf in flatten(dict(state))[1]])
    )
    return marked


def without_own(structure: Structure) -> Structure:
    """Returns the structure of a saved state as if nothing in it were under `PerRank`, but for parts of a tensor."""
    if isinstance(structure, PerRankNode):
        return structure.children[0]
    if structure is None or isinstance(structure, TensorNode):
        return structure
    return msgspec.structs.replace(structure, children=tuple(map(without_own, structure.children)))


def saved_own(structure: Structure) -> frozenset[str]:
    """Returns the names of what each rank had of its own in the saved state of a parameter."""

    def names(node: Structure, path: str) -> Iterator[str]:
        if isinstance(node, PerRankNode):
            yield path
        elif not isinstance(node, TensorNode):
            for key, child in children_of(node).items():
                yield from names(child, f"{path}/{key_text(key)}" if path else key_text(key))

    return frozenset(names(structure, ""))


def check_own(
    live: NamedOptimizer, key: Key, source: RestoreSource, paths: tuple[str, str], structure: Structure
) -> frozenset[str]:
    """Compares the saved state of a parameter with the part of it that this rank holds.

    Args:
        paths: of the saved state, and of the saved parameter.

    Returns:
        The names of the moments that each rank had of its own.

    Raises:
        MismatchError: a moment is of other parts of the parameter than the ranks hold here.
    """
    path, weight = paths
    parameter, shard = live.parameters[key], live.shards.get(id(live.parameters[key]))
    spread, own = is_spread(parameter, shard), saved_own(structure)
    if own:
        wanted = parameter if shard is None else Sharded(parameter, *shard)
        if not (spread and source.is_same_part(weight, wanted)):
            raise _of_other_parts(f"{path}/{min(own)}", "each rank's own, of the part that it held when it was saved")
    for leaf_path in leaves_below(path, tensors_as_leaves(structure)[0]) if spread else ():
        spec, name = source.leaves.get(leaf_path), leaf_path.removeprefix(f"{path}/")
        if spec is None or OWN in leaf_path:
            continue
        if not _takes(live, key, name, spec, spread=source.is_spread(leaf_path)):
            raise _of_other_parts(leaf_path, f"one for all ranks, of shape {spec.shape}")
    return own


def _takes(live: NamedOptimizer, key: Key, name: str, spec: ArraySpec, *, spread: bool) -> bool:
    """Whether a saved moment that is not each rank's own is not a rank's own here either, as far as that is known.

    A fresh optimizer gets a moment as torch's, whose moments of a DTensor are DTensors, lay it out where each dimension
    is one of the parameter, or 1.

    Args:
        spread: whether it was a distributed array.
    """
    parameter: Any = live.parameters[key]
    shape = tuple(live.shards[id(parameter)][0] if id(parameter) in live.shards else parameter.shape)
    if math.prod(spec.shape) == 1 or spec.shape == shape:
        return True
    if name in live.own_moments:
        return False
    like_it = len(spec.shape) == len(shape) and all(n in (1, m) for n, m in zip(spec.shape, shape, strict=True))
    of_torch = f"{type(live.innermost).__module__}.".startswith("torch.optim.")
    return like_it or spread or of_torch or name.partition("/")[0] in map(key_text, live.own[key])


def _of_other_parts(path: str, found: str) -> MismatchError:
    return MismatchError(
        path,
        expected="a moment of the part of the parameter that this rank holds here",
        found=found,
        hint="Only the optimizer could make it of another layout. Restore it with as many ranks and the layout with "
        "which it was saved; or pass optimizer=None, and the optimizer begins anew",
    )


# state dicts ----------------------------------------------------------------------------------------------------------

STATE_DICT_KEY = "state_dict"
"""Key of the state that a state dict has for a parameter outside of its `state`."""

_STATE = "state"
_GROUPS = "param_groups"
BY_GROUP = "by_group"
_BY_PARAMETER = "by_parameter"
_NOT_VALUES = ("params", "param_names")


class ParameterNumbering(msgspec.Struct):
    """The parameters of an optimizer in the order of its groups."""

    members: Sequence[Sequence[Key]]
    labels: Sequence[str]
    parameters: Mapping[Key, Any]

    @property
    def keys(self) -> list[Key]:
        """Each parameter once, in its order."""
        return list(dict.fromkeys(key for group in self.members for key in group))

    def names_of(self, style: str) -> dict[Any, Key]:
        """Returns the parameters by their names in a state dict of a style."""
        if style == "place":
            return {(i, j): key for i, group in enumerate(self.members) for j, key in enumerate(group)}
        if style == "name":
            return {key[-1]: key for key in self.keys}
        if style == "tensor":
            return {self.parameters[key]: key for key in self.keys}
        return dict(enumerate(self.keys))


class SplitState(msgspec.Struct):
    """A state dict in parts."""

    form: Any
    own: dict[Key, dict[Any, Any]]
    """What the state dict has for each parameter."""
    values: list[dict[str, Any]] | None
    """Hyper-parameters by group, where the state dict has them at its root."""

    @property
    def shared(self) -> dict[Any, Any] | None:
        """The state that belongs to no parameter, for the form of torch's own optimizers; None for other forms."""
        rest = _rest_of(self.form)
        return rest if self.form == standard_form(rest) and not _has_marks(rest) else None


def standard_form(shared: Any = None) -> dict[str, Any]:
    """Returns the form of the state dicts of torch's own optimizers."""
    return {_STATE: _mark("number", "", shared or {}), _GROUPS: {BY_GROUP: None, "params": "number"}}


def _rest_of(form: Any) -> dict[Any, Any] | None:
    """Returns the entries of a form's `state` that belong to no parameter."""
    state = form.get(_STATE) if isinstance(form, dict) else None
    return state["rest"] if isinstance(state, dict) and _BY_PARAMETER in state else None


def _mark(style: str, place: str, rest: Any) -> dict[str, Any]:
    return {_BY_PARAMETER: style, "at": place, "rest": rest}


def _has_marks(node: Any) -> bool:
    if isinstance(node, dict):
        return _BY_PARAMETER in node or BY_GROUP in node or any(map(_has_marks, node.values()))
    return isinstance(node, (list, tuple)) and any(map(_has_marks, node))


def has_own_forms(form: Any) -> bool:
    """Whether a form has state of parameters outside of the root's `state`."""
    state = form.get(_STATE) if isinstance(form, dict) else None
    beside = [part for key, part in form.items() if key not in (_STATE, _GROUPS)] if isinstance(form, dict) else []
    return not (isinstance(state, dict) and state.get("at") == "") or any(map(_has_marks, beside))


def split(state_dict: Any, numbering: ParameterNumbering) -> SplitState:
    """Splits a state dict into its form and the state of each parameter; tensors stay the same objects."""
    job = _Splitter(numbering)
    form = job.walk(state_dict, (), dict(enumerate(numbering.keys)))
    return SplitState(form, job.own, job.values)


class _Splitter:
    def __init__(self, numbering: ParameterNumbering) -> None:
        self.numbering = numbering
        self.own: dict[Key, dict[Any, Any]] = {key: {} for key in numbering.keys}
        self.values: list[dict[str, Any]] | None = None
        self.objects = {id(parameter): key for key, parameter in numbering.parameters.items()}

    def walk(self, node: Any, steps: tuple[str, ...], numbers: Mapping[Any, Key]) -> Any:
        if isinstance(node, dict):
            packed = self._numbers_in(node)
            return self._walk_dict(node, steps, numbers) if packed is None else self._walk_packed(node, steps, packed)
        if type(node) in (list, tuple):
            if (keys := self._listed(node)) is not None:
                self._put_all(steps, {key: part for key, part in keys.items() if part is not None})
                return _mark("list" if isinstance(node[0], Tensor) else "lists", ".".join(steps), {})
            return type(node)(self.walk(part, (*steps, str(i)), numbers) for i, part in enumerate(node))
        return node

    def _numbers_in(self, node: Mapping[Any, Any]) -> dict[Any, Key] | None:
        """Returns the parameters by their numbers or names in a state dict; None for another dict, or other groups."""
        groups, members = node.get(_GROUPS), self.numbering.members
        if not isinstance(groups, (list, tuple)) or not isinstance(node.get(_STATE), dict):
            return None
        if not all(isinstance(group, dict) and isinstance(group.get("params"), (list, tuple)) for group in groups):
            return None
        if [len(group["params"]) for group in groups] != list(map(len, members)):
            return None
        pairs = [
            (n, k)
            for group, keys in zip(groups, members, strict=True)
            for n, k in zip(group["params"], keys, strict=True)
        ]
        names = {key[-1]: key for key in self.numbering.keys}
        if any(isinstance(number, str) for number, _ in pairs):
            return {n: names[n] for n, _ in pairs} if all(n in names for n, _ in pairs) else None
        return dict(pairs)

    def _walk_packed(self, node: Mapping[Any, Any], steps: tuple[str, ...], numbers: Mapping[Any, Key]) -> Any:
        style = "name" if any(isinstance(number, str) for number in numbers) else "number"
        values = [{k: v for k, v in group.items() if k not in _NOT_VALUES} for group in node[_GROUPS]]
        if not steps:
            self.values = values
        by_group = dict(zip(self.numbering.labels, values, strict=True)) if steps else None
        state, rest = node[_STATE], {}
        mine = {numbers[number]: part for number, part in state.items() if number in numbers}
        rest = {key: part for key, part in state.items() if key not in numbers}
        where = (
            "" if not steps and all(isinstance(part, dict) for part in mine.values()) else ".".join((*steps, _STATE))
        )
        self._put_all((where,) if where else (), mine)
        marks = {
            _STATE: _mark(style, where, self.walk(rest, (*steps, _STATE), numbers)),
            _GROUPS: {BY_GROUP: by_group, "params": style},
        }
        return {
            key: marks[key] if key in marks else self.walk(part, (*steps, str(key)), numbers)
            for key, part in node.items()
        }

    def _walk_dict(self, node: dict[Any, Any], steps: tuple[str, ...], numbers: Mapping[Any, Key]) -> Any:
        for style, keyed in self._ways(node, numbers):
            if keyed:
                self._put_all(steps, {key: node[name] for name, key in keyed.items()})
                rest = {name: part for name, part in node.items() if name not in keyed}
                return _mark(
                    style, ".".join(steps), {k: self.walk(v, (*steps, str(k)), numbers) for k, v in rest.items()}
                )
        if type(node) is not dict:
            return node
        return {key: self.walk(part, (*steps, str(key)), numbers) for key, part in node.items()}

    def _ways(self, node: dict[Any, Any], numbers: Mapping[Any, Key]) -> Iterable[tuple[str, dict[Any, Key]]]:
        """Yields each style in which the keys of a dict may name parameters, and the parameters by key."""
        yield "tensor", {k: self.objects[id(k)] for k in node if isinstance(k, Tensor) and id(k) in self.objects}
        places = self.numbering.names_of("place")
        yield "place", {k: places[k] for k in node if type(k) is tuple and k in places}
        names = self.numbering.names_of("name")
        yield "name", {k: names[k] for k in node if type(k) is str} if node and all(k in names for k in node) else {}
        given = {k: numbers[k] for k in node if type(k) is int and k in numbers}
        yield "number", given if self._is_by_parameter(node, given, numbers) else {}

    def _is_by_parameter(self, node: dict[Any, Any], given: Mapping[Any, Key], numbers: Mapping[Any, Key]) -> bool:
        """Whether integers are numbers of parameters: all are there, or each has a tensor of its parameter's shape."""
        # Of one parameter the only number is 0, which any dict may have as a key; then the shape decides.
        if len(given) == len(numbers) > 1:
            return True
        shapes = {number: self.numbering.parameters[key].shape for number, key in given.items()}
        return bool(given) and all(
            any(isinstance(leaf, Tensor) and leaf.shape == shape for _, leaf in flatten(node[number])[1])
            for number, shape in shapes.items()
        )

    def _listed(self, node: Sequence[Any]) -> dict[Key, Any] | None:
        """Returns the tensors of a list with one for each parameter, or of lists of these by group; else None."""
        flat, keys = list(node), [key for group in self.numbering.members for key in group]
        if all(type(part) in (list, tuple) for part in node) and list(map(len, node)) == list(
            map(len, self.numbering.members)
        ):
            flat = [part for group in node for part in group]
        if not flat or len(flat) != len(keys):
            return None
        shapes = [self.numbering.parameters[key].shape for key in keys]
        same = all(isinstance(part, Tensor) and part.shape == s for part, s in zip(flat, shapes, strict=True))
        return dict(zip(keys, flat, strict=True)) if same else None

    def _put_all(self, steps: tuple[str, ...], parts: Mapping[Key, Any]) -> None:
        for key, part in parts.items():
            if steps:
                self.own[key].setdefault(STATE_DICT_KEY, {})[".".join(steps)] = part
            else:
                self.own[key].update(part)


Grouped = Callable[[Mapping[str, Mapping[str, Any]] | None], Sequence[Mapping[str, Any]]]
"""Hyper-parameters by label, None for those at the root -> those of each live group."""


def join(
    form: Any, numbering: ParameterNumbering, own: Mapping[Key, Mapping[Any, Any]], grouped: Grouped, here: Any
) -> Any:
    """Returns a state dict for `load_state_dict`; the inverse of `split`.

    Args:
        own: by parameter, what the state dict is to have for it.
        grouped: gives the hyper-parameters of each group.
        here: the form of the live optimizer: it decides where tensors of no parameter go.
    """

    def walk(node: Any, live: Any) -> Any:
        if type(node) is dict:
            if _BY_PARAMETER in node:
                rest = walk(node["rest"], live.get("rest") if isinstance(live, dict) else None)
                return _keyed(node[_BY_PARAMETER], node["at"], numbering, own, rest)
            if BY_GROUP in node:
                names = {key: name for name, key in numbering.names_of(node["params"]).items()}
                groups = zip(grouped(node[BY_GROUP]), numbering.members, strict=True)
                return [{**values, "params": [names[key] for key in members]} for values, members in groups]
            return {key: walk(part, live.get(key) if isinstance(live, dict) else None) for key, part in node.items()}
        if type(node) in (list, tuple):
            beside = live if type(live) is type(node) and len(live) == len(node) else [None] * len(node)
            return type(node)(walk(*pair) for pair in zip(node, beside, strict=True))
        return _placed(node, live) if isinstance(node, Tensor) else node

    return walk(form, here)


def shared_of(form: Any, numbering: ParameterNumbering, here: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the state of a form that belongs to no parameter.

    Args:
        here: what the live optimizer has of that: it decides where tensors go.
    """
    return join(_rest_of(form) or {}, numbering, {}, lambda _: (), here)


def _keyed(
    style: str, place: str, numbering: ParameterNumbering, own: Mapping[Key, Mapping[Any, Any]], rest: Any
) -> Any:
    def part(key: Key) -> Any:
        mine = own.get(key, {})
        if place:
            return mine.get(STATE_DICT_KEY, {}).get(place)
        return {name: value for name, value in mine.items() if name != STATE_DICT_KEY} or None

    if style == "list":
        return [part(key) for group in numbering.members for key in group]
    if style == "lists":
        return [[part(key) for key in group] for group in numbering.members]
    by_name = {name: mine for name, key in numbering.names_of(style).items() if (mine := part(key)) is not None}
    return {**by_name, **rest}


def _placed(saved: Tensor, live: Any) -> Tensor:
    """Returns a copy of a tensor in the layout of the live one."""
    if is_dtensor(live) and not is_dtensor(saved):
        from torch.distributed.tensor import distribute_tensor

        # Without a source rank nothing is sent: each rank cuts its part of the whole that it has.
        return distribute_tensor(saved.to(live.device), live.device_mesh, live.placements, src_data_rank=None)
    return saved.detach().clone().to(live.device if isinstance(live, Tensor) else saved.device)
