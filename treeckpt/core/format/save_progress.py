"""The record of a save under way: how far it is, and which process writes it. A rank keeps it until the save ends.

No save or load depends on a record: it may be missing, old, or left behind by a save that was killed. What a save wrote
is removed early only where its coordinator's record proves that the save is dead; see `core.analysis.deletion`.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec
import xxhash

from ...errors import FormatError
from .shard_header import MAX_NBYTES, MAX_WORLD, SAVE_ID

__all__ = [
    "MAX_PROGRESS",
    "Owner",
    "Progress",
    "SavePhase",
    "decode_progress",
    "encode_progress",
    "fraction_of",
    "parse_progress_name",
    "progress_name",
]

SavePhase = Literal["write", "commit"]
MAX_RECORDED_STEP = (1 << 63) - 1
MAX_PROGRESS = 4096
"""Bytes of a record, at most."""
_NAME = re.compile(r"progress-([0-9]{5,9})\.([0-9a-f]{16})\.json")


class Owner(msgspec.Struct, frozen=True):
    """The process that wrote a file."""

    host: str
    pid: int
    boot: str = ""
    """Names one boot of the host, and the processes that see each other there; empty where the system gives none."""
    started: int = 0
    """When the process began, in ticks since the boot: another process may have the same number later."""

    @property
    def tag(self) -> str:
        """8 hexadecimal digits that stand for this process in the names of its temporary files."""
        return xxhash.xxh3_64_hexdigest(f"{self.host} {self.pid} {self.boot} {self.started}".encode())[:8]


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's part of a save under way."""

    save_id: str
    rank: int
    world: int
    step: int | None
    phase: SavePhase
    """write: shards are being written; commit: this rank's are durable, and it waits for the others."""
    written: int
    """Bytes of arrays."""
    planned: int
    """Bytes that `written` comes to in the end."""
    started_ns: int
    """Unix time at which the save began, by the rank's clock."""
    updated_ns: int
    """Unix time at which it last had something new: an old one belongs to a save that hangs, or was killed."""
    alive_ns: int = 0
    """Unix time of this record, which is renewed as long as the save lasts."""
    owner: Owner | None = None
    """Whose end is the end of this rank's part; older versions did not say."""

    @property
    def fraction(self) -> float:
        """From 0 to 1."""
        return fraction_of(self.written, self.planned)


def fraction_of(written: int, planned: int) -> float:
    """From 0 to 1; what has no bytes to write is done."""
    return min(written / planned, 1.0) if planned > 0 else 1.0


def progress_name(rank: int, save_id: str) -> str:
    """The file's name."""
    return f"progress-{rank:05d}.{save_id}.json"


def parse_progress_name(name: str) -> tuple[int, str] | None:
    """(rank, save id) of a record's file name, None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def encode_progress(progress: Progress) -> bytes:
    """The bytes of the file."""
    return msgspec.json.encode(progress)


def decode_progress(data: bytes, name: str) -> Progress:
    """The record of these bytes.

    Raises:
        FormatError: it is none of ours.
    """
    try:
        if len(data) > MAX_PROGRESS:
            raise ValueError(f"{len(data)} bytes")
        found = msgspec.json.decode(data, type=Progress)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(name, expected="a record of progress", found=f"{error}"[:200]) from error
    known = SAVE_ID.fullmatch(found.save_id) is not None and 0 <= found.rank < found.world <= MAX_WORLD
    numbers = (found.written, found.planned, found.started_ns, found.updated_ns, found.alive_ns)
    bounded = min(numbers) > -MAX_NBYTES and max(numbers) < MAX_NBYTES and abs(found.step or 0) <= MAX_RECORDED_STEP
    if not known or min(found.written, found.planned) < 0 or not bounded:
        raise FormatError(name, expected="a rank's progress in a save", found=f"{found!r:.200}")
    return found
