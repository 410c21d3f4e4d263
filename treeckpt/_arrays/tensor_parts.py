"""Tensors that are made of other tensors, taken apart to be saved and filled, and made again.

Such are tensors of a subclass with `__tensor_flatten__` and `__tensor_unflatten__`, sparse tensors, nested tensors of
either layout, and DTensors whose local tensor is one. A part may be one again. A part of a DTensor's local tensor that
has its shape is a DTensor of the same mesh and placements; any other one is the rank's own (`PerRank`).

A subclass is found among the classes that the program has imported. Nothing is imported because a file names it.
"""

# Subclasses have attributes of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
import torch
from torch import Tensor

from .._core.sharding.placements import local_shape
from .._core.sharding.region import c_strides
from .._core.tree.containers import PerRank, is_plain_dataclass, new_instance
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import TensorNode
from .._core.tree.tensor_parts import TensorParts
from .._core.tree.value_codec import TypedValue, decode_value, encode_value, type_name
from ..errors import FormatError, MismatchError, TreeckptError, TreeError
from .dtensor import is_dtensor, is_dtensor_class, is_sharded_tensor, layout_of
from .registry import decode_of_library, encode_of_library, resolve
from .torch import PLAIN_CLASSES, as_kind, dtype_name, kind_of

_OWN_WAYS = ("torch.distributed", "torch._subclasses")
"""The packages whose subclasses are no tensors in parts: DTensor, results that are not there yet, fake tensors."""
_NESTED = "torch:nested"
_JAGGED = "torch:jagged"
_COMPRESSED = {
    "torch:sparse_csr": (torch.sparse_csr, "crow_indices", "col_indices"),
    "torch:sparse_csc": (torch.sparse_csc, "ccol_indices", "row_indices"),
    "torch:sparse_bsr": (torch.sparse_bsr, "crow_indices", "col_indices"),
    "torch:sparse_bsc": (torch.sparse_bsc, "ccol_indices", "row_indices"),
}
"""The layout, and the names of its indices, by class in files."""
_COO = "torch:sparse_coo"
_LAYOUTS = frozenset(layout for layout, *_ in _COMPRESSED.values())
_STRIDED = torch.strided
_ONLY_STRIDED = frozenset((_STRIDED,))
_LAYOUT_OF, _IS_NESTED = attrgetter("layout"), attrgetter("is_nested")


@lru_cache(maxsize=1024)
def wraps_tensors(kind: type) -> bool:
    """Returns whether a class of tensors says itself of which tensors an instance is made."""
    inside = f"{kind.__module__}."
    own_way = any(inside.startswith(f"{package}.") for package in _OWN_WAYS)
    if kind in PLAIN_CLASSES or own_way or is_dtensor_class(kind):
        return False
    return all(callable(getattr(kind, name, None)) for name in ("__tensor_flatten__", "__tensor_unflatten__"))


def any_in_parts(kind: type, nodes: Sequence[Any]) -> bool:
    """Returns whether any tensor of a class among objects is made of others.

    It takes 0.1 microseconds a tensor: most trees have many, and none of these.
    """
    if wraps_tensors(kind):
        return True
    tensors = [node for node in nodes if type(node) is kind]
    if kind in PLAIN_CLASSES:
        return not _ONLY_STRIDED.issuperset(map(_LAYOUT_OF, tensors)) or any(map(_IS_NESTED, tensors))
    return any(map(is_in_parts, tensors))


def is_in_parts(leaf: Tensor) -> bool:
    """Returns whether a tensor, or the local tensor of a DTensor, is made of others."""
    if is_sharded_tensor(leaf):  # which has no layout to ask for
        return False
    if is_dtensor(leaf):
        leaf = leaf._local_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return wraps_tensors(type(leaf)) or leaf.layout is not _STRIDED or leaf.is_nested


def take_apart(leaf: Tensor, path: str) -> TensorParts | None:
    """Returns a tensor in parts, which use its memory; None for a tensor that is not made of others.

    Raises:
        TreeError: its class keeps what cannot be stored beside its tensors.
    """
    if not is_in_parts(leaf):
        return None
    if is_dtensor(leaf):
        return _parts_of_dtensor(leaf, path)
    name, context, parts = _split(leaf)
    shape = _shape_of(leaf)
    strides = leaf.stride() if leaf.layout is _STRIDED and name != _NESTED else None
    node = _node(leaf, name, _encode_context(context, path), shape, strides, parts)
    parts = {key: (take_apart(part, f"{path}/{key}") or part) if isinstance(part, Tensor) else part
             for key, part in parts.items()}  # fmt: skip
    return TensorParts(node, parts, build, path=path)


