"""Reads the identity of a shard and a few of its checksums from its header, without reading the rest of the header.

The header of a shard of 100 GB holds 4 MB of checksums. They are base64 text at an offset that the first page gives, so
those of a few blocks are found by arithmetic. The seal is not compared, because that would take the whole header: a
changed checksum is found all the same, because its block does not match it.
"""

from __future__ import annotations

import base64
import binascii
import re

import msgspec
import numpy as np

from ..core.format.shard_header import MAX_BLOCK, PAGE, VERSION, header_nbytes
from ..errors import CorruptError, FormatError

__all__ = ["PREFIX_NBYTES", "HeaderPrefix", "decode_hashes", "decode_prefix", "hash_text_range"]

PREFIX_NBYTES = PAGE
"""Bytes at the start of a file that `decode_prefix` needs."""
_PREFIX = re.compile(
    rb'\{"__metadata__":\{"seal":"[0-9a-f]{16}","format":"treeckpt","version":"([0-9]{1,9})","save_id":"([0-9a-f]{16})",'
    rb'"rank":"([0-9]{1,9})","world":"[0-9]{1,9}","part":"([0-9]{1,9})","stream":"([0-9]{1,19})",'
    rb'"block":"([0-9]{1,9})","hashes":"'
)


class HeaderPrefix(msgspec.Struct, frozen=True):
    """The identity of a shard, and where its checksums are."""

    save_id: str
    rank: int
    part: int
    stream: int
    header: int
    """Bytes before the data area."""
    block: int
    """Bytes under one checksum."""
    hashes: int
    """Offset in the file of the text of the checksums."""


def decode_prefix(data: bytes | bytearray, name: str) -> HeaderPrefix:
    """Decodes the first PREFIX_NBYTES bytes of the file called `name`.

    Raises:
        CorruptError, FormatError: it is no shard of treeckpt.
    """
    header = header_nbytes(data, name)
    found = _PREFIX.match(data, 8)
    if found is None or found[1] != str(VERSION).encode():
        raise FormatError(name, expected=f"a treeckpt shard of version {VERSION}", found="another header")
    block = int(found[6])
    if not PAGE <= block <= MAX_BLOCK or block % PAGE:
        raise FormatError(name, expected=f"blocks of {PAGE} to {MAX_BLOCK} bytes, in pages", found=f"{block}")
    return HeaderPrefix(found[2].decode(), int(found[3]), int(found[4]), int(found[5]), header, block, found.end())


def hash_text_range(first: int, count: int) -> tuple[int, int, int]:
    """Returns (start, stop) of the characters that hold the checksums of some blocks, and the bytes to skip in them."""
    start, stop = first * 8 // 3, -(-(first + count) * 8 // 3)
    return start * 4, stop * 4, first * 8 - start * 3


def decode_hashes(text: bytes | bytearray, skip: int, count: int, name: str) -> list[int]:
    """Decodes the checksums in those characters.

    Raises:
        CorruptError: they are not base64, or too few.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise CorruptError(name, expected="checksums", found=str(error)) from error
    if len(data) < skip + 8 * count:
        raise CorruptError(name, expected=f"{count} checksums", found=f"{len(data)} bytes")
    return np.frombuffer(data, "<u8", count, skip).tolist()
