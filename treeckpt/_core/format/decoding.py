"""Decodes messages and files into structs, safely in several threads, and checks the seals of documents.

msgspec builds what it needs to decode a struct at the first use, and lets other threads see it before it is complete:
where two threads decode a struct of structs for the first time at once, the process can crash (msgspec 0.22: 4 of 15
processes of 4 threads). Here one thread at a time builds a decoder.

The seal of a document is its xxh3-64, computed with the seal's own digits as zeros and stored in its first bytes.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec
import xxhash

from ...errors import CorruptError
from ..text import visible

T = TypeVar("T")
Decoder = TypeVar("Decoder", msgspec.json.Decoder[Any], msgspec.msgpack.Decoder[Any])
_lock = threading.RLock()
_json: dict[object, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[object, msgspec.msgpack.Decoder[Any]] = {}


@overload
def decode_json(data: bytes | str | msgspec.Raw, kind: type[T]) -> T: ...
@overload
def decode_json(data: bytes | str | msgspec.Raw, kind: Any) -> Any: ...  # a union of structs
def decode_json(data: bytes | str | msgspec.Raw, kind: type[T]) -> T:
    """Decodes JSON into a struct or a container of them.

    Raises:
        msgspec.MsgspecError: it is no JSON, or its fields have other types.
    """
    try:
        return _decoder(_json, msgspec.json.Decoder, kind).decode(data)
    except UnicodeDecodeError as error:  # of keys, which msgspec raises as it is
        raise msgspec.DecodeError(f"{error}") from error


@overload
def decode_msgpack(data: bytes, kind: type[T]) -> T: ...
@overload
def decode_msgpack(data: bytes, kind: Any) -> Any: ...
def decode_msgpack(data: bytes, kind: type[T]) -> T:
    """Decodes MessagePack in the same way."""
    try:
        return _decoder(_msgpack, msgspec.msgpack.Decoder, kind).decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"{error}") from error


def _decoder(built: dict[object, Decoder], build: type[Decoder], kind: object) -> Decoder:
    found = built.get(kind)
    if found is None:
        with _lock:
            found = built[kind] = build(kind)
    return found


_RESTORE = "The file was changed after it was written; restore it from a copy"
_SEAL = b'"seal":"'
_ZEROS = b"0" * 16
SEAL_WITHIN = 256
"""Bytes at the start of a document in which the seal must begin."""


def sealed(document: bytes) -> bytes:
    """Returns the JSON document with its first `"seal":"0000000000000000"` filled in."""
    at = document.index(_SEAL) + len(_SEAL)
    digest = f"{xxhash.xxh3_64_intdigest(document):016x}".encode()
    return document[:at] + digest + document[at + 16 :]


def check_seal(document: bytes | bytearray | memoryview, name: str, *, hint: str = _RESTORE) -> None:
    """Refuses a document whose seal is not its checksum.

    Raises:
        CorruptError: naming the file.
    """
    data = memoryview(document)
    at = bytes(data[:SEAL_WITHIN]).find(_SEAL) + len(_SEAL)
    if at < len(_SEAL):
        raise CorruptError(
            name, expected="a sealed document", found=f"no seal in bytes 0:{min(SEAL_WITHIN, len(data))}", hint=hint
        )
    stored = bytes(data[at : at + 16])
    state = xxhash.xxh3_64()
    for part in (data[:at], _ZEROS, data[at + 16 :]):
        state.update(part)  # pyright: ignore[reportArgumentType] (a memoryview is a buffer)
    actual = f"{state.intdigest():016x}".encode()
    if stored != actual:
        expected, found = (visible(seal.decode("ascii", "backslashreplace")) for seal in (stored, actual))
        raise CorruptError(name, expected=f"seal {expected}", found=f"{found} for bytes 0:{len(data)}", hint=hint)


def check_no_zeros(part: bytes | bytearray, at: int, name: str) -> None:
    """Refuses a part of a document that contains a zero byte: a hole of a sparse file reads as zeros.

    Args:
        at: offset of `part` in the document, for errors.

    Raises:
        CorruptError: naming the file.
    """
    if (zero := part.find(0)) >= 0:
        raise CorruptError(name, expected="a document of text", found=f"a zero at byte {at + zero}", hint=_RESTORE)
