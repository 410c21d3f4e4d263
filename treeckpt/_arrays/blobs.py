"""Blobs: texts and bytes that are too long for an index. Their bytes are saved and read as an array, uint8[n]."""

from __future__ import annotations

import io
import struct

import numpy as np

from .._core.sharding.region import Region
from .._core.tree.spec import ArraySpec
from ..errors import CorruptError
from .base import ArraySource, HostMemory, SourcePiece

MAX_VALUE_NBYTES = 4096
"""Bytes of a text in UTF-8, or of bytes, up to which they are stored in the index."""
BLOB_TYPES = (bytes, bytearray, str, io.BytesIO)
Blob = bytes | bytearray | str | io.BytesIO
_TEXT = ("utf-8", "surrogatepass")
_POSITION = "<Q"
_POSITION_NBYTES = 8


def blob_source(value: Blob) -> ArraySource | None:
    """Describes the bytes of a long value as an array, those of `bytes` without a copy.

    What can grow is copied, because it could not while an array uses its memory. Returns None for a short value, for
    one of a subclass, as numpy has them, and for a BytesIO that was closed or has attributes.
    """
    if type(value) not in BLOB_TYPES or (not isinstance(value, io.BytesIO) and 4 * len(value) <= MAX_VALUE_NBYTES):
        return None
    if isinstance(value, io.BytesIO):
        if value.closed or value.getbuffer().nbytes <= MAX_VALUE_NBYTES or vars(value):
            return None
        data = b"".join((value.getbuffer(), struct.pack(_POSITION, value.tell())))
    else:
        data = value.encode(*_TEXT) if isinstance(value, str) else bytes(value)
    if len(data) <= MAX_VALUE_NBYTES:
        return None
    array = np.frombuffer(data, np.uint8)
    memory = HostMemory(array.__array_interface__["data"][0], array.shape, 1, array)
    spec = ArraySpec(array.shape, "uint8", kind=type(value).__name__)
    return ArraySource(spec, None, (SourcePiece(Region.whole(array.shape), memory),))


def blob_value(data: memoryview, kind: str, path: str) -> Blob:
    """Returns the value of a kind of `BLOB_KINDS` from the memory of its bytes.

    Raises:
        CorruptError: the bytes of a text are no UTF-8, or a BytesIO has no position.
    """
    if kind == "BytesIO":
        buffer = io.BytesIO(data[:-_POSITION_NBYTES])
        try:
            buffer.seek(*struct.unpack(_POSITION, data[-_POSITION_NBYTES:]))
        except (struct.error, OverflowError) as error:
            raise CorruptError(path, expected="a BytesIO with its position", found=f"{error}") from error
        return buffer
    if kind != "str":
        return bytearray(data) if kind == "bytearray" else bytes(data)
    try:
        return str(data, *_TEXT)
    except UnicodeDecodeError as error:
        raise CorruptError(path, expected="a text in UTF-8", found=f"{error}"[:200]) from error
