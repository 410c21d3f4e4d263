"""Decodes messages and files into structs, safely in several threads.

msgspec builds what it needs to decode a struct at the first use, and lets other threads see it before it is complete:
where two threads decode a struct of structs for the first time at once, the process can crash (msgspec 0.22: 4 of 15
processes of 4 threads). Here one thread at a time builds a decoder.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec

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
    """Decodes MessagePack into a struct or a container of them; raises as `decode_json`."""
    try:
        return _decoder(_msgpack, msgspec.msgpack.Decoder, kind).decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"{error}") from error


def _decoder(built: dict[object, Decoder], build: type[Decoder], kind: object) -> Decoder:
    decoder = built.get(kind)
    if decoder is None:
        with _lock:
            decoder = built[kind] = build(kind)
    return decoder
