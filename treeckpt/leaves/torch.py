"""torch tensors as leaves: Tensor, Parameter, Buffer, and DTensor on any mesh.

A CPU tensor is addressed in place through numpy, whatever its strides. Tensors on other devices, and conjugate or
negative views, are read and written box by box. A DTensor's pieces follow from its mesh and placements.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch
from torch.nn import Buffer, Parameter

from ..core.dtypes import dtype_of
from ..core.errors import FormatError, LayoutError, MismatchError, TreeError
from ..core.layout import Mesh, MeshLayout, Placement, Replicate, Shard, StridedShard, held_by, local_shape
from ..core.region import Region
from ..core.runs import encode_runs
from ..core.spec import ArraySpec, Typed
from .base import Box, HostArray, Piece, Source, Storage, Target, TargetPiece, raw_dtype

__all__ = [
    "abstract",
    "cast",
    "decode",
    "dtype_name",
    "empty",
    "encode",
    "like",
    "source",
    "target",
    "torch_dtype",
    "view",
]

_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_RAW = {size: raw_dtype(size) for size in _VIEWS}


@lru_cache(maxsize=256)
def dtype_name(dtype: torch.dtype) -> str:
    """Our name for a torch dtype: its own, without the module.

    Raises:
        FormatError: a dtype that cannot be stored (quantised ones).
    """
    return dtype_of(str(dtype).removeprefix("torch.")).name


@lru_cache(maxsize=256)
def torch_dtype(name: str, path: str = "") -> torch.dtype:
    """The torch dtype of this name.

    Raises:
        MismatchError: this torch has none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise MismatchError(
            path, expected="a dtype that torch has", found=name, hint="Load it as a numpy array, with like="
        )
    return dtype


