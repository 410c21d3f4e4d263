"""Blobs: texts and bytes that are too long for an index. Their bytes are saved and read as an array, uint8[n]."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.sharding.region import Region
from ..core.tree.spec import ArraySpec
from ..errors import CorruptError
from .base import ArraySource, HostMemory, SourcePiece

MAX_VALUE_NBYTES = 4096
"""Bytes of a text in UTF-8, or of bytes, up to which they are stored in the index."""
BLOB_TYPES = (bytes, bytearray, str)
_TEXT = ("utf-8", "surrogatepass")


def blob_source(value: bytes | bytearray | str) -> ArraySource | None:
    """Describes the bytes of a long value as an array, those of `bytes` without a copy.

    A bytearray is copied, because it could not grow while an array uses its memory. Returns None for a short value, and
    for one of a subclass, as numpy has them.
    """
    if len(value) * (4 if type(value) is str else 1) <= MAX_VALUE_NBYTES or type(value) not in BLOB_TYPES:
        return None
    data = value.encode(*_TEXT) if isinstance(value, str) else bytes(value)
    if len(data) <= MAX_VALUE_NBYTES:
        return None
    array = np.frombuffer(data, np.uint8)
    memory = HostMemory(array.__array_interface__["data"][0], array.shape, 1, array)
    spec = ArraySpec(array.shape, "uint8", kind=type(value).__name__)
    return ArraySource(spec, None, (SourcePiece(Region.whole(array.shape), memory),))


def blob_value(data: Any, kind: str, path: str) -> bytes | bytearray | str:
    """Returns the value of a kind of `BLOB_KINDS` from the memory of its bytes.

    Raises:
        CorruptError: the bytes of a text are no UTF-8.
    """
    if kind != "str":
        return bytearray(data) if kind == "bytearray" else bytes(data)
    try:
        return str(data, *_TEXT)
    except UnicodeDecodeError as error:
        raise CorruptError(path, expected="a text in UTF-8", found=f"{error}"[:200]) from error
