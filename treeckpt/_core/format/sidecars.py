"""Sidecar files: small files, such as a config or a tokenizer, that belong to a checkpoint.

The index lists name, size and checksum of each. On disk the file `config.json` is `file.<save id>.config.json`: a save
that replaces another has files of its own, and no name of an index points to another file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import xxhash

MAX_SIDECARS = 1000
MAX_SIDECAR_NBYTES = 64 << 20
"""Bytes of one file."""
MAX_SIDECARS_NBYTES = 256 << 20
"""Bytes of all files together, which are in memory until they are written."""
MAX_SIDECAR_NAME = 128
NAME_RULE = f"a plain name: up to {MAX_SIDECAR_NAME} of A-Z a-z 0-9 . _ + = @ -, not beginning with one of . + = @ -"

_NAME = re.compile(rf"\w[\w.+=@-]{{0,{MAX_SIDECAR_NAME - 1}}}", re.ASCII)
_STORED = re.compile(r"file\.([0-9a-f]{16})\.(.+)")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


class Sidecar(msgspec.Struct, frozen=True):
    """A sidecar file, as the index lists it."""

    name: str
    nbytes: int
    xxh3: str
    """The xxh3-64 of the content, as 16 hexadecimal digits."""


def is_sidecar_name(name: str) -> bool:
    """Returns whether a sidecar file can have this name."""
    return _NAME.fullmatch(name) is not None


def stored_name(save_id: str, name: str) -> str:
    """Returns the name of a sidecar file in its checkpoint's directory."""
    return f"file.{save_id}.{name}"


def parse_stored_name(name: str) -> tuple[str, str] | None:
    """Returns the save id and name of a sidecar file from its name on disk; None for any other file."""
    match = _STORED.fullmatch(name)
    return (match[1], match[2]) if match is not None and is_sidecar_name(match[2]) else None


def checksum(data: bytes | bytearray) -> str:
    """Returns the checksum of a content, as the index holds it."""
    return xxhash.xxh3_64_hexdigest(data)


def are_sound(sidecars: tuple[Sidecar, ...]) -> bool:
    """Returns whether a save can have written this list."""
    each = all(
        is_sidecar_name(one.name) and 0 <= one.nbytes <= MAX_SIDECAR_NBYTES and _CHECKSUM.fullmatch(one.xxh3)
        for one in sidecars
    )
    return len(sidecars) <= MAX_SIDECARS and each and not alike_names([one.name for one in sidecars])


def alike_names(names: Iterable[str]) -> list[str]:
    """Returns the names that differ from an earlier one at most in case: some file systems do not tell them apart."""
    seen: set[str] = set()
    found: list[str] = []
    for name in names:
        if name.lower() in seen:
            found.append(name)
        seen.add(name.lower())
    return found