def _raw(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as a numpy array of raw dtype with the same shape and strides."""
    size = tensor.dtype.itemsize
    if tensor.dtype is not _VIEWS[size]:
        tensor = tensor.view(_VIEWS[size])
    array = tensor.numpy()
    return array if array.dtype == _RAW[size] else array.view(_RAW[size])


class DeviceArray:
    """A tensor that numpy cannot address: moved box by box."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def read(self, box: Box) -> np.ndarray:
        part = self.tensor[box].resolve_conj().resolve_neg()
        return _raw(part.cpu())

    def write(self, box: Box, data: np.ndarray) -> None:
        part = torch.from_numpy(np.ascontiguousarray(data).view(_signed(data.itemsize)))
        self.tensor[box].copy_(part.view(self.tensor.dtype))


def _signed(size: int) -> np.dtype[Any]:
    return np.dtype("<c16") if size == 16 else np.dtype(f"<i{size}") if size > 1 else np.dtype("u1")


def _data(tensor: torch.Tensor) -> HostArray | DeviceArray:
    if tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg():
        return HostArray(_raw(tensor))
    return DeviceArray(tensor)


def _readable(tensor: torch.Tensor) -> HostArray | DeviceArray:
    """As `_data`, but without the step to raw dtype where numpy has the dtype itself."""
    if tensor.is_cpu and tensor.dtype in _NATIVE:
        return HostArray(tensor.numpy())
    return _data(tensor)


def _kind(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    if kind is torch.Tensor:
        return "tensor"
    if kind is Parameter or isinstance(tensor, Parameter):
        return "parameter"
    return "buffer" if isinstance(tensor, Buffer) else "tensor"


_PLAIN = (torch.Tensor, Parameter)


def _is_dtensor(leaf: object) -> bool:
    return type(leaf).__name__ == "DTensor" and type(leaf).__module__.startswith("torch.distributed")


def _check(leaf: torch.Tensor, path: str) -> None:
    """Refuses what has no bytes of its own, or none that mean the same elsewhere."""
    kind = type(leaf)
    reason = None
    if isinstance(leaf, torch.nn.parameter.UninitializedTensorMixin):
        reason = "a parameter that is not initialised yet"
    elif leaf.layout is not torch.strided:
        reason = f"a tensor of layout {leaf.layout}"
    elif leaf.is_quantized:
        reason = f"a quantised tensor ({leaf.dtype})"
    elif kind not in _PLAIN and not _is_dtensor(leaf) and not isinstance(leaf, Buffer):
        reason = f"the tensor subclass {kind.__module__}.{kind.__qualname__}"
    elif leaf.is_nested:
        reason = "a nested tensor"
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
        raise TreeError(path, expected="a dtype with portable bytes", found=str(leaf.dtype)) from error


def _spec(leaf: torch.Tensor) -> ArraySpec:
    device = None if leaf.is_cpu or leaf.is_meta else str(leaf.device)
    return ArraySpec(tuple(leaf.shape), dtype_name(leaf.dtype), None, device, leaf.requires_grad, _kind(leaf))


def source(leaf: Any, path: str, rank: int) -> Source | None:
    """Describes a tensor that is to be saved."""
    if not isinstance(leaf, torch.Tensor):
        return None
    if type(leaf) not in _PLAIN or leaf.layout is not torch.strided or leaf.dtype not in _COMMON:
        _check(leaf, path)
    if leaf.is_meta:
        raise TreeError(
            path,
            expected="a tensor with data",
            found="one on the meta device",
            hint="Materialise the module before saving (to_empty, then load or initialise)",
        )
    spec = _spec(leaf)
    if type(leaf) not in _PLAIN and _is_dtensor(leaf):
        layout, local = _layout_of(leaf, path, rank)
        held = held_by(layout, spec.shape, rank)
        pieces = [Piece(h.region, _readable(local[_box(h.local, h.region)])) for h in held]
        return Source(spec, layout, pieces, _storage(local))
    tensor = leaf.detach() if spec.requires_grad else leaf
    return Source(spec, None, (Piece(Region.whole(spec.shape), _readable(tensor)),), _storage(tensor))


_COMMON = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
)


_NATIVE = _COMMON - {torch.bfloat16}
"""Of these, the dtypes that numpy has, none of which can be a conjugate or negative view lazily."""


def _box(start: tuple[int, ...], region: Region) -> Box:
    return tuple(slice(a, a + n) for a, n in zip(start, region.shape, strict=True))


def _storage(tensor: torch.Tensor) -> Storage | None:
    address = tensor.data_ptr()
    if not address or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.is_contiguous():
        return Storage(address, tensor.nbytes, None)
    strides, shape = tensor.stride(), tensor.shape
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return Storage(address, (last + 1) * tensor.dtype.itemsize, strides)


def _layout_of(leaf: Any, path: str, rank: int) -> tuple[MeshLayout, torch.Tensor]:
    """The layout of a DTensor and its local tensor.

    Raises:
        LayoutError: partial sums, placements of another kind, or a local tensor that does not fit.
    """
    mesh = leaf.device_mesh
    layout = MeshLayout(_mesh(mesh), tuple(_placement(p, path, leaf.ndim) for p in leaf.placements))
    local = leaf._local_tensor.detach()
    if type(local) is not torch.Tensor:
        local = local.wait() if hasattr(local, "wait") else torch.Tensor(local)
    shape = local_shape(layout, tuple(leaf.shape), rank)
    if shape is not None and tuple(local.shape) != shape and math.prod(shape) + local.numel() > 0:
        raise LayoutError(
            path,
            expected=f"a local tensor of shape {shape}, by its placements {tuple(leaf.placements)}",
            found=f"{tuple(local.shape)}",
            hint="Save the pieces with tc.Sharded, which takes any offset and shape",
        )
    return layout, local


@lru_cache(maxsize=64)
def _mesh(mesh: Any) -> Mesh:
    names = tuple(str(name) for name in mesh.mesh_dim_names or ())
    return Mesh(tuple(mesh.mesh.shape), encode_runs(mesh.mesh.cpu().flatten().numpy()), names)


def _placement(placement: Any, path: str, ndim: int) -> Placement:
    if placement.is_replicate():
        return Replicate()
    if placement.is_partial():
        raise LayoutError(
            path,
            expected="placements that hold values",
            found=f"{placement}: each rank holds a partial sum",
            hint="Redistribute it to Replicate or Shard first",
        )
    dim = placement.dim % ndim if ndim else placement.dim
    factor = getattr(placement, "split_factor", None)
    return Shard(dim) if factor is None else StridedShard(dim, int(factor))


def abstract(leaf: Any, path: str, rank: int) -> ArraySpec | None:
    """What the tensor is, without its data; of a DTensor also which regions this rank holds."""
    if not isinstance(leaf, torch.Tensor):
        return None
    _check(leaf, path)
    spec = _spec(leaf)
    if not _is_dtensor(leaf):
        return spec
    layout = MeshLayout(_mesh(leaf.device_mesh), tuple(_placement(p, path, leaf.ndim) for p in leaf.placements))
    return msgspec.structs.replace(spec, regions=tuple(h.region for h in held_by(layout, spec.shape, rank)))


def target(leaf: Any, path: str, rank: int) -> Target | None:
    """Describes a tensor that is to be filled in place."""
    if not isinstance(leaf, torch.Tensor):
        return None
    _check(leaf, path)
    if leaf.device.type == "meta":
        raise MismatchError(
            path, expected="a tensor with memory", found="one on the meta device", hint="Use load(path, like=tree)"
        )
    if _is_dtensor(leaf):
        layout, local = _layout_of(leaf, path, rank)
        return Target(_spec(leaf), leaf, _pieces(layout, local, tuple(leaf.shape), rank))
    tensor = leaf.detach()
    if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
        raise MismatchError(path, expected="a tensor with memory for each element", found="an expanded one")
    return Target(_spec(leaf), leaf, (TargetPiece(Region.whole(tuple(leaf.shape)), _data(tensor)),))


def _pieces(layout: MeshLayout, local: torch.Tensor, shape: tuple[int, ...], rank: int) -> list[TargetPiece]:
    return [TargetPiece(h.region, _data(local[_box(h.local, h.region)])) for h in held_by(layout, shape, rank)]


def like(leaf: Any, path: str, rank: int, device: str | None) -> Target | None:
    """A new tensor of the leaf's shape, dtype, device and layout; on the host where the leaf is on meta."""
    if not isinstance(leaf, torch.Tensor):
        return None
    _check(leaf, path)
    where = torch.device(device) if device is not None else leaf.device
    if where.type == "meta":
        where = torch.device("cpu" if not _is_dtensor(leaf) else leaf.device_mesh.device_type)
    spec = _spec(leaf)
    if not _is_dtensor(leaf):
        tensor = torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device=where)
        pieces = (TargetPiece(Region.whole(spec.shape), _data(tensor)),)
        return Target(spec, _dress(tensor, spec), pieces)
    from torch.distributed.tensor import DTensor

    layout = MeshLayout(_mesh(leaf.device_mesh), tuple(_placement(p, path, leaf.ndim) for p in leaf.placements))
    shape = local_shape(layout, spec.shape, rank)
    local = torch.empty(shape if shape is not None else (0,), dtype=leaf.dtype, device=where)
    pieces = _pieces(layout, local, spec.shape, rank) if shape is not None else ()
    made = DTensor.from_local(
        local, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
    )
    return Target(spec, _dress(made, spec), pieces)


