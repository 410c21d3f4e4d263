"""The adapter of numpy. Arrays of another byte order are stored, and loaded, in little-endian order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._core.sharding.dtypes import USER_DEFINED, numpy_dtype, numpy_name
from .._core.sharding.region import Region, memory_order, strides_in
from .._core.tree.spec import ArraySpec
from ..errors import FormatError, MismatchError, TreeError
from .base import (
    Allocate,
    ArraySource,
    ArrayTarget,
    Box,
    HostArray,
    HostMemory,
    SourcePiece,
    Storage,
    TargetPiece,
    local_pieces,
    local_shape_of,
    overlaps_itself,
    raw_dtype,
)


def dtype_name(dtype: np.dtype[Any], path: str) -> str:
    """Returns treeckpt's name of a numpy dtype.

    Raises:
        TreeError: object, structured and extended-precision dtypes have no portable bytes.
    """
    try:
        return numpy_name(dtype)
    except (FormatError, MismatchError) as error:
        raise TreeError(
            path,
            expected="a numeric, bool, time or fixed-width string array of numpy or ml_dtypes",
            found=f"a numpy array of dtype {dtype}",
            hint="Convert it, or split a structured array into one array per field",
        ) from error


# under the name that `Adapter` has for it
known_dtype = numpy_dtype


class _BigEndianReader:
    """Reads a big-endian array in little-endian order, box by box."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def read(self, box: Box) -> np.ndarray:
        part = np.ascontiguousarray(self.array[box].astype(self.array.dtype.newbyteorder("<")))
        return part.view(raw_dtype(part.itemsize))


def _spec(array: np.ndarray, path: str) -> ArraySpec:
    if type(array) not in (np.ndarray, np.memmap):
        raise TreeError(
            path,
            expected="a plain numpy array",
            found=f"a {type(array).__name__}",
            hint="Convert it with numpy.asarray; a masked array's data and mask are two arrays",
        )
    return ArraySpec(array.shape, dtype_name(array.dtype, path), kind="numpy", order=order_of(array))


