"""Specs: what a leaf is without its data. `ArraySpec` describes an array as jax.ShapeDtypeStruct does."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import SupportsIndex, cast

import msgspec

from ...errors import MismatchError
from ..sharding.dtypes import dtype_of, normalize_dtype
from ..sharding.region import Region

BLOB_KINDS = frozenset(("bytes", "bytearray", "str", "BytesIO"))
"""Kinds of specs of blobs, values whose bytes are stored in shards, as uint8[n].

Text is UTF-8, with surrogates. The last 8 bytes of a BytesIO are its position.
"""


class StridedView(msgspec.Struct, frozen=True, array_like=True):
    """A strided window into another leaf's elements. `offset` and `strides` count elements of it in C order."""

    offset: int
    strides: tuple[int, ...]


class ArraySpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """An array without its data; an abstract target for `load`, as jax.ShapeDtypeStruct.

    >>> tc.ArraySpec((2, 3), torch.bfloat16).nbytes
    12
    >>> rows = tc.ArraySpec((2, 4), "float32", regions=(tc.Region((1, 0), (1, 4)),))
    >>> tc.load("run/step_00000100", {"model": {"weight": rows}}, strict=False)["model"]["weight"].shape
    torch.Size([1, 4])

    Args:
        shape: of the whole (global) array; any sequence of integers becomes a tuple.
        dtype: its name, see `_core.sharding.dtypes`; a dtype of torch, numpy or ml_dtypes becomes its name.
        regions: the regions that are wanted or held; None is the whole array.
        device: the device of the saved array, or of the array to load, e.g. "cuda:0"; None is the host.
        requires_grad: as in torch.
        kind: "tensor", "parameter", "buffer" or "numpy": the type that load returns; one of `BLOB_KINDS` for the bytes
            of a value.
        order: the dimensions from the outermost to the innermost in memory, of a dense array: (0, 2, 3, 1) for
            channels_last, (1, 0) for a matrix by columns. None is C order.
    """

    shape: tuple[int, ...]
    dtype: str
    regions: tuple[Region, ...] | None = None
    device: str | None = None
    requires_grad: bool = False
    kind: str = "tensor"
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        dtype, shape = self.dtype, self.shape
        if self.order is not None:
            msgspec.structs.force_setattr(self, "order", _checked_order(self.order, len(shape)))
        if type(dtype) is str and type(shape) is tuple and dtype[:6] != "torch.":
            for n in shape:  # a loop: an index has a million shapes, and nothing shorter is as fast
                if type(n) is not int:
                    break
            else:
                return
        msgspec.structs.force_setattr(self, "dtype", normalize_dtype(dtype))
        given = cast(Iterable[SupportsIndex], shape)
        try:
            msgspec.structs.force_setattr(self, "shape", tuple(operator.index(n) for n in given))
        except TypeError as error:
            raise MismatchError(
                "shape", expected="a shape: a sequence of integers", found=f"{shape!r:.60}", hint="One number n is (n,)"
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


def _checked_order(order: Iterable[SupportsIndex], ndim: int) -> tuple[int, ...] | None:
    """Returns an order of dimensions; None for C order."""
    try:
        dims = tuple(operator.index(d) for d in order)
    except TypeError:
        dims = None
    if dims is None or sorted(dims) != list(range(ndim)):
        raise MismatchError(
            "order",
            expected=f"each of the {ndim} dimensions once, from the outermost to the innermost in memory",
            found=f"{order!r:.60}",
            hint="(1, 0) is a matrix by columns, (0, 2, 3, 1) channels_last; None is C order",
        )
    return dims if dims != tuple(range(ndim)) else None


class TableSpec(msgspec.Struct, frozen=True, array_like=True):
    """The partition of a keyed table's ids into buckets; its slots are arrays with specs of their own."""

    function: str
    version: int
    """The version of the partition function."""
    buckets: int