def _dress(tensor: torch.Tensor, spec: ArraySpec) -> torch.Tensor:
    """The tensor as the kind that the spec says. Its memory is filled later, which autograd does not see."""
    if spec.kind == "parameter":
        return Parameter(tensor, requires_grad=spec.requires_grad)
    if spec.kind == "buffer":
        return Buffer(tensor)
    return tensor.requires_grad_() if spec.requires_grad else tensor


def empty(spec: ArraySpec, path: str, device: str | None) -> Target:
    """A new tensor from a spec: of its one region, or of the whole; on the host unless `device` says otherwise."""
    region = spec.regions[0] if spec.regions else Region.whole(spec.shape)
    where = spec.device if device == "original" else device
    tensor = torch.empty(region.shape, dtype=torch_dtype(spec.dtype, path), device=where or "cpu")
    return Target(spec, _dress(tensor, spec), (TargetPiece(region, _data(tensor)),))


def wrap(spec: ArraySpec, memory: memoryview, offset: int) -> torch.Tensor:
    """A tensor that shows `memory` from byte `offset` on, without a copy."""
    dtype, size = torch_dtype(spec.dtype), math.prod(spec.shape)
    if dtype in _COMMON:
        tensor = torch.frombuffer(memory, dtype=dtype, count=size, offset=offset)
    else:
        tensor = torch.frombuffer(memory, dtype=torch.uint8, count=size * dtype.itemsize, offset=offset).view(dtype)
    return _dress(tensor if tensor.shape == spec.shape else tensor.view(spec.shape), spec)


def view(base: torch.Tensor, spec: ArraySpec, offset: int, strides: tuple[int, ...]) -> torch.Tensor:
    """A strided window into the elements of a contiguous tensor, sharing its memory."""
    return _dress(torch.as_strided(base.detach(), spec.shape, strides, offset), spec)


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
    found = getattr(torch, str(items[0]), None)
    if kind not in classes or not isinstance(found, classes[kind]):
        raise LookupError(value.kind)
    return found


def cast(data: np.ndarray, saved: str, wanted: str) -> np.ndarray:
    """Elements of raw dtype, converted from one dtype to another as torch does."""
    part = torch.from_numpy(np.ascontiguousarray(data).view(_signed(data.itemsize))).view(torch_dtype(saved))
    return _raw(part.to(torch_dtype(wanted)))