def order_of(array: np.ndarray) -> tuple[int, ...] | None:
    """Returns the order of an array's dimensions in memory; None for C order, and for arrays that are not dense."""
    if array.flags.c_contiguous or any(step % array.itemsize for step in array.strides):
        return None
    return memory_order(array.shape, [step // array.itemsize for step in array.strides])


def _memory(array: np.ndarray) -> HostMemory:
    """Returns the memory of an array in C order."""
    return HostMemory(array.__array_interface__["data"][0], array.shape, array.itemsize, array)


def source(leaf: np.ndarray, path: str, rank: int) -> ArraySource:
    """Describes an array to save."""
    spec = _spec(leaf, path)
    whole = Region.whole(leaf.shape)
    if leaf.dtype.byteorder == ">":
        return ArraySource(spec, None, (SourcePiece(whole, _BigEndianReader(leaf)),))
    storage = None
    # with a negative stride the first element is not at the lowest address; views count in whole elements
    if leaf.size and all(step >= 0 and step % leaf.itemsize == 0 for step in leaf.strides):
        strides = None if leaf.flags.c_contiguous else tuple(step // leaf.itemsize for step in leaf.strides)
        nbytes = sum((n - 1) * step for n, step in zip(leaf.shape, leaf.strides, strict=True)) + leaf.itemsize
        memory = _memory(leaf)
        storage = Storage(memory.address, nbytes, strides)
        if strides is None:
            return ArraySource(spec, None, (SourcePiece(whole, memory),), storage)
    raw = leaf.view(np.ndarray).view(raw_dtype(leaf.itemsize))
    return ArraySource(spec, None, (SourcePiece(whole, HostArray(raw)),), storage)


def abstract(leaf: np.ndarray, path: str, rank: int) -> ArraySpec:
    """Returns the spec of an array."""
    return _spec(leaf, path)


def target(leaf: np.ndarray, path: str, rank: int) -> ArrayTarget:
    """Describes an array to fill in place."""
    spec = _spec(leaf, path)
    if not leaf.flags.writeable or leaf.dtype.byteorder == ">" or overlaps_itself(leaf.shape, leaf.strides):
        read_only = "" if leaf.flags.writeable else ", read-only"
        raise MismatchError(
            path,
            expected="a writable array in native byte order with memory for each element",
            found=f"{leaf.dtype.str} of strides {leaf.strides}{read_only}",
            hint="Use load(path, like=tree), which makes new arrays",
        )
    whole = Region.whole(leaf.shape)
    if leaf.size and leaf.flags.c_contiguous:
        return ArrayTarget(spec, leaf, (TargetPiece(whole, _memory(leaf)),))
    raw = leaf.view(np.ndarray).view(raw_dtype(leaf.itemsize))
    return ArrayTarget(spec, leaf, (TargetPiece(whole, HostArray(raw)),))


def like(
    leaf: np.ndarray, path: str, rank: int, device: str | None, *, allocate: Allocate | None = None
) -> ArrayTarget:
    """Creates an array of the leaf's shape, dtype and order."""
    return empty(_spec(leaf, path), path, None, allocate=allocate)


def empty(spec: ArraySpec, path: str, device: str | None, *, allocate: Allocate | None = None) -> ArrayTarget:
    """Creates an array from a spec: for its regions, or for the whole array.

    Raises:
        MismatchError: neither numpy nor ml_dtypes has such a dtype.
    """
    dtype = numpy_dtype(spec.dtype, path)
    shape = local_shape_of(spec)
    nbytes = math.prod(shape) * dtype.itemsize
    order = spec.order if spec.order is not None and len(spec.order) == len(shape) else range(len(shape))
    laid_out = tuple(shape[d] for d in order)
    array = np.ndarray(laid_out, dtype, allocate(nbytes)) if allocate and nbytes else np.empty(laid_out, dtype)
    array = array.transpose(np.argsort(order)) if spec.order is not None and laid_out else array
    if spec.regions is None and array.size and array.flags.c_contiguous:
        return ArrayTarget(spec, array, (TargetPiece(Region.whole(spec.shape), _memory(array)),))
    raw = array.view(raw_dtype(dtype.itemsize))
    # the ellipsis has numpy return an array, and no scalar, for a box without dimensions
    return ArrayTarget(spec, array, local_pieces(spec, lambda box: HostArray(raw[(*box, ...)])))


def wrap(spec: ArraySpec, memory: memoryview, offset: int) -> np.ndarray:
    """Returns an array that uses `memory` from byte `offset` on, without a copy."""
    dtype = numpy_dtype(spec.dtype)
    strides = None if spec.order is None else strides_in(spec.shape, spec.order, dtype.itemsize)
    return np.ndarray(spec.shape, dtype, memory, offset, strides)


def view(base: np.ndarray, spec: ArraySpec, offset: int, strides: tuple[int, ...]) -> np.ndarray:
    """Returns a strided view, in elements of its memory, of a dense array."""
    size = base.itemsize
    base = base.transpose(np.argsort([-step for step in base.strides], kind="stable"))  # a buffer is in C order
    return np.ndarray(spec.shape, base.dtype, base, offset * size, tuple(s * size for s in strides))


def mark_written(leaves: Sequence[np.ndarray]) -> None:
    """Does nothing: numpy keeps no state that depends on the content of an array."""


def cast(data: np.ndarray, saved: str, wanted: str) -> np.ndarray:
    """Converts elements of raw dtype from one dtype to another as numpy and ml_dtypes do."""
    before, after = numpy_dtype(saved), numpy_dtype(wanted)
    elements = np.ascontiguousarray(data).view(before).reshape(data.shape)  # numpy turns a scalar into a 1-D array
    try:
        if before.kind == "W":
            elements = elements.astype(np.complex128)
        if elements.dtype.kind == "c" and after.kind != "W" and after.isbuiltin == USER_DEFINED:
            elements = elements.astype(np.float64)  # warns about imaginary parts, which ml_dtypes does not
        made = _converted(elements, after)
    except (TypeError, ValueError) as error:
        raise MismatchError("", expected=f"elements that become {wanted}", found=f"{saved} ({error})") from error
    return made.view(raw_dtype(made.itemsize))


def _converted(elements: np.ndarray, after: np.dtype[Any]) -> np.ndarray:
    """Converts elements to another dtype; through float64 where ml_dtypes lacks the direct cast."""
    try:
        return elements.astype(after)
    except TypeError:
        return elements.astype(np.float64).astype(after)
