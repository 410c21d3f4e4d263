"""torch tensors as leaves: Tensor, Parameter, Buffer, and DTensor on any mesh.

A CPU tensor is addressed in place through numpy, whatever its strides. Tensors on other devices, and conjugate or
negative views, are read and written box by box. A DTensor's pieces follow from its mesh and placements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch
from torch.nn import Buffer, Parameter, UninitializedBuffer, UninitializedParameter

from ..core.sharding.placements import MeshLayout, held_by, local_shape
from ..core.sharding.region import Region
from ..core.tree.spec import ArraySpec
from ..core.tree.value_codec import Typed
from ..errors import FormatError, MismatchError, TreeError
from .base import Box, Piece, Source, Storage, Take, Target, TargetPiece, local_pieces, local_shape_of, overlaps_itself
from .dtensor import is_dtensor, layout_of, local_of
from .numpy import cast as cast_as_numpy
from .plain_tensor import COMMON, PLAIN, describe, dtype_name, is_common, kind_of, memory_of
from .torch_memory import data_of, raw_of, signed

__all__ = [
    "abstract",
    "cast",
    "decode",
    "dtype_name",
    "empty",
    "encode",
    "known_dtype",
    "like",
    "mark_written",
    "source",
    "target",
    "torch_dtype",
    "view",
]


@lru_cache(maxsize=256)
def torch_dtype(name: str, path: str = "") -> torch.dtype:
    """The torch dtype of this name.

    Raises:
        MismatchError: this torch has none.
    """
    dtype = vars(torch).get(name)  # getattr imports what torch loads late
    if not isinstance(dtype, torch.dtype):
        raise MismatchError(
            path, expected="a dtype that torch has", found=name, hint="Load it as a numpy array, with like="
        )
    return dtype


known_dtype = torch_dtype


def _check(leaf: torch.Tensor, path: str) -> None:
    """Refuses what has no bytes of its own, or none that mean the same elsewhere."""
    kind = type(leaf)
    reason = None
    if leaf.is_nested:
        reason = "a nested tensor"
    elif isinstance(leaf, (UninitializedParameter, UninitializedBuffer)):
        reason = "a parameter that is not initialised yet"
    elif leaf.layout is not torch.strided:
        reason = f"a tensor of layout {leaf.layout}"
    elif leaf.is_quantized:
        reason = f"a quantised tensor ({leaf.dtype})"
    elif kind not in PLAIN and not is_dtensor(leaf):
        reason = f"the tensor subclass {kind.__module__}.{kind.__qualname__}"
    if reason is not None:
        raise TreeError(
            path,
            expected="a dense tensor or DTensor",
            found=reason,
            hint="Save its parts (indices and values, int_repr and scale, ...) as leaves of their own",
        )
    try:
        dtype_name(leaf.dtype)
    except FormatError as error:
        raise TreeError(
            path,
            expected="a dtype with portable bytes",
            found=str(leaf.dtype),
            hint="View it as an integer dtype of the same width (tensor.view)",
        ) from error


def _spec(leaf: torch.Tensor) -> ArraySpec:
    device = None if leaf.is_cpu or leaf.is_meta else str(leaf.device)
    return ArraySpec(tuple(leaf.shape), dtype_name(leaf.dtype), None, device, leaf.requires_grad, kind_of(leaf))


def source(leaf: Any, path: str, rank: int) -> Source | None:
    """Describes a tensor that is to be saved."""
    if not isinstance(leaf, torch.Tensor):
        return None
    if is_common(leaf):
        common = describe(leaf)
        if (memory := memory_of(leaf, common)) is not None:
            return Source(
                common.spec, None, (Piece(common.whole, memory),), Storage(memory.address, common.nbytes, None)
            )
    _check(leaf, path)
    if leaf.is_meta:
        raise TreeError(
            path,
            expected="a tensor with data",
            found="one on the meta device",
            hint="Materialise the module before saving (to_empty, then load or initialise)",
        )
    spec = _spec(leaf)
    if type(leaf) not in PLAIN and is_dtensor(leaf):
        layout, local = local_of(leaf, path, rank)
        held = held_by(layout, spec.shape, rank)
        storage = _storage(local, path)
        return Source(spec, layout, [Piece(h.region, data_of(local[_box(h.local, h.region)])) for h in held], storage)
    tensor = leaf.detach() if spec.requires_grad else leaf
    storage = _storage(tensor, path)
    return Source(spec, None, (Piece(Region.whole(spec.shape), data_of(tensor)),), storage)


_NUMPY = {name: np.dtype(name) for name in ("float32", "float64", "float16", "int64", "int32", "uint8", "bool")}
"""The common dtypes that numpy has too."""


def _box(start: tuple[int, ...], region: Region) -> Box:
    return tuple(slice(a, a + n) for a, n in zip(start, region.shape, strict=True))


def _storage(tensor: torch.Tensor, path: str) -> Storage | None:
    """Which memory a tensor shows.

    Raises:
        TreeError: more than its storage has.
    """
    if not tensor.numel():
        return None
    strides, itemsize = None, tensor.dtype.itemsize
    nbytes = tensor.nbytes
    if not tensor.is_contiguous():
        strides = tensor.stride()
        nbytes = (sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True)) + 1) * itemsize
    there = tensor.untyped_storage().nbytes()
    if tensor.storage_offset() * itemsize + nbytes > there:
        raise TreeError(
            path,
            expected=f"a tensor with all its memory, {nbytes} bytes",
            found=f"a storage of {there} bytes",
            hint="Its storage was resized, as some wrappers do to free memory; save it while it is materialised",
        )
    address = tensor.data_ptr()
    return None if not address or tensor.is_conj() or tensor.is_neg() else Storage(address, nbytes, strides)


def abstract(leaf: Any, path: str, rank: int) -> ArraySpec | None:
    """What the tensor is, without its data; of a DTensor also which regions this rank holds."""
    if not isinstance(leaf, torch.Tensor):
        return None
    if is_common(leaf):
        return describe(leaf).spec
    _check(leaf, path)
    spec = _spec(leaf)
    if not is_dtensor(leaf):
        return spec
    layout = layout_of(leaf, path)
    regions = tuple(h.region for h in held_by(layout, spec.shape, rank))
    if not regions and (shape := local_shape(layout, spec.shape, rank)) is not None:
        regions = (Region((0,) * len(shape), shape),)  # empty, but of the local tensor's shape
    return msgspec.structs.replace(spec, regions=regions)


def target(leaf: Any, path: str, rank: int) -> Target | None:
    """Describes a tensor that is to be filled in place."""
    if not isinstance(leaf, torch.Tensor):
        return None
    if is_common(leaf):
        common = describe(leaf)
        if (memory := memory_of(leaf, common)) is not None:
            return Target(common.spec, leaf, (TargetPiece(common.whole, memory),))
    _check(leaf, path)
    if leaf.device.type == "meta":
        raise MismatchError(
            path, expected="a tensor with memory", found="one on the meta device", hint="Use load(path, like=tree)"
        )
    if is_dtensor(leaf):
        layout, local = local_of(leaf, path, rank)
        return Target(_spec(leaf), leaf, _pieces(layout, local, tuple(leaf.shape), rank))
    tensor = leaf.detach()
    try:
        _storage(tensor, path)
    except TreeError as error:
        raise MismatchError(path, expected=error.expected, found=error.found, hint=error.hint) from error
    if overlaps_itself(tensor.shape, tensor.stride()):
        raise MismatchError(
            path,
            expected="a tensor with memory for each element",
            found=f"strides {tensor.stride()} for shape {tuple(tensor.shape)}",
            hint="Use load(path, like=tree), which makes new tensors",
        )
    return Target(_spec(leaf), leaf, (TargetPiece(Region.whole(tuple(leaf.shape)), data_of(tensor)),))


def _pieces(layout: MeshLayout, local: torch.Tensor, shape: tuple[int, ...], rank: int) -> list[TargetPiece]:
    return [TargetPiece(h.region, data_of(local[_box(h.local, h.region)])) for h in held_by(layout, shape, rank)]


def like(leaf: Any, path: str, rank: int, device: str | None, *, take: Take | None = None) -> Target | None:
    """A new tensor of the leaf's shape, dtype, device and layout; on the host where the leaf is on meta."""
    if not isinstance(leaf, torch.Tensor):
        return None
    _check(leaf, path)
    where = _device(device, path) or leaf.device
    spec = _spec(leaf)
    if is_dtensor(leaf):
        return _like_dtensor(leaf, spec, path, rank, where, take)
    tensor = _new(spec.shape, leaf.dtype, torch.device("cpu") if where.type == "meta" else where, take)
    return Target(spec, _dress(tensor, spec), (TargetPiece(Region.whole(spec.shape), data_of(tensor)),))


