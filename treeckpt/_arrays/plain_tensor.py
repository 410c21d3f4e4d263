"""Fast path for plain tensors: dense, of a common dtype, on the host. Most leaves are, and most of those are tiny.

What such tensors of one shape and dtype share is computed once, so that describing another one costs a few calls of
torch and none of numpy. All other tensors are left to `_arrays.torch`, which handles every tensor, and refuses some.
"""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec
import torch
from torch.nn import Parameter

from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, memory_order
from .._core.tree.spec import ArraySpec
from .base import HostMemory

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
    if not info.nbytes or not leaf.is_contiguous() or leaf.is_neg():
        return None
    size = leaf.dtype.itemsize
    address = leaf.data_ptr()
    storage = leaf.untyped_storage()  # keeps the memory, which the tensor alone does not when its `data` is replaced
    if not address or leaf.storage_offset() * size + info.nbytes > storage.nbytes():
        return None
    return HostMemory(address, info.spec.shape, size, storage)
