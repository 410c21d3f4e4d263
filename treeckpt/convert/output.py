"""Writing files of a known layout: by one process or by several that share the bytes, under a temporary name.

The layout says where every byte goes: literal bytes (headers, directories), and parts, each an array or a stretch of
one that is read box by box and written where it belongs. All ranks plan the same, which is compared; each writes its
share of the parts; rank 0 writes the rest, and gives the files their names when everything is durable.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from ..arrays.lazy import LazyArray
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.region import Region, tiles
from ..errors import CheckpointExists, MismatchError
from ..io.comm.collective import Conclusion, Exchange
from ..io.comm.comm import Comm
from ..io.comm.failures import os_errors_wrapped
from ..io.storage.local_write import sync_directory

__all__ = ["Output", "OutputFile", "OutputPart", "check_free", "run_output"]

WORKERS = 2
"""Threads that read and write; each holds a tile, and what casting makes of it."""
TILE = 8 << 20
WIDEST = 8
"""Bytes that an element may have had before it was cast."""


class OutputFile(msgspec.Struct, frozen=True):
    """A file to be written, but for its parts."""

    name: str
    nbytes: int
    literals: tuple[tuple[int, bytes], ...]
    """Bytes that are known, and where they go."""


class OutputPart(msgspec.Struct, frozen=True):
    """A region of an array, and where in which file it goes, in C order."""

    file: int
    start: int
    path: str
    """Of the leaf."""
    lazy: LazyArray
    region: Region
    crcs: tuple[int, ...] = ()
    """Where its CRC-32 goes."""

    @property
    def itemsize(self) -> int:
        return dtype_of(self.lazy.spec.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.region.size * self.itemsize


class Output(msgspec.Struct, frozen=True):
    """All that is to be written."""

    files: tuple[OutputFile, ...]
    parts: tuple[OutputPart, ...]
    directory: bool
    """Whether the destination is a directory of the files, or the one file itself."""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def check_free(destination: Path, output: Output, *, overwrite: bool) -> None:
    """Refuses to write where something is.

    Raises:
        CheckpointExists: a directory that is not empty; a file, without `overwrite`.
    """
    if output.directory and destination.is_dir() and not any(destination.iterdir()):
        return
    if not os.path.lexists(destination) or (not output.directory and overwrite and destination.is_file()):
        return
    raise CheckpointExists(
        str(destination),
        expected="nothing there yet",
        found="a directory" if destination.is_dir() else "a file",
        hint="Choose another destination, or remove it first"
        if output.directory or destination.is_dir()
        else "Choose another destination, or pass overwrite=True (--overwrite)",
    )


def run_output(output: Output, destination: Path, comm: Comm, *, memory: int, overwrite: bool) -> int:
    """Writes everything; returns the bytes that this rank wrote. Nothing is left behind by a failure.

    Raises:
        TreeckptError: it failed; on every rank.
    """
    hint = "Nothing was written; look at the cause"
    with Exchange(comm, f"convert {destination}", path=str(destination), hint=hint) as exchange:
        run = _OutputRun(output, destination, comm, exchange, memory, overwrite)
        with run.prepared() as place:
            return run.write(place)


class _OutputRun:
    """One rank's part of the writing."""

    def __init__(
        self, output: Output, destination: Path, comm: Comm, exchange: Exchange, memory: int, overwrite: bool
    ) -> None:
        self.output, self.destination, self.comm, self.exchange = output, destination, comm, exchange
        self.memory, self.overwrite = memory, overwrite
        self.temporary: tuple[Path, int] | None = None
        """On rank 0: the temporary place, and a descriptor that locks it."""

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Path]:
        """Yields a temporary place, the same on all ranks; rank 0 removes it whatever happens."""
        try:
            name = self.exchange.step(self._digest, self._start, str)
            yield self.destination.parent / name
        finally:
            if self.temporary is not None:
                place, fd = self.temporary
                _remove(place)
                os.close(fd)

    def _start(self, digests: dict[int, bytes]) -> Conclusion[str]:
        """On rank 0: compares the ranks' plans and creates the temporary place; returns its name."""
        if other := [rank for rank, digest in digests.items() if digest != digests[0]]:
            raise MismatchError(
                str(self.destination),
                expected="the same conversion on every rank",
                found=f"another one on rank {', '.join(map(str, other[:8]))}",
                hint="Call it with the same arguments, on the same files",
            )
        with os_errors_wrapped(str(self.destination)):
            self.temporary = self._make()
        return Conclusion(self.temporary[0].name, last=False)

    def _digest(self) -> bytes:
        state = xxhash.xxh3_128()
        for file in self.output.files:
            state.update(f"{file.name} {file.nbytes} {len(file.literals)}".encode())
            for start, data in file.literals:
                state.update(start.to_bytes(8, "little") + data)
        for part in self.output.parts:
            state.update(f"{part.file} {part.start} {part.path} {part.region}".encode())
        return state.digest()

    def _make(self) -> tuple[Path, int]:
        """A new temporary place, with all files in their size; held by a lock, so that it is not taken for litter."""
        check_free(self.destination, self.output, overwrite=self.overwrite)
        parent = self.destination.parent
        parent.mkdir(parents=True, exist_ok=True)
        _clear_litter(parent, self.destination.name)
        place = parent / f".{self.destination.name}.{secrets.token_hex(8)}.tmp"
        if self.output.directory:
            place.mkdir()
        else:
            place.touch(exist_ok=False)
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for file in self.output.files:
                # before any rank begins: a part's checksum goes into the middle of what is literal
                with self._path(place, file).open("wb") as made:
                    made.truncate(file.nbytes)
                    for start, data in file.literals:
                        made.seek(start)
                        made.write(data)
        except BaseException:
            _remove(place)
            os.close(fd)
            raise
        return place, fd

    def _path(self, place: Path, file: OutputFile) -> Path:
        return place / file.name if self.output.directory else place

    def write(self, place: Path) -> int:
        """Writes this rank's share; rank 0 publishes the files once all ranks have written theirs."""
        mine = _shares(self.output.parts, self.comm.size)[self.comm.rank]
        self.exchange.step(partial(self._write_share, place, mine), partial(self._publish, place), type(None))
        return sum(part.nbytes for part in mine)

    def _write_share(self, place: Path, parts: Sequence[OutputPart]) -> bytes:
        """Writes this rank's parts; rank 0 opens, and so makes durable, files without parts too."""
        tile = max(4096, min(TILE, self.memory // (6 * WORKERS)))
        with (
            os_errors_wrapped(str(self.destination)),
            contextlib.ExitStack() as stack,
            ThreadPoolExecutor(WORKERS, "treeckpt-convert") as pool,
        ):
            fds: dict[int, int] = {}
            wanted = {part.file for part in parts} | (
                set(range(len(self.output.files))) if not self.comm.rank else set()
            )
            for number in sorted(wanted):
                fds[number] = os.open(self._path(place, self.output.files[number]), os.O_WRONLY | os.O_CLOEXEC)
                stack.callback(os.close, fds[number])
            jobs = [pool.submit(_write_part, fds[part.file], part, tile) for part in parts]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise
            for fd in fds.values():
                os.fsync(fd)
        return b""

    def _publish(self, place: Path, _: dict[int, bytes]) -> Conclusion[None]:
        """On rank 0: gives the files their names, now that every rank has written its share."""
        with os_errors_wrapped(str(self.destination)):
            if self.output.directory:
                sync_directory(place)
                with contextlib.suppress(FileNotFoundError):
                    self.destination.rmdir()  # an empty one only: check_free allowed it
                place.rename(self.destination)
            else:
                check_free(self.destination, self.output, overwrite=self.overwrite)
                place.replace(self.destination)
            sync_directory(self.destination.parent)
        return Conclusion(None)


def _write_part(fd: int, part: OutputPart, tile: int) -> None:
    at, crc = part.start, 0
    for region in tiles(part.region, tile // max(part.itemsize, WIDEST)):
        data = np.ascontiguousarray(part.lazy.read(region)).reshape(-1).view(np.uint8).data
        if part.crcs:
            crc = zlib.crc32(data, crc)
        _pwrite(fd, data, at)
        at += len(data)
    for place in part.crcs:
        _pwrite(fd, memoryview(crc.to_bytes(4, "little")), place)


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _shares(parts: Sequence[OutputPart], world: int) -> list[list[OutputPart]]:
    """The parts of each rank: the largest first, each to whom has the fewest bytes."""
    found: list[list[OutputPart]] = [[] for _ in range(world)]
    loads = [0] * world
    for part in sorted(parts, key=lambda part: -part.nbytes) if world > 1 else parts:
        rank = loads.index(min(loads))
        found[rank].append(part)
        loads[rank] += part.nbytes + 4096
    return found


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            place.unlink()


def _clear_litter(parent: Path, name: str) -> None:
    """Removes what a conversion to the same destination left that was killed: nobody holds its lock any more."""
    for place in parent.glob(f".{_escaped(name)}.????????????????.tmp"):
        with contextlib.suppress(OSError):
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(place)
            finally:
                os.close(fd)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
