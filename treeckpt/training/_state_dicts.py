"""Conversion of an optimizer's `state_dict()` of any form to parameter names and back.

torch numbers parameters by their place in the groups. Optimizers that have a `state_dict` of their own add entries,
nest the state dicts of optimizers that they wrap, and key tensors by number, by (group, place), by the parameter itself
or by list position. `split` takes out what belongs to parameters; what is left is the *form*: the same dict with a mark
in the place of each such part. `join` makes the dict again for parameters in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from .._arrays.dtensor import is_dtensor
from .._core.tree.flatten import flatten
from ._names import Key

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
    """By parameter."""
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


def _mark(style: str, at: str, rest: Any) -> dict[str, Any]:
    return {_BY_PARAMETER: style, "at": at, "rest": rest}


def _has_marks(node: Any) -> bool:
    if isinstance(node, dict):
        return _BY_PARAMETER in node or BY_GROUP in node or any(map(_has_marks, node.values()))
    return isinstance(node, (list, tuple)) and any(map(_has_marks, node))


def has_own_forms(form: Any) -> bool:
    """Whether a form has state of parameters outside of the root's `state`."""
    state = form.get(_STATE) if isinstance(form, dict) else None
    beside = [part for key, part in form.items() if key not in (_STATE, _GROUPS)] if isinstance(form, dict) else []
    return not (isinstance(state, dict) and state.get("at") == "") or any(map(_has_marks, beside))


def split(found: Any, numbering: ParameterNumbering) -> SplitState:
    """Splits a state dict into its form and the state of each parameter; tensors stay the same objects."""
    job = _Splitter(numbering)
    form = job.walk(found, (), dict(enumerate(numbering.keys)))
    return SplitState(form, job.own, job.values)


class _Splitter:
    def __init__(self, numbering: ParameterNumbering) -> None:
        self.numbering = numbering
        self.own: dict[Key, dict[Any, Any]] = {key: {} for key in numbering.keys}
        self.values: list[dict[str, Any]] | None = None
        self.objects = {id(parameter): key for key, parameter in numbering.parameters.items()}

    def walk(self, node: Any, at: tuple[str, ...], numbers: Mapping[Any, Key]) -> Any:
        if isinstance(node, dict):
            packed = self._numbers_in(node)
            return self._walk_dict(node, at, numbers) if packed is None else self._walk_packed(node, at, packed)
        if type(node) in (list, tuple):
            if (keys := self._listed(node)) is not None:
                self._put_all(at, {key: part for key, part in keys.items() if part is not None})
                return _mark("list" if isinstance(node[0], Tensor) else "lists", ".".join(at), {})
            return type(node)(self.walk(part, (*at, str(i)), numbers) for i, part in enumerate(node))
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

    def _walk_packed(self, node: Mapping[Any, Any], at: tuple[str, ...], numbers: Mapping[Any, Key]) -> Any:
        style = "name" if any(isinstance(number, str) for number in numbers) else "number"
        values = [{k: v for k, v in group.items() if k not in _NOT_VALUES} for group in node[_GROUPS]]
        if not at:
            self.values = values
        by_group = dict(zip(self.numbering.labels, values, strict=True)) if at else None
        state, rest = node[_STATE], {}
        mine = {numbers[number]: part for number, part in state.items() if number in numbers}
        rest = {key: part for key, part in state.items() if key not in numbers}
        where = "" if not at and all(isinstance(part, dict) for part in mine.values()) else ".".join((*at, _STATE))
        self._put_all((where,) if where else (), mine)
        marks = {
            _STATE: _mark(style, where, self.walk(rest, (*at, _STATE), numbers)),
            _GROUPS: {BY_GROUP: by_group, "params": style},
        }
        return {
            key: marks[key] if key in marks else self.walk(part, (*at, str(key)), numbers) for key, part in node.items()
        }

    def _walk_dict(self, node: dict[Any, Any], at: tuple[str, ...], numbers: Mapping[Any, Key]) -> Any:
        for style, keyed in self._ways(node, numbers):
            if keyed:
                self._put_all(at, {key: node[name] for name, key in keyed.items()})
                rest = {name: part for name, part in node.items() if name not in keyed}
                return _mark(style, ".".join(at), {k: self.walk(v, (*at, str(k)), numbers) for k, v in rest.items()})
        if type(node) is not dict:
            return node
        return {key: self.walk(part, (*at, str(key)), numbers) for key, part in node.items()}

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

    def _put_all(self, at: tuple[str, ...], parts: Mapping[Key, Any]) -> None:
        for key, part in parts.items():
            if at:
                self.own[key].setdefault(STATE_DICT_KEY, {})[".".join(at)] = part
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


def _keyed(style: str, at: str, numbering: ParameterNumbering, own: Mapping[Key, Mapping[Any, Any]], rest: Any) -> Any:
    def part(key: Key) -> Any:
        mine = own.get(key, {})
        if at:
            return mine.get(STATE_DICT_KEY, {}).get(at)
        return {name: value for name, value in mine.items() if name != STATE_DICT_KEY} or None

    if style == "list":
        return [part(key) for group in numbering.members for key in group]
    if style == "lists":
        return [[part(key) for key in group] for group in numbering.members]
    found = {name: mine for name, key in numbering.names_of(style).items() if (mine := part(key)) is not None}
    return {**found, **rest}


def _placed(saved: Tensor, live: Any) -> Tensor:
    """Returns a copy of a tensor in the layout of the live one."""
    if is_dtensor(live) and not is_dtensor(saved):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(saved.to(live.device), live.device_mesh, live.placements, src_data_rank=None)
    return saved.detach().clone().to(live.device if isinstance(live, Tensor) else saved.device)