def _new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, take: Take | None) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    if take is None or device.type != "cpu" or not nbytes:
        return torch.empty(shape, dtype=dtype, device=device)
    return _shown(take(nbytes), dtype, 0, math.prod(shape)).view(shape)


def _like_dtensor(leaf: Any, spec: ArraySpec, path: str, rank: int, where: torch.device, take: Take | None) -> Target:
    from torch.distributed.tensor import DTensor

    layout = layout_of(leaf, path)
    shape = local_shape(layout, spec.shape, rank)
    device = torch.device(leaf.device_mesh.device_type) if where.type == "meta" else where
    local = _new(shape if shape is not None else (0,), leaf.dtype, device, take)
    pieces = _pieces(layout, local, spec.shape, rank) if shape is not None else ()
    made = DTensor(local, leaf._spec, requires_grad=False)  # from_local loses the shape of a scalar outside of the mesh
    return Target(spec, _dress(made, spec), pieces)


def _device(device: str | None, path: str) -> torch.device | None:
    """The device that load was told to use, None where each tensor has its own."""
    if device in (None, "original"):
        return None
    where = _here(str(device), "device")
    if where.type == "meta":
        raise MismatchError(
            path,
            expected="a device with memory",
            found="the meta device",
            hint="treeckpt.inspect tells what a checkpoint holds without loading it",
        )
    return where


