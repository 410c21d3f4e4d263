"""Changes of the contents of a conversion: load rules, casts, and the state dicts that torch's optimizers load.

New arrays are made while they are read, box by box. Training states of ours have their parameters by number in a file
of torch.save, and by name for DCP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import HostArray, LazyArray, Storage, TargetPiece, raw_dtype
from .._arrays.registry import library_of
from .._core.sharding.dtypes import dtype_of, normalize_dtype
from .._core.sharding.region import Region
from .._core.tree.flatten import flatten
from .._core.tree.paths import with_field_names
from .._core.tree.structure import DictNode, key_text, parse_path, paths_of
from .._foreign.files import new_address
from ..errors import MismatchError
from ..rules._apply_rules import LeafState, TransformedLeaves, apply_rules
from ..rules._assemble import PermutedWriter, constant_write, scales_of
from ..rules._composed_array import ComposedArray, Constant, SourceBox, parts_in, saved
from ..rules._rules import Rule, check_scaled, with_names
from ..rules._view import empty_containers, rebuild_structure
from ._contents import Contents, Finding, map_leaves, subtree, tree_of

MAX_WASTE = 2
"""Elements that are read for one that is needed, at most, where parts of one array are read together."""


def transform(contents: Contents, rules: Sequence[Rule]) -> Contents:
    """Returns the contents after rules.

    Raises:
        MismatchError: a rule that cannot be applied, or one that needs a target.
    """
    leaves = dict(contents.leaves)
    items: dict[str, LeafState] = {}
    owners: dict[object, str] = {}
    for number, (path, leaf) in enumerate(contents.leaves):
        array = None
        if isinstance(leaf, LazyArray):
            place = (leaf.storage.address, leaf.storage.strides, leaf.spec) if leaf.storage is not None else path
            # ties are one source, so that they stay one array through rules
            array = saved(owners.setdefault(place, path), leaf.spec)
        items[path] = LeafState(path, (number,), array)
    empty = empty_containers(contents.structure)
    # an empty container comes after the leaf before it, and after all that rules build from that leaf
    items.update((path, LeafState(path, (before - 1, 1 << 60, i))) for i, (path, before) in enumerate(empty))
    transformed = apply_rules(items, with_names(rules, with_field_names(contents.structure)))
    _check_no_target(transformed)
    names = [(path, item.of) for path, item in transformed.items.items()]
    structure = rebuild_structure(contents.structure, names, source_rank=0, rank=0)
    made: dict[ComposedArray, LazyArray] = {}
    changed: list[tuple[str, Any]] = []
    for path, _ in paths_of(structure):
        item = transformed.items[path]
        if item.array is None or (item.of and item.array == items[item.of].array):
            changed.append((path, leaves[item.of]))
            continue
        if item.array not in made:
            made[item.array] = _composed(item.array, leaves)
        changed.append((path, made[item.array]))
    return msgspec.structs.replace(contents, structure=structure, leaves=tuple(changed))


def _check_no_target(transformed: TransformedLeaves) -> None:
    for name in (*transformed.keeps, *(fill.target for fill in transformed.fills)):
        raise MismatchError(
            name,
            expected="rules that need no target",
            found="one that takes a value, or a shape, from the target",
            hint="Leave it for load, or give a fill its shape=",
        )


def _composed(array: ComposedArray, leaves: dict[str, Any]) -> LazyArray:
    def read(region: Region) -> np.ndarray:
        memory = np.empty(region.shape, raw_dtype(dtype_of(array.spec.dtype).itemsize))
        piece = TargetPiece(region, HostArray(memory))
        by_source: dict[str, list[SourceBox]] = {}
        for part in parts_in(array, region):
            if isinstance(part, Constant):
                constant_write(part, piece, array.spec)()
            elif part.region.size:
                by_source.setdefault(part.source, []).append(part)
        for source, parts in by_source.items():
            for box, together in _boxes(parts):
                data = leaves[source].read(box)
                for part in together:
                    scales = scales_of(part, lambda path, region: leaves[path].read(region))
                    writer = PermutedWriter(piece, part, array.spec, scales)
                    writer.write(Region.whole(part.box.shape).slices(), data[part.box.relative_to(box).slices()])
        return memory

    nbytes = math.prod(array.shape) * dtype_of(array.spec.dtype).itemsize
    return LazyArray(array.spec, read, Storage(new_address(nbytes), nbytes, None) if nbytes else None)


def _boxes(parts: Sequence[SourceBox]) -> list[tuple[Region, list[SourceBox]]]:
    """Returns the boxes of one source to read, each with its parts: all together, unless too much else lies between."""
    start = tuple(map(min, zip(*(part.box.offset for part in parts), strict=True)))
    stop = tuple(map(max, zip(*(part.box.stop for part in parts), strict=True)))
    around = Region(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
    if around.size <= MAX_WASTE * sum(part.region.size for part in parts):
        return [(around, list(parts))]
    return [(part.box, [part]) for part in parts]


FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes that arrays can be cast to."""
_FLOATING = (*FLOATS, "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz")
_FLOATING += ("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")
"""The dtypes of arrays that a cast changes."""
_LARGEST = {"float16": 65504.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The largest finite value of each dtype that holds fewer magnitudes than float32."""


def cast_floats(contents: Contents, dtype: Any) -> Contents:
    """Casts all arrays of floating point to one dtype. Ties stay, views become arrays of their own.

    Raises:
        MismatchError: no such dtype to cast to, or float8 beside scales.
    """
    name = normalize_dtype(dtype)
    if name not in FLOATS:
        raise MismatchError("dtype", expected=f"one of {', '.join(FLOATS)}", found=f"{dtype!r:.60}")
    moved: dict[Any, Storage] = {}
    paths = frozenset(path for path, _ in contents.leaves)

    def change(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, LazyArray) or leaf.spec.dtype not in _FLOATING or leaf.spec.dtype == name:
            return leaf
        check_scaled(path, (leaf.spec.dtype, name), paths)
        storage = leaf.storage
        if storage is not None:
            key = (storage.address, storage.strides, leaf.spec.shape, leaf.spec.dtype)
            if key not in moved:
                nbytes = math.prod(leaf.spec.shape) * dtype_of(name).itemsize
                moved[key] = Storage(new_address(nbytes), nbytes, None)
            storage = moved[key]
        return _cast(leaf, name, path, storage)

    return map_leaves(contents, change)


def _cast(leaf: LazyArray, dtype: str, path: str, storage: Storage | None) -> LazyArray:
    spec = msgspec.structs.replace(leaf.spec, dtype=dtype)
    convert = library_of(spec).cast

    def read(region: Region) -> np.ndarray:
        data = leaf.read(region)
        if dtype in _LARGEST:
            # before the cast: infinity after it could have been there before
            _check_range(convert(data, leaf.spec.dtype, "float64"), dtype, path)
        return convert(data, leaf.spec.dtype, dtype).reshape(region.shape)

    return LazyArray(spec, read, storage)


def _check_range(raw: np.ndarray, dtype: str, path: str) -> None:
    """Refuses finite values that would come out as infinity."""
    values = np.abs(np.ascontiguousarray(raw).view(np.float64))
    beyond = np.isfinite(values) & (values > _LARGEST[dtype])
    if beyond.any():
        raise MismatchError(
            path,
            expected=f"values up to {_LARGEST[dtype]:g}, which {dtype} holds",
            found=f"{values[beyond].max():g}",
            hint="Cast to bfloat16, or leave the leaf out",
        )


_OWN_FORM = "state_dict"
"""The key of param groups that have the state of an optimizer with a `state_dict` of its own."""


def with_state_dicts(contents: Contents, *, numbered: bool) -> Contents:
    """Returns a training state with the state dict of each optimizer at `optimizer`; any other tree as it is.

    Numbers count parameters in the order of the groups, and in a group in that of the model's state dict.

    Args:
        numbered: parameters have numbers, as `Optimizer.state_dict` has it; else names, as `get_state_dict`.
    """
    root = contents.structure
    if not isinstance(root, DictNode) or not {"model", "optimizer", "param_groups"} <= set(root.keys):
        return contents
    groups, state = (tree_of(subtree(contents, name)) for name in ("param_groups", "optimizer"))
    if not isinstance(groups, dict) or not isinstance(state, dict):
        return contents
    made = _state_dicts(groups, state, _positions(contents), numbered=numbered)
    if made is None:
        finding = Finding("param_groups", "groups as torch's optimizers have them", "others", "what they are")
        return msgspec.structs.replace(contents, findings=(*contents.findings, finding))
    structure, leaves = flatten(made)
    keys = tuple(key for key in root.keys if key != "param_groups")
    children = dict(zip(root.keys, root.children, strict=True)) | {"optimizer": structure}
    by_key: dict[str, list[tuple[str, Any]]] = {key_text(key): [] for key in keys}
    for path, leaf in contents.leaves:
        by_key.get(path.partition("/")[0], []).append((path, leaf))
    by_key["optimizer"] = [(f"optimizer/{path}", leaf) for path, leaf in leaves]
    style = "by number" if numbered else "by name"
    note = Finding("optimizer", "state dicts", "state by parameter", f"the optimizer's state dict, parameters {style}")
    return msgspec.structs.replace(
        contents,
        structure=DictNode(keys, tuple(children[key] for key in keys)),
        leaves=tuple(pair for key in keys for pair in by_key[key_text(key)]),
        findings=(*contents.findings, note),
    )


def _positions(contents: Contents) -> dict[str, int]:
    """Returns the place of each parameter in the model's state dict, that of the first one that it is tied to."""
    positions: dict[str, int] = {}
    firsts: dict[Any, int] = {}
    for position, (path, leaf) in enumerate(contents.leaves):
        if path.startswith("model/"):
            storage = leaf.storage if isinstance(leaf, LazyArray) else None
            key = path if storage is None else (storage.address, leaf.spec.shape)
            positions[path.removeprefix("model/")] = firsts.setdefault(key, position)
    return positions


def _state_dicts(
    groups: Mapping[str, Any], state: Mapping[str, Any], positions: Mapping[str, int], *, numbered: bool
) -> dict[Any, Any] | None:
    """Returns the state dict of an optimizer, or of several by name; None for groups of another form."""
    if {"members", "values"} <= groups.keys():
        return None if _OWN_FORM in groups else _state_dict(groups, state, positions, numbered=numbered)
    by_name: dict[Any, Any] = {}
    for name, inner in groups.items():
        made = None
        if isinstance(inner, dict):
            made = _state_dicts(inner, state.get(name, {}), positions, numbered=numbered)
        if made is None:
            return None
        by_name[name] = made
    return by_name


def _state_dict(
    groups: Mapping[str, Any], state: Mapping[str, Any], positions: Mapping[str, int], *, numbered: bool
) -> dict[str, Any]:
    """Returns the state dict of one optimizer."""
    order: Sequence[str] = groups.get("order", ())
    places = {name: number for number, name in enumerate(order)} or positions
    own: dict[Any, Any] = {}
    made: list[dict[str, Any]] = []
    count = 0
    for label, values in groups["values"].items():
        names = sorted(groups["members"][label], key=lambda name: places.get(name, len(places)))
        steps = [tuple(step.removeprefix("~s") for step in parse_path(name)) for name in names]
        ids = list(range(count, count + len(names))) if numbered else [".".join(steps_of) for steps_of in steps]
        count += len(names)
        for key, steps_of in zip(ids, steps, strict=True):
            node: Any = state
            for step in steps_of:
                node = node.get(step, {})
            if node:
                own[key] = node
        made.append({**values, "params": ids})
    return {"state": own | groups.get("shared", {}), "param_groups": made}
