"""The progress record of a save: how much is written, and by which process. A rank keeps it until the save ends.

No save or load depends on a record: it may be missing, old, or left by a save that was killed. Files of a save are
removed early only where its coordinator's record proves that the save is dead; see `_inspect.deletion`.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec
import xxhash

from ...errors import FormatError
from .shard_header import MAX_NBYTES, MAX_WORLD, SAVE_ID

SavePhase = Literal["write", "commit"]
MAX_RECORDED_STEP = (1 << 63) - 1
MAX_PROGRESS = 4096
"""The most bytes that a record has."""
_NAME = re.compile(r"progress-([0-9]{5,9})\.([0-9a-f]{16})\.json")


class Owner(msgspec.Struct, frozen=True):
    """The process that wrote a file."""

    host: str
    pid: int
    boot: str = ""
    """Identifies a boot of the host and a namespace of processes on it; empty where the system gives none."""
    started: int = 0
    """Start of the process in ticks since the boot: another process may get the same pid later."""

    @property
    def tag(self) -> str:
        """8 hexadecimal digits that identify this process in the names of its temporary files."""
        return xxhash.xxh3_64_hexdigest(f"{self.host} {self.pid} {self.boot} {self.started}".encode())[:8]


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's part of a save in progress."""

    save_id: str
    rank: int
    world: int
    step: int | None
    phase: SavePhase
    """write: shards are being written; commit: this rank's shards are durable, and it waits for the others."""
    written: int
    """Bytes of arrays written so far."""
    planned: int
    """Bytes of arrays that this rank will write in all."""
    started_ns: int
    """Unix time at which the save began, by the rank's clock."""
    updated_ns: int
    """Unix time of the last change in the other fields: an old one belongs to a save that hangs, or was killed."""
    alive_ns: int = 0
    """Unix time of this record, which is renewed as long as the save lasts."""
    owner: Owner | None = None
    """The process whose end is the end of this rank's part; None if the record names none."""

    @property
    def fraction(self) -> float:
        """The part that is written, from 0 to 1."""
        return fraction_of(self.written, self.planned)


_PROGRESS = msgspec.json.Decoder(Progress)


def fraction_of(written: int, planned: int) -> float:
    """Returns the part that is written, from 0 to 1; 1 where there are no bytes to write."""
    return min(written / planned, 1.0) if planned > 0 else 1.0


def progress_name(rank: int, save_id: str) -> str:
    """Returns the file name of a record."""
    return f"progress-{rank:05d}.{save_id}.json"


def parse_progress_name(name: str) -> tuple[int, str] | None:
    """Parses (rank, save id) from a record's file name, None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def encode_progress(progress: Progress) -> bytes:
    """Encodes the file."""
    return msgspec.json.encode(progress)


def decode_progress(data: bytes, name: str) -> Progress:
    """Decodes the file.

    Raises:
        FormatError: it is no progress record of treeckpt.
    """
    try:
        if len(data) > MAX_PROGRESS:
            raise ValueError(f"{len(data)} bytes")
        found = _PROGRESS.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(name, expected="a record of progress", found=f"{error}"[:200]) from error
    known = SAVE_ID.fullmatch(found.save_id) is not None and 0 <= found.rank < found.world <= MAX_WORLD
    numbers = (found.written, found.planned, found.started_ns, found.updated_ns, found.alive_ns)
    bounded = min(numbers) > -MAX_NBYTES and max(numbers) < MAX_NBYTES and abs(found.step or 0) <= MAX_RECORDED_STEP
    if not known or min(found.written, found.planned) < 0 or not bounded:
        raise FormatError(name, expected="a rank's progress in a save", found=f"{found!r:.200}")
    return found