def _node(
    leaf: Tensor, cls: str, context: Any, shape: tuple[int, ...], strides: Any, parts: Mapping[str, Any]
) -> TensorNode:
    strides = None if strides is None else tuple(strides)
    return TensorNode(
        cls,
        context,
        shape=shape,
        strides=strides,
        kind=kind_of(leaf),
        requires_grad=leaf.requires_grad,
        layout=None,
        keys=tuple(parts),
        children=(),
    )


def _shape_of(leaf: Any) -> tuple[int, ...]:
    """Returns the shape of a tensor; -1 for a dimension whose length differs between the members of a nested one."""
    if not leaf.is_nested or leaf.layout is torch.jagged:
        # the length that differs is a symbolic integer
        return tuple(n if type(n) is int else -1 for n in leaf.shape)
    sizes = leaf._nested_tensor_size()
    same = (sizes == sizes[:1]).all(0).tolist() if len(sizes) else []
    return (len(sizes), *(n if alike else -1 for n, alike in zip(sizes[0].tolist() if same else (), same, strict=True)))


def _split(leaf: Any) -> tuple[str, Any, dict[str, Any]]:
    """Returns the class in files of a tensor that is not distributed, its context, and its parts."""
    if leaf.layout is torch.jagged:
        parts = {"values": leaf._values.detach(), "offsets": leaf._offsets}
        if leaf._lengths is not None:
            parts["lengths"] = leaf._lengths
        known = leaf._min_seqlen_tensor, leaf._max_seqlen_tensor  # torch keeps both lengths as shapes
        least, most = (None if length is None else length.shape[0] for length in known)
        return _JAGGED, {"ragged_idx": leaf._ragged_idx, "min_seqlen": least, "max_seqlen": most}, parts
    if leaf.is_nested:
        plain = leaf.detach()
        parts = {"sizes": plain._nested_tensor_size(), "strides": plain._nested_tensor_strides()}
        offsets = plain._nested_tensor_storage_offsets()
        return _NESTED, None, {"values": plain.values(), **parts, "offsets": offsets}
    if leaf.layout is torch.sparse_coo:
        plain = leaf.detach()
        parts = {"indices": plain._indices(), "values": plain._values()}
        return _COO, {"is_coalesced": leaf.is_coalesced()}, parts
    for name, (layout, *indices) in _COMPRESSED.items():
        if leaf.layout is layout:
            plain = leaf.detach()
            return name, None, {**{key: getattr(plain, key)() for key in indices}, "values": plain.values()}
    names, context = leaf.__tensor_flatten__()
    return type_name(type(leaf)), context, {name: getattr(leaf, name) for name in names}


def _parts_of_dtensor(leaf: Any, path: str) -> TensorParts:
    local = leaf._local_tensor
    inner = take_apart(local, path)
    assert inner is not None, "only DTensors of such a local tensor are taken apart"
    parts: dict[str, Any] = {}
    for key, part in inner.parts.items():
        whole = isinstance(part, Tensor) and part.shape == local.shape
        parts[key] = _spread(part.detach(), leaf._spec) if whole else PerRank(part)
    node = _node(leaf, inner.node.cls, inner.node.context, tuple(leaf.shape), leaf.stride(), parts)
    return TensorParts(
        msgspec.structs.replace(node, layout=layout_of(leaf, path)), parts, build, spread=leaf._spec, path=path
    )


def _spread(local: Tensor, spec: Any) -> Tensor:
    """Returns a DTensor of a local tensor, with the mesh, placements and shape of another one."""
    from torch.distributed.tensor import DTensor

    meta = spec.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local, dataclasses.replace(spec, tensor_meta=meta), requires_grad=False)


def empty_plain(leaf: Any, dtype: torch.dtype) -> Tensor:
    """Returns a new tensor of the shape, device and layout of one that is made of others, which is not."""
    if not is_dtensor(leaf):
        return torch.empty(leaf.shape, dtype=dtype, device=leaf.device)
    local = leaf._local_tensor
    return _spread(torch.empty(local.shape, dtype=dtype, device=local.device), leaf._spec)


# make again -----------------------------------------------------------------------------------------------------------


def build(made: TensorParts, path: str) -> Any:
    """Returns the tensor of its parts; a dict of them where this program has not its class, or parts were left out.

    Parts that are no tensors, as `ArraySpec`, stay `TensorParts`.

    Raises:
        MismatchError, FormatError: the parts do not fit together.
    """
    parts = made.parts
    given = [_unwrapped(part) for part in parts.values()]
    if all(part is ... for part in given):
        return ...
    if any(part is ... or isinstance(part, dict) for part in given):
        return dict(parts)
    if not all(part is None or isinstance(part, Tensor) for part in given):
        return made
    node = made.node
    if made.spread is not None:
        return _build_dtensor(made, path)
    if node.layout is not None:
        if node.layout.mesh.shape.count(1) < len(node.layout.mesh.shape) and any(
            isinstance(part, PerRank) for part in parts.values()
        ):
            return dict(parts)  # each rank has its own part of it
        parts = {key: _unwrapped(part) for key, part in parts.items()}
    tensor = _join(node, parts, node.shape, node.strides, path)
    return parts if tensor is None else _with_kind(tensor, node, path)


