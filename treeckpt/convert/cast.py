"""Arrays of another dtype, converted box by box while they are read."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from ..arrays.base import Storage
from ..arrays.lazy import LazyArray
from ..arrays.registry import library_of
from ..core.sharding.dtypes import dtype_of, normalize_dtype
from ..core.sharding.region import Region
from ..errors import MismatchError
from ..foreign.checksums import ArchiveStorages
from ..loading.transforms.reshape_rules import check_scaled
from .contents import Contents, map_leaves

FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_FLOATING = (*FLOATS, "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz")
_FLOATING += ("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")
"""What is cast."""
_LARGEST = {"float16": 65504.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""Of dtypes that hold fewer magnitudes than float32."""


def cast_floats(contents: Contents, dtype: Any, storages: ArchiveStorages) -> Contents:
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
                moved[key] = Storage(storages.take(nbytes), nbytes, None)
            storage = moved[key]
        return _cast(leaf, name, path, storage)

    return map_leaves(contents, change)


def _cast(leaf: LazyArray, dtype: str, path: str, storage: Storage | None) -> LazyArray:
    spec = msgspec.structs.replace(leaf.spec, dtype=dtype)
    convert = library_of(spec).cast

    def read(region: Region) -> np.ndarray:
        data = leaf.read(region)
        if dtype in _LARGEST:
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
