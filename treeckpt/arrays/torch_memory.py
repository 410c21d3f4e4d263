"""Reads and writes the memory of tensors: through numpy where that can address it, else box by box."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .base import Box, HostArray, HostMemory, StridedMemory, raw_dtype
from .cuda import start_copy_to_host
from .plain_tensor import is_plain, plain_info, plain_memory

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

    def copy_to(self, box: Box, target: np.ndarray) -> Callable[[], None] | None:
        """Copies a box to host memory; returns a function that waits for the end, None if the copy is complete."""
        part = self.tensor[box]
        out = torch.from_numpy(target).view(part.dtype).view(part.shape)
        if part.is_cuda:
            return start_copy_to_host(part, out)
        out.copy_(part)
        return None

    def write(self, box: Box, data: np.ndarray) -> None:
        part = torch.from_numpy(np.ascontiguousarray(data).view(signed_dtype(data.itemsize)))
        target = self.tensor[box]
        target.copy_(part.view(self.tensor.dtype).view(target.shape))  # numpy turns a scalar into a 1-D array


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
