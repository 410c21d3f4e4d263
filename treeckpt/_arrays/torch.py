"""The adapter of torch: Tensor, Parameter, Buffer, and DTensor on any mesh; the memory of tensors, and its copies.

A CPU tensor is addressed in place through numpy, whatever its strides. Tensors on other devices, and conjugate or
negative views, are read and written box by box. A DTensor's pieces are computed from its mesh and placements.

Most leaves are *plain*: dense, of a common dtype, on the host, and most of those are tiny. What plain tensors of one
shape and dtype share is computed once, so that describing another one costs a few calls of torch and none of numpy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch
from torch.nn import Buffer, Parameter, UninitializedBuffer, UninitializedParameter
from torch.torch_version import TorchVersion

from .._core.sharding.dtypes import dtype_of
from .._core.sharding.placements import BoxLayout, MeshLayout, held_by, local_shape
from .._core.sharding.region import Region, memory_order, strides_in
from .._core.tree.spec import ArraySpec
from .._core.tree.value_codec import TypedValue
from ..errors import FormatError, LayoutError, MismatchError, TreeError
from .base import (
    Allocate,
    ArraySource,
    ArrayTarget,
    Box,
    HostArray,
    HostMemory,
    PartsNeeded,
    SourcePiece,
    Storage,
    StridedMemory,
    TargetPiece,
    local_pieces,
    local_shape_of,
    overlaps_itself,
    raw_dtype,
)
from .cuda_copies import start_copy_to_host
from .digests import SampleRuns
from .dtensor import (
    DescribedTensor,
    described,
    describing,
    is_dtensor,
    layout_of,
    like_described,
    local_of,
    part_of,
    same_dtensor,
)
from .numpy import cast as cast_as_numpy
from .zero_partitions import check_not_partitioned

# plain tensors --------------------------------------------------------------------------------------------------------

PLAIN_CLASSES = (torch.Tensor, Parameter)
PLAIN_DTYPES = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
)


@lru_cache(maxsize=256)
def dtype_name(dtype: torch.dtype) -> str:
    """Returns treeckpt's name of a torch dtype: its own, without the module.

    Raises:
        FormatError: a dtype that cannot be stored (quantised ones).
    """
    return dtype_of(str(dtype).removeprefix("torch.")).name


def kind_of(tensor: torch.Tensor) -> str:
    """Returns the kind of a tensor in its spec: "parameter", "buffer" or "tensor"."""
    # the class is compared first: `isinstance` of a Parameter runs code of its metaclass
    if type(tensor) is not torch.Tensor and isinstance(tensor, Parameter):
        return "parameter"
    return "buffer" if getattr(tensor, "_is_buffer", False) else "tensor"  # as isinstance(tensor, Buffer) does


class PlainTensorInfo(msgspec.Struct, frozen=True):
    """What plain tensors have in common that differ only in their bytes."""

    spec: ArraySpec
    whole: Region
    nbytes: int


@lru_cache(maxsize=4096)
def _plain_info(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, kind: str
) -> PlainTensorInfo:
    order = memory_order(shape, strides)
    spec = ArraySpec(
        tuple(shape), dtype_name(dtype), regions=None, device=None, requires_grad=requires_grad, kind=kind, order=order
    )
    return PlainTensorInfo(spec, Region.whole(spec.shape), math.prod(shape) * dtype.itemsize)


_STRIDED = torch.strided


def is_plain(leaf: torch.Tensor) -> bool:
    """Returns whether a tensor is dense, of a plain class and a common dtype, on the host: it needs no other check."""
    return (
        type(leaf) in PLAIN_CLASSES
        and leaf.dtype in PLAIN_DTYPES
        and leaf.layout is _STRIDED
        and leaf.is_cpu
        and not leaf.is_nested
    )


def plain_info(leaf: torch.Tensor) -> PlainTensorInfo:
    """Returns what a plain tensor shares with others."""
    return _plain_info(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, kind_of(leaf))


def plain_memory(leaf: torch.Tensor, info: PlainTensorInfo) -> HostMemory | None:
    """Returns the memory of a plain tensor; None where it is not contiguous, or its storage is too short."""
    # the memory of a negative view holds the opposite numbers; conjugate ones have no plain dtype
    if not info.nbytes or not leaf.is_contiguous() or leaf.is_neg():
        return None
    size = leaf.dtype.itemsize
    address = leaf.data_ptr()
    storage = leaf.untyped_storage()  # keeps the memory, which the tensor alone does not when its `data` is replaced
    if not address or leaf.storage_offset() * size + info.nbytes > storage.nbytes():
        return None
    return HostMemory(address, info.spec.shape, size, storage)


# the memory of tensors ------------------------------------------------------------------------------------------------

_RAW = {size: raw_dtype(size).str for size in (1, 2, 4, 8, 16)}


class _ArrayInterface:
    """A tensor's memory for numpy. `Tensor.numpy` is not used because it marks the user's storage as not resizable."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.dtype.itemsize
        self._tensor = tensor  # numpy keeps this object alive, and so the memory
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": _RAW[size],
            "data": (tensor.data_ptr(), False),
            "strides": None if tensor.is_contiguous() else tuple(step * size for step in tensor.stride()),
        }