@lru_cache(maxsize=64)
def _here(device: str, path: str) -> torch.device:
    """A device of this program.

    Raises:
        MismatchError: no such device, or it is not here.
    """
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without CUDA raises an AssertionError
        raise MismatchError(
            path,
            expected=f'a device of torch that is here, as "{_devices()[-1]}"',
            found=f"{device!r:.60}, with {', '.join(_devices())} here",
            hint=f"{error!s:.300}",
        ) from error
    return where


def _devices() -> list[str]:
    """The devices of this program, as far as there are few."""
    kinds = [
        kind for kind in ("cuda", "xpu", "mps") if (module := getattr(torch, kind, None)) and module.is_available()
    ]
    return ["cpu", *(f"{kind}:{i}" for kind in kinds for i in range(min(8, getattr(torch, kind).device_count())))]


def _dress(tensor: torch.Tensor, spec: ArraySpec) -> torch.Tensor:
    """The tensor as the kind that the spec says. Its memory is filled later, which autograd does not see.

    Raises:
        FormatError: it is to have gradients, and its dtype can have none.
    """
    if spec.requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise FormatError(
            spec.kind, expected="a dtype that can have gradients", found=f"{spec.dtype} with requires_grad"
        )
    if spec.kind == "parameter":
        return Parameter(tensor, requires_grad=spec.requires_grad)
    if spec.kind == "buffer":
        return Buffer(tensor.requires_grad_(spec.requires_grad))
    return tensor.requires_grad_() if spec.requires_grad else tensor


def empty(spec: ArraySpec, path: str, device: str | None, *, take: Take | None = None) -> Target:
    """A new tensor from a spec: of its regions, or of the whole; on the host unless `device` says otherwise."""
    where = _here(spec.device or "cpu", path) if device == "original" else _device(device, path)
    tensor = _new(local_shape_of(spec), torch_dtype(spec.dtype, path), where or torch.device("cpu"), take)
    return Target(spec, _dress(tensor, spec), local_pieces(spec, lambda box: data_of(tensor[box])))


def wrap(spec: ArraySpec, memory: memoryview, offset: int) -> torch.Tensor:
    """A tensor that shows `memory` from byte `offset` on, without a copy."""
    if (known := _NUMPY.get(spec.dtype)) is not None:  # half the time of frombuffer and view
        return _dress(torch.from_numpy(np.ndarray(spec.shape, known, memory, offset)), spec)
    tensor = _shown(memory, torch_dtype(spec.dtype), offset, math.prod(spec.shape))
    return _dress(tensor if tensor.shape == spec.shape else tensor.view(spec.shape), spec)


def _shown(memory: memoryview, dtype: torch.dtype, offset: int, size: int) -> torch.Tensor:
    if dtype in COMMON:
        return torch.frombuffer(memory, dtype=dtype, count=size, offset=offset)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size * dtype.itemsize, offset=offset).view(dtype)


def view(base: torch.Tensor, spec: ArraySpec, offset: int, strides: tuple[int, ...]) -> torch.Tensor:
    """A strided window into the elements of a contiguous tensor, sharing its memory."""
    return _dress(torch.as_strided(base.detach(), spec.shape, strides, offset), spec)


def mark_written(leaves: Sequence[torch.Tensor]) -> None:
    """A backward that needs what a tensor held before raises, as after `copy_`, instead of giving wrong gradients."""
    torch.autograd.graph.increment_version(leaves)


def encode(value: Any) -> Typed | None:
    """torch.Size, dtype, device, layout and memory format."""
    if type(value) is torch.Size:
        return Typed("torch.Size", tuple(value))
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return Typed(f"torch.{type(value).__name__}", (str(value).removeprefix("torch."),))
    if isinstance(value, torch.device):
        return Typed("torch.device", (str(value),))
    return None


def decode(value: Typed) -> Any:
    """The inverse of `encode`."""
    kind, items = value.kind.removeprefix("torch."), value.items
    if not value.kind.startswith("torch."):
        raise LookupError(value.kind)
    if kind == "Size":
        return torch.Size(items)  # pyright: ignore[reportArgumentType]
    if kind == "device":
        return torch.device(*items)  # pyright: ignore[reportCallIssue, reportArgumentType]
    classes = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
    found = vars(torch).get(str(items[0]))
    if kind not in classes or not isinstance(found, classes[kind]):
        raise LookupError(value.kind)
    return found


def cast(data: np.ndarray, saved: str, wanted: str) -> np.ndarray:
    """Elements of raw dtype, converted from one dtype to another as torch does, else as ml_dtypes does."""
    try:
        part = torch.from_numpy(np.ascontiguousarray(data).view(signed(data.itemsize))).view(torch_dtype(saved))
        return raw_of(part.to(torch_dtype(wanted)))
    except (MismatchError, NotImplementedError):  # torch has no such dtype, or cannot convert it
        return cast_as_numpy(data, saved, wanted)