def _unwrapped(part: Any) -> Any:
    return part.value if isinstance(part, PerRank) else part


def _with_kind(tensor: Tensor, node: TensorNode, path: str) -> Tensor:
    try:
        return as_kind(
            tensor, ArraySpec((), dtype_name(tensor.dtype), requires_grad=node.requires_grad, kind=node.kind)
        )
    except FormatError as error:
        raise FormatError(path, expected=error.expected, found=error.found) from error


def _build_dtensor(made: TensorParts, path: str) -> Any:
    from torch.distributed.tensor import DTensor

    parts = {key: _unwrapped(part) for key, part in made.parts.items()}
    parts = {key: part._local_tensor if is_dtensor(part) else part for key, part in parts.items()}
    layout = made.node.layout
    assert layout is not None, "a distributed tensor has a layout"
    shape = local_shape(layout, made.node.shape, made.spread.mesh.get_rank())
    # a rank outside of the mesh has an empty local tensor
    shape = (0,) if shape is None else shape
    local = _join(made.node, parts, shape, c_strides(shape, 1), path)
    if local is None:
        return dict(made.parts)
    meta = made.spread.tensor_meta._replace(dtype=local.dtype)
    tensor = DTensor(local, dataclasses.replace(made.spread, tensor_meta=meta), requires_grad=False)
    return _with_kind(tensor, made.node, path)


def _join(node: TensorNode, parts: Mapping[str, Any], shape: tuple[int, ...], strides: Any, path: str) -> Tensor | None:
    """Returns the tensor of parts; None where its class, or that of an object in its context, is not here."""
    kind: Any = None
    try:
        if not node.cls.startswith("torch:"):
            kind = resolve(node.cls)
            # a file may name any class: only those that make tensors of parts are called
            if not (issubclass(kind, Tensor) and wraps_tensors(kind)):
                return None
        context = _decode_context(node.context, path)
    except LookupError:
        return None
    try:
        with torch.no_grad():
            if kind is None:
                made = _of_layout(node.cls, parts, context, shape)
            else:
                join: Any = getattr(kind, "__tensor_unflatten__")  # noqa: B009 (pyright takes it for a plain tensor)
                made = join(dict(parts), context, torch.Size(shape), strides)
        found = _shape_of(made) if isinstance(made, Tensor) else None
    except TreeckptError:
        raise
    except Exception as error:  # raised by the subclass, or by torch for parts that contradict each other
        raise _no_tensor(node, path, f"{type(error).__name__}: {error}"[:300]) from error
    if found != shape:
        raise _no_tensor(node, path, f"a tensor of shape {found}" if found is not None else f"a {type(made).__name__}")
    return made


def _no_tensor(node: TensorNode, path: str, found: str) -> MismatchError:
    return MismatchError(
        path,
        expected=f"parts of which {node.cls} makes a tensor of shape {node.shape}",
        found=found,
        hint="Load it with the version of its library that saved it, or its parts alone",
    )


def _of_layout(cls: str, parts: Mapping[str, Any], context: Any, shape: tuple[int, ...]) -> Tensor:
    """Returns a sparse or nested tensor of parts, whose indices are checked to stay inside of it."""
    values = parts["values"]
    if cls == _COO:
        coalesced = bool(context["is_coalesced"])
        return torch.sparse_coo_tensor(
            parts["indices"], values, shape, device=values.device, is_coalesced=coalesced, check_invariants=True
        )
    if cls in _COMPRESSED:
        layout, rows, columns = _COMPRESSED[cls]
        indices = parts[rows], parts[columns]
        return torch.sparse_compressed_tensor(
            *indices, values, shape, layout=layout, device=values.device, check_invariants=True
        )
    if cls == _NESTED:
        sizes, strides, offsets = parts["sizes"], parts["strides"], parts["offsets"]
        # an integer could overflow; float64 is exact below 2**53
        last = offsets + ((sizes - 1).double() * strides).sum(1)
        fits = (sizes <= values.numel()).all(1) & (last < values.numel())
        inside = ((sizes == 0).any(1) | fits) & (offsets <= values.numel())
        if values.ndim != 1 or not all((part >= 0).all() for part in (sizes, strides, offsets)) or not inside.all():
            raise ValueError("a member that is not inside of the values")
        nested: Any = torch._nested_view_from_buffer  # pyright: ignore[reportPrivateImportUsage]
        return nested(values, sizes, strides, offsets)
    if cls == _JAGGED:
        return _jagged(parts, context)
    raise LookupError(cls)