def raw_array(tensor: torch.Tensor) -> np.ndarray:
    """Returns the tensor's memory as a numpy array of raw dtype with the same shape and strides."""
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), raw_dtype(tensor.dtype.itemsize))
    return np.asarray(_ArrayInterface(tensor))


class DeviceArray:
    """Reads and writes a tensor that numpy cannot address, box by box."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def window(self) -> StridedMemory | None:
        """Addresses of the elements; None where the bytes there are not those of the elements (conjugate views)."""
        tensor, size = self.tensor, self.tensor.dtype.itemsize
        if not tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
            return None
        return StridedMemory(
            tensor.data_ptr(), tuple(tensor.shape), tuple(step * size for step in tensor.stride()), size
        )

    def read(self, box: Box) -> np.ndarray:
        part = self.tensor[box].resolve_conj().resolve_neg()
        return raw_array(part.cpu())

    def tensor_at(self, box: Box) -> torch.Tensor:
        """Returns a box as a view of the tensor."""
        return self.tensor[box]

    def copy_to(self, box: Box, out: np.ndarray) -> Callable[[], None] | None:
        """Copies a box to host memory; returns a function that waits for the end, None if the copy is complete."""
        part = self.tensor[box]
        target = torch.from_numpy(out).view(part.dtype).view(part.shape)
        if part.is_cuda:
            return start_copy_to_host(part, target)
        target.copy_(part)
        return None

    def copy_box(
        self, target: object, box: Box, source: object, source_box: Box, *, non_blocking: bool = False
    ) -> bool:
        """Has torch copy a box of memory to another, of which one at least is a tensor of this class.

        Returns:
            False where torch cannot address one of them, and nothing was copied.
        """
        to, given = (_tensor_at(data, at, self.tensor.dtype) for data, at in ((target, box), (source, source_box)))
        if to is None or given is None:
            return False
        if to.dtype not in PLAIN_DTYPES and not given.is_conj() and not given.is_neg():
            to, given = as_integers(to), as_integers(given)
        to.copy_(given.view(to.shape), non_blocking=non_blocking)
        return True

    def write(self, box: Box, data: np.ndarray) -> None:
        part = torch.from_numpy(np.ascontiguousarray(data).view(signed_dtype(data.itemsize)))
        target = self.tensor[box]
        target.copy_(part.view(self.tensor.dtype).view(target.shape))  # numpy turns a scalar into a 1-D array


def _tensor_at(data: object, box: Box, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns a box of memory as a tensor; None for other kinds of memory."""
    if isinstance(data, DeviceArray):
        return data.tensor[box] if data.tensor.dtype == dtype else None
    if not isinstance(data, (HostMemory, HostArray)):
        return None
    array = data.array[(*box, ...)]  # without the ellipsis a scalar would be a copy
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        return None
    return torch.from_numpy(array.view(signed_dtype(array.itemsize))).view(dtype)


