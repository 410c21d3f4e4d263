"""Reads and writes the memory of tensors: through numpy where that can address it, else box by box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .base import Box, HostArray, HostMemory, StridedMemory, raw_dtype
from .cuda import start_copy_to_host
from .plain_tensor import is_plain, plain_info, plain_memory
from .samples import SampleRuns

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


def gather_samples(tensor: torch.Tensor, runs: SampleRuns | None) -> torch.Tensor:
    """Returns the sampled elements of a tensor in C order, or without `runs` all: uint8[bytes], on its device."""
    if not tensor.is_conj() and not tensor.is_neg() and tensor.dtype.itemsize in _INTEGERS:
        tensor = tensor.view(_INTEGERS[tensor.dtype.itemsize])  # not all functions have float8
    if runs is None:
        found = tensor.reshape(-1)
    elif tensor.is_contiguous():
        first, shape = tensor.storage_offset(), (runs.count, runs.length)
        samples = tensor.as_strided(shape, (runs.every, 1), first).reshape(-1)
        found = torch.cat((samples, tensor.as_strided((runs.length,), (1,), first + runs.size - runs.length)))
    else:
        positions = torch.from_numpy(runs.index()).to(tensor.device)
        found = tensor[torch.unravel_index(positions, tensor.shape)]
    return found.resolve_conj().resolve_neg().view(torch.uint8)


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