def _jagged(parts: Mapping[str, Any], context: Mapping[str, Any]) -> Tensor:
    from torch.nested import nested_tensor_from_jagged

    ragged = int(context["ragged_idx"])
    offsets, lengths = parts["offsets"], parts.get("lengths")
    stops = offsets[1:] if lengths is None else offsets[: len(lengths)] + lengths
    if (
        (offsets < 0).any()
        or (stops < offsets[: len(stops)]).any()
        or (stops > parts["values"].shape[ragged - 1]).any()
    ):
        raise ValueError("a member that is not inside of the values")
    return nested_tensor_from_jagged(
        parts["values"],
        offsets,
        lengths,
        jagged_dim=ragged,
        min_seqlen=context["min_seqlen"],
        max_seqlen=context["max_seqlen"],
    )


# fill in place --------------------------------------------------------------------------------------------------------


def fills_in_place(leaf: Tensor) -> bool:
    """Returns whether the parts of a tensor are of as many elements as those that fill it: no sparse or nested one."""
    return is_dtensor(leaf) or (wraps_tensors(type(leaf)) and leaf.layout is not torch.jagged)


def check_content(leaf: Tensor, new: Any, path: str) -> None:
    """Checks that a sparse or nested tensor can take the content of another one, which may have other indices.

    Raises:
        MismatchError: it is of another layout, shape or dtype.
    """
    for what in ("layout", "dtype", "shape"):
        here, there = (_property(tensor, what) for tensor in (leaf, new))
        if here != there:
            raise MismatchError(path, expected=f"a tensor of {what} {here}", found=f"{there!s:.200} in the checkpoint")


def _property(leaf: Any, what: str) -> Any:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__qualname__}"
    if what == "shape" and leaf.is_nested:
        return [tuple(part.shape) for part in leaf.detach().unbind()]
    return getattr(leaf, what)


def set_content(leaf: Tensor, new: Tensor) -> None:
    """Gives a sparse or nested tensor, which stays the same object, the content of another one."""
    with torch.no_grad():
        if leaf.layout is torch.jagged:
            leaf._values.copy_(new._values)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            new = new.detach().to(leaf.device)
            if leaf.layout in _LAYOUTS:
                leaf.resize_as_sparse_(new)  # copy_ takes no other number of elements for these
            leaf.copy_(new)


# context --------------------------------------------------------------------------------------------------------------


def _encode_context(context: Any, path: str) -> Any:
    def extra(value: Any) -> TypedValue | None:
        kind = type(value)
        if is_plain_dataclass(kind):
            fields = [field.name for field in dataclasses.fields(value)]
        elif isinstance(value, tuple) and hasattr(kind, "_fields"):
            fields = list(kind._fields)
        elif isinstance(value, list):  # a subclass, as torch.Size is of tuple
            return None
        else:
            return encode_of_library(value)
        items = [encode_value(getattr(value, field), path, extra) for field in fields]
        return TypedValue(
            "instance", (type_name(kind), *[part for pair in zip(fields, items, strict=True) for part in pair])
        )

    try:
        return encode_value(context, path, extra)
    except (TreeError, RecursionError) as error:
        raise TreeError(
            path,
            expected="a tensor whose class keeps plain values beside its tensors",
            found=error.found if isinstance(error, TreeError) else "an object that contains itself",
            hint="Save its parts as leaves of their own, or leave it out",
        ) from error


def _decode_context(context: Any, path: str) -> Any:
    """Returns what a class keeps beside its tensors.

    Raises:
        LookupError: it holds an object of a class that this program does not have.
        FormatError, MismatchError: an object that its class cannot be.
    """
    lacking: list[str] = []

    def known(name: str) -> type:
        try:
            return resolve(name)
        except LookupError:
            lacking.append(name)
            raise

    def extra(typed: TypedValue) -> Any:
        if typed.kind != "instance":
            return decode_of_library(typed)
        name, *items = typed.items
        fields, children = [str(field) for field in items[::2]], items[1::2]
        kind: Any = known(str(name))
        if issubclass(kind, tuple):
            own = list(getattr(kind, "_fields", ()))
        else:
            own = [field.name for field in dataclasses.fields(kind)] if is_plain_dataclass(kind) else None
        if own != fields:
            raise MismatchError(
                path,
                expected=f"the fields {', '.join(fields)} of {name}",
                found=f"{', '.join(own or ()) or 'none'} in this program",
                hint="Load it with the version of its library that saved it, or its parts alone",
            )
        return tuple.__new__(kind, children) if issubclass(kind, tuple) else new_instance(kind, fields, children)

    try:
        return decode_value(context, path, resolve=known, extra=extra)
    except TreeckptError as error:
        raise (LookupError(lacking[0]) if lacking else error) from None