def gather_samples(tensor: torch.Tensor, runs: SampleRuns | None) -> torch.Tensor:
    """Returns the sampled elements of a tensor in C order, or without `runs` all: uint8[bytes], on its device."""
    tensor = as_integers(tensor)
    if runs is None:
        found = tensor.reshape(-1)
    elif tensor.is_contiguous():
        first, shape = tensor.storage_offset(), (runs.count, runs.length)
        samples = tensor.as_strided(shape, (runs.every, 1), first).reshape(-1)
        found = torch.cat((samples, tensor.as_strided((runs.length,), (1,), first + runs.size - runs.length)))
    else:
        positions = torch.from_numpy(runs.index()).to(tensor.device)
        found = tensor[torch.unravel_index(positions, tensor.shape)]
    return found.resolve_conj().resolve_neg().contiguous().view(torch.uint8)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as integers of the width of its elements: not all functions have float8, nor `copy_` int1.

    A conjugate or negative view, and elements of 16 bytes, stay what they are.
    """
    if tensor.is_conj() or tensor.is_neg() or tensor.dtype.itemsize not in _INTEGERS:
        return tensor
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_together(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Returns the bytes of 1-D tensors of uint8 on the host, by one copy from each device."""
    found = [np.empty(0, np.uint8)] * len(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        here = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        whole = raw_array(torch.cat([tensors[number] for number in here]).cpu())
        stops = np.cumsum([tensors[number].numel() for number in here])
        for number, part in zip(here, np.split(whole, stops[:-1]), strict=True):
            found[number] = part
    return found


def signed_dtype(size: int) -> np.dtype[Any]:
    """Returns the numpy dtype of elements of `size` bytes that torch accepts."""
    return np.dtype("<c16") if size == 16 else np.dtype(f"<i{size}") if size > 1 else np.dtype("u1")


TensorData = HostMemory | HostArray | DeviceArray


def tensor_data(tensor: torch.Tensor) -> TensorData:
    """Returns the reader and writer of a tensor's elements."""
    if is_plain(tensor) and (memory := plain_memory(tensor, plain_info(tensor))) is not None:
        return memory
    if tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg():
        return HostArray(raw_array(tensor))
    return DeviceArray(tensor)


# the adapter ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def torch_dtype(name: str, path: str = "") -> torch.dtype:
    """Returns the torch dtype of a name.

    Raises:
        MismatchError: this version of torch has none.
    """
    dtype = vars(torch).get(name)  # getattr imports modules that torch loads lazily
    if not isinstance(dtype, torch.dtype):
        raise MismatchError(
            path, expected="a dtype that torch has", found=name, hint="Load it as a numpy array, with like="
        )
    return dtype


# under the name that `Adapter` has for it
known_dtype = torch_dtype


def check_tensor(leaf: torch.Tensor, path: str) -> None:
    """Refuses tensors without bytes of their own, and those whose bytes depend on more than dtype and shape."""
    whole = leaf
    if is_dtensor(leaf):
        leaf = part_of(leaf)
    kind = type(leaf)
    reason, refused = None, TreeError
    if leaf.is_nested:
        reason, refused = "a nested tensor", PartsNeeded
    elif isinstance(leaf, (UninitializedParameter, UninitializedBuffer)):
        reason = "a parameter that is not initialised yet"
    elif leaf.layout is not torch.strided:
        reason, refused = f"a tensor of layout {leaf.layout}", PartsNeeded
    elif leaf.is_quantized:
        reason = f"a quantised tensor ({leaf.dtype})"
    elif kind not in PLAIN_CLASSES:
        reason = f"the tensor subclass {kind.__module__}.{kind.__qualname__}"
    if reason is not None:
        raise refused(
            path,
            expected="a dense tensor or DTensor",
            found=reason,
            hint="Save its parts (indices and values, int_repr and scale, ...) as leaves of their own",
        )
    if whole.shape == (0,):
        check_not_partitioned(whole, path)
    try:
        dtype_name(leaf.dtype)
    except FormatError as error:
        raise TreeError(
            path,
            expected="a dtype with portable bytes",
            found=str(leaf.dtype),
            hint="View it as an integer dtype of the same width (tensor.view)",
        ) from error


def spec_of(leaf: torch.Tensor) -> ArraySpec:
    device = None if leaf.is_cpu or leaf.is_meta else str(leaf.device)
    shape, order = tuple(leaf.shape), order_of(leaf)
    return ArraySpec(
        shape,
        dtype_name(leaf.dtype),
        regions=None,
        device=device,
        requires_grad=leaf.requires_grad,
        kind=kind_of(leaf),
        order=order,
    )


def _check_chunks(held: DescribedTensor, path: str) -> None:
    """Refuses chunks that are no plain tensors, or of several dtypes."""
    for _, tensor in held.chunks:
        check_tensor(tensor, path)
    dtypes = {tensor.dtype: None for _, tensor in held.chunks}
    if len(dtypes) > 1:
        raise LayoutError(path, expected="chunks of one dtype", found=", ".join(map(str, dtypes)))


def _described_spec(leaf: torch.Tensor, held: DescribedTensor) -> ArraySpec:
    """Returns the spec of a tensor that describes itself: dtype, device and order of what it holds, if it does."""
    shape, dtype, kind = held.shape, leaf.dtype, kind_of(leaf)
    if not held.chunks:
        return ArraySpec(shape, dtype_name(dtype), requires_grad=leaf.requires_grad, kind=kind)
    _, first = held.chunks[0]
    device = None if first.is_cpu or first.is_meta else str(first.device)
    order = memory_order(first.shape, first.stride())
    return ArraySpec(
        shape,
        dtype_name(first.dtype),
        regions=None,
        device=device,
        requires_grad=leaf.requires_grad,
        kind=kind,
        order=order,
    )


def order_of(leaf: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the order of a tensor's dimensions in memory: of a DTensor in that of its local part, if it has one."""
    if is_dtensor(leaf) and (part := part_of(leaf)).numel() and part.ndim == leaf.ndim:
        return memory_order(part.shape, part.stride())
    return memory_order(leaf.shape, leaf.stride())


def source(leaf: torch.Tensor, path: str, rank: int) -> ArraySource:
    """Describes a tensor to save."""
    if is_plain(leaf):
        common = plain_info(leaf)
        if (memory := plain_memory(leaf, common)) is not None:
            return ArraySource(
                common.spec, None, (SourcePiece(common.whole, memory),), Storage(memory.address, common.nbytes, None)
            )
    if (held := described(leaf, path)) is not None:
        _check_chunks(held, path)
        parts = [source(tensor, path, rank) for _, tensor in held.chunks]
        layout = BoxLayout(tuple((rank, region) for region, _ in held.chunks))
        pieces = [SourcePiece(r, part.pieces[0].data) for (r, _), part in zip(held.chunks, parts, strict=True)]
        return ArraySource(_described_spec(leaf, held), layout, pieces, parts[0].storage if len(parts) == 1 else None)
    check_tensor(leaf, path)
    if leaf.is_meta:
        raise TreeError(
            path,
            expected="a tensor with data",
            found="one on the meta device",
            hint="Materialise the module before saving (to_empty, then load or initialise)",
        )
    spec = spec_of(leaf)
    if type(leaf) not in PLAIN_CLASSES and is_dtensor(leaf):
        layout, local = local_of(leaf, path, rank)
        storage = memory_of(local, path)
        pieces = [SourcePiece(*piece) for piece in _pieces(layout, local, spec.shape, rank)]
        return ArraySource(spec, layout, pieces, storage)
    tensor = leaf.detach() if spec.requires_grad else leaf
    storage = memory_of(tensor, path)
    return ArraySource(spec, None, (SourcePiece(Region.whole(spec.shape), tensor_data(tensor)),), storage)


_NUMPY = {name: np.dtype(name) for name in ("float32", "float64", "float16", "int64", "int32", "uint8", "bool")}
"""The plain dtypes that numpy has too."""


def _pieces(
    layout: MeshLayout, local: torch.Tensor, shape: tuple[int, ...], rank: int
) -> list[tuple[Region, TensorData]]:
    """Returns the regions of a DTensor that a rank holds, with the memory of each in its local tensor."""
    return [
        (held.region, tensor_data(local[Region(held.local, held.region.shape).slices()]))
        for held in held_by(layout, shape, rank)
    ]


def memory_of(tensor: torch.Tensor, path: str) -> Storage | None:
    """Returns the memory of a tensor.

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


def abstract(leaf: torch.Tensor, path: str, rank: int) -> ArraySpec:
    """Returns the spec of a tensor; for a DTensor with the regions that this rank holds."""
    if is_plain(leaf):
        return plain_info(leaf).spec
    if (held := described(leaf, path)) is not None:
        _check_chunks(held, path)
        return msgspec.structs.replace(_described_spec(leaf, held), regions=tuple(region for region, _ in held.chunks))
    check_tensor(leaf, path)
    spec = spec_of(leaf)
    if not is_dtensor(leaf):
        return spec
    layout = layout_of(leaf, path)
    regions = tuple(h.region for h in held_by(layout, spec.shape, rank))
    if not regions and (shape := local_shape(layout, spec.shape, rank)) is not None:
        regions = (Region((0,) * len(shape), shape),)  # empty, but of the local tensor's shape
    return msgspec.structs.replace(spec, regions=regions)


def target(leaf: torch.Tensor, path: str, rank: int) -> ArrayTarget:
    """Describes a tensor to fill in place."""
    if is_plain(leaf):
        common = plain_info(leaf)
        if (memory := plain_memory(leaf, common)) is not None:
            return ArrayTarget(common.spec, leaf, (TargetPiece(common.whole, memory),))
    if (held := described(leaf, path)) is not None:
        _check_chunks(held, path)
        pieces = [TargetPiece(region, target(tensor, path, rank).pieces[0].data) for region, tensor in held.chunks]
        return ArrayTarget(abstract(leaf, path, rank), leaf, pieces)
    check_tensor(leaf, path)
    if leaf.device.type == "meta":
        raise MismatchError(
            path, expected="a tensor with memory", found="one on the meta device", hint="Use load(path, like=tree)"
        )
    if is_dtensor(leaf):
        layout, local = local_of(leaf, path, rank)
        _check_memory(local, path)
        pieces = [TargetPiece(*piece) for piece in _pieces(layout, local, tuple(leaf.shape), rank)]
        return ArrayTarget(spec_of(leaf), leaf, pieces, layout)
    tensor = leaf.detach()
    _check_memory(tensor, path)
    return ArrayTarget(spec_of(leaf), leaf, (TargetPiece(Region.whole(tuple(leaf.shape)), tensor_data(tensor)),))


def _check_memory(tensor: torch.Tensor, path: str) -> None:
    """Refuses tensors to fill that have not memory of its own for each element.

    Raises:
        MismatchError: more elements than their storage has, or several in one place.
    """
    try:
        memory_of(tensor, path)
    except TreeError as error:
        raise MismatchError(path, expected=error.expected, found=error.found, hint=error.hint) from error
    if overlaps_itself(tensor.shape, tensor.stride()):
        raise MismatchError(
            path,
            expected="a tensor with memory for each element",
            found=f"strides {tensor.stride()} for shape {tuple(tensor.shape)}",
            hint="Use load(path, like=tree), which makes new tensors",
        )


def like(
    leaf: torch.Tensor, path: str, rank: int, device: str | None, *, allocate: Allocate | None = None
) -> ArrayTarget:
    """Creates a tensor of the leaf's shape, dtype, device and layout; on the host where the leaf is on meta."""
    if describing(leaf) is not None:
        made = like_described(leaf, _device(device, path), path)
        return target(as_kind(made, abstract(leaf, path, rank)), path, rank)
    check_tensor(leaf, path)
    where = _device(device, path) or leaf.device
    spec = spec_of(leaf)
    if is_dtensor(leaf):
        return _like_dtensor(leaf, spec, path, rank, where, allocate)
    host = torch.device("cpu")
    tensor = _new(spec.shape, leaf.dtype, host if where.type == "meta" else where, allocate, spec.order)
    return ArrayTarget(spec, as_kind(tensor, spec), (TargetPiece(Region.whole(spec.shape), tensor_data(tensor)),))


def _new(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    allocate: Allocate | None,
    order: tuple[int, ...] | None,
) -> torch.Tensor:
    """Creates a tensor; `order` of its dimensions in memory is not that of a flat one, which holds other boxes."""
    nbytes, strides = math.prod(shape) * dtype.itemsize, None
    if order is not None and len(order) == len(shape):
        strides = strides_in(shape, order, 1)
    if allocate is None or device.type != "cpu" or not nbytes:
        if strides is not None:
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device)
    flat = _from_buffer(allocate(nbytes), dtype, 0, math.prod(shape))
    return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


def _like_dtensor(
    leaf: Any, spec: ArraySpec, path: str, rank: int, where: torch.device, allocate: Allocate | None
) -> ArrayTarget:
    layout = layout_of(leaf, path)
    shape = local_shape(layout, spec.shape, rank)
    device = torch.device(leaf.device_mesh.device_type) if where.type == "meta" else where
    local = _new(shape if shape is not None else (0,), leaf.dtype, device, allocate, spec.order)
    pieces = [TargetPiece(*p) for p in _pieces(layout, local, spec.shape, rank)] if shape is not None else ()
    return ArrayTarget(spec, as_kind(same_dtensor(leaf, local), spec), pieces, layout)


def in_order(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Returns a new tensor of the same shape, dtype, device and placements.

    Args:
        order: of its dimensions in memory, from the outermost to the innermost; None for C order.
    """
    if not is_dtensor(tensor):
        return _new(tuple(tensor.shape), tensor.dtype, tensor.device, None, order)
    from torch.distributed.tensor import DTensor

    given: Any = tensor
    # the spec is copied, as the given tensor keeps its own strides
    part, spec = part_of(given), copy.copy(given._spec)
    spec.tensor_meta = spec.tensor_meta._replace(stride=strides_in(tuple(tensor.shape), order, 1))
    return DTensor(_new(tuple(part.shape), part.dtype, part.device, None, order), spec, requires_grad=False)


def _device(device: str | None, path: str) -> torch.device | None:
    """Returns the device that was passed to load; None where each tensor keeps its own."""
    if device in (None, "original"):
        return None
    where = _checked_device(str(device), "device")
    if where.type == "meta":
        raise MismatchError(
            path,
            expected="a device with memory",
            found="the meta device",
            hint="treeckpt.inspect tells what a checkpoint holds without loading it",
        )
    return where


@lru_cache(maxsize=64)
def _checked_device(device: str, path: str) -> torch.device:
    """Returns a device of this machine.

    Raises:
        MismatchError: there is no such device.
    """
    try:
        where = torch.device(device)
        # only an allocation shows that the device is there
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without CUDA raises an AssertionError
        raise MismatchError(
            path,
            expected=f'a device of torch that is here, as "{_device_names()[-1]}"',
            found=f"{device!r:.60}, with {', '.join(_device_names())} here",
            hint=f"{error!s:.300}",
        ) from error
    return where


def _device_names() -> list[str]:
    """Returns the names of the devices of this machine, at most eight of a kind."""
    kinds = [
        kind for kind in ("cuda", "xpu", "mps") if (module := getattr(torch, kind, None)) and module.is_available()
    ]
    return ["cpu", *(f"{kind}:{i}" for kind in kinds for i in range(min(8, getattr(torch, kind).device_count())))]


def as_kind(tensor: torch.Tensor, spec: ArraySpec) -> torch.Tensor:
    """Returns the tensor as the kind that the spec names. Its memory is filled later, which autograd does not record.

    Raises:
        FormatError: the spec requires gradients, and its dtype cannot have any.
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


def empty(spec: ArraySpec, path: str, device: str | None, *, allocate: Allocate | None = None) -> ArrayTarget:
    """Creates a tensor from a spec: for its regions, or for the whole array; on the host unless `device` is given."""
    where = _checked_device(spec.device or "cpu", path) if device == "original" else _device(device, path)
    shape, dtype = local_shape_of(spec), torch_dtype(spec.dtype, path)
    tensor = _new(shape, dtype, where or torch.device("cpu"), allocate, spec.order)
    return ArrayTarget(spec, as_kind(tensor, spec), local_pieces(spec, lambda box: tensor_data(tensor[box])))


def wrap(spec: ArraySpec, memory: memoryview, offset: int) -> torch.Tensor:
    """Returns a tensor that uses `memory` from byte `offset` on, without a copy."""
    if (known := _NUMPY.get(spec.dtype)) is not None:  # takes half the time of frombuffer and view
        tensor = torch.from_numpy(np.ndarray(spec.shape, known, memory, offset))
    else:
        tensor = _from_buffer(memory, torch_dtype(spec.dtype), offset, math.prod(spec.shape))
        tensor = tensor if tensor.shape == spec.shape else tensor.view(spec.shape)
    if spec.order is not None:
        tensor = tensor.as_strided(spec.shape, strides_in(spec.shape, spec.order, 1))
    return as_kind(tensor, spec)


def _from_buffer(memory: memoryview, dtype: torch.dtype, offset: int, size: int) -> torch.Tensor:
    if dtype in PLAIN_DTYPES:
        return torch.frombuffer(memory, dtype=dtype, count=size, offset=offset)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size * dtype.itemsize, offset=offset).view(dtype)


def view(base: torch.Tensor, spec: ArraySpec, offset: int, strides: tuple[int, ...]) -> torch.Tensor:
    """Returns a strided view, in elements of its memory, of a dense tensor."""
    return as_kind(torch.as_strided(base.detach(), spec.shape, strides, offset), spec)


def reduced(leaf: Any) -> torch.Tensor:
    """Returns a DTensor without its partial sums: every rank of its mesh calls it, in the same order."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in leaf.placements]
    return as_kind(leaf.detach().redistribute(placements=placements), spec_of(leaf))


def mark_written(leaves: Sequence[torch.Tensor]) -> None:
    """Raises the version counters: a backward that needs the old content raises, as after `copy_`."""
    chunks = [held.chunks for leaf in leaves if type(leaf) not in PLAIN_CLASSES and (held := described(leaf, ""))]
    # the chunks of a tensor that describes itself are tensors with counters of their own
    torch.autograd.graph.increment_version([*leaves, *(tensor for found in chunks for _, tensor in found)])


def encode(value: Any) -> TypedValue | None:
    """Returns the stored form of a torch.Size, dtype, device, layout, memory format or version."""
    if type(value) is torch.Size:
        return TypedValue("torch.Size", tuple(value))
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return TypedValue(f"torch.{type(value).__name__}", (str(value).removeprefix("torch."),))
    if isinstance(value, (torch.device, TorchVersion)):
        return TypedValue(f"torch.{type(value).__name__}", (str(value),))
    return None


def decode(value: TypedValue) -> Any:
    """Returns the value of a stored form."""
    kind, items = value.kind.removeprefix("torch."), value.items
    if not value.kind.startswith("torch."):
        raise LookupError(value.kind)
    if kind == "Size":
        return torch.Size(items)  # pyright: ignore[reportArgumentType]
    if kind == "device":
        return torch.device(*items)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if kind == "TorchVersion":
        return TorchVersion(*items)
    classes = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
    found = vars(torch).get(str(items[0]))
    if kind not in classes or not isinstance(found, classes[kind]):
        raise LookupError(value.kind)
    return found


def cast(data: np.ndarray, saved: str, wanted: str) -> np.ndarray:
    """Converts elements of raw dtype from one dtype to another as torch does, else as ml_dtypes does."""
    try:
        part = torch.from_numpy(np.ascontiguousarray(data).view(signed_dtype(data.itemsize))).view(torch_dtype(saved))
        return raw_array(part.to(torch_dtype(wanted)))
    except (MismatchError, NotImplementedError):  # torch has no such dtype, or cannot convert it
        return cast_as_numpy(data, saved, wanted)
