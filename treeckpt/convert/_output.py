"""Writes files of a known layout, by one process or by several that share the bytes, under a temporary name.

The layout has the place of every byte: literal bytes (headers, directories), and parts, each a region of an array that
is read box by box. All ranks have the same layout, which is compared; each writes its share of the parts; rank 0
writes the literals, and renames the files when everything is durable.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from .._arrays.base import LazyArray
from .._core.sharding.dtypes import dtype_of
from .._core.sharding.region import Region, tiles
from .._io.comm.collective import Conclusion, Exchange
from .._io.comm.comm import Comm
from .._io.os_errors import write_errors_wrapped
from .._io.storage.local_files import BINARY, fcntl, sync_directory, sync_file, write_at
from .._threads import ThreadPool
from ..errors import CheckpointExists, MismatchError

WORKERS = 2
"""Threads that read and write; each has the memory of a tile before and after a cast."""
TILE_NBYTES = 8 << 20
"""Bytes of a part that are read and written at a time, at most."""
WIDEST_ITEMSIZE = 8
"""Bytes that an element may have had before it was cast."""


class OutputFile(msgspec.Struct, frozen=True):
    """A file to be written, without its parts."""

    name: str
    """Empty for the file that the destination is."""
    nbytes: int
    literals: tuple[tuple[int, bytes], ...]
    """The bytes that are known, with their offsets."""


class OutputPart(msgspec.Struct, frozen=True):
    """A region of an array in C order, and its place: the number of a file and an offset."""

    file: int
    start: int
    path: str
    """The path of the leaf."""
    lazy: LazyArray
    region: Region
    crcs: tuple[int, ...] = ()
    """The offsets in the file at which its CRC-32 is written."""

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
    """Whether the destination is a directory of the files, or the first of them, with the others beside it."""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def check_free(destination: Path, output: Output, *, overwrite: bool) -> None:
    """Refuses to write where something is.

    Raises:
        CheckpointExists: a directory that is not empty; a file, without `overwrite`; beside it one of another content.
    """
    whole = output.directory or destination.is_dir()
    for place in () if output.directory else beside(destination, output):
        if os.path.lexists(place) and (not overwrite or not place.is_file()):
            raise CheckpointExists(
                str(place),
                expected=f"nothing there yet, or the same, as it is written beside {destination.name}",
                found="another one",
                hint="Choose a destination in a directory of its own, or pass overwrite=True (--overwrite)",
            )
    if output.directory and destination.is_dir() and not any(destination.iterdir()):
        return
    if not os.path.lexists(destination) or (not output.directory and overwrite and destination.is_file()):
        return
    raise CheckpointExists(
        str(destination),
        expected="nothing there yet",
        found="a directory" if destination.is_dir() else "a file",
        hint="Choose another destination, or remove it first"
        if whole
        else "Choose another destination, or pass overwrite=True (--overwrite)",
    )


def beside(destination: Path, output: Output) -> list[Path]:
    """Returns the places beside a file where the other files of its output go, but for those that lie there already."""
    places = [(destination.parent / file.name, file) for file in output.files if file.name]
    return [place for place, file in places if not _is_there(place, file)]


def _is_there(place: Path, file: OutputFile) -> bool:
    data = b"".join(part for _, part in file.literals)
    return place.is_file() and place.stat().st_size == len(data) and place.read_bytes() == data


def run_output(output: Output, destination: Path, comm: Comm, *, memory: int, overwrite: bool) -> int:
    """Writes everything; returns the bytes that this rank wrote. Nothing is left behind by a failure.

    Raises:
        TreeckptError: it failed; on every rank.
    """
    mine = _shares(output.parts, comm.size)[comm.rank]
    hint = "Nothing was written; look at the cause"
    with (
        Exchange(comm, f"convert {destination}", path=str(destination), hint=hint) as exchange,
        contextlib.ExitStack() as cleanup,
    ):
        files = _NewFiles(output, destination, overwrite, cleanup)
        files.place = destination.parent / exchange.step(partial(_digest, output), files.create, str)
        # each thread holds a tile several times: as it was read, and before and after a cast
        tile = max(4096, min(TILE_NBYTES, memory // (6 * WORKERS)))
        exchange.step(partial(files.write, mine, tile, every_file=not comm.rank), files.publish, type(None))
    return sum(part.nbytes for part in mine)


def _digest(output: Output) -> bytes:
    state = xxhash.xxh3_128()
    for file in output.files:
        state.update(f"{file.name} {file.nbytes} {len(file.literals)}".encode())
        for start, data in file.literals:
            state.update(start.to_bytes(8, "little") + data)
    for part in output.parts:
        state.update(f"{part.file} {part.start} {part.path} {part.region}".encode())
    return state.digest()


class _NewFiles:
    """The files of an output at a temporary place, the same on all ranks, until they are published.

    Args:
        cleanup: on rank 0, removes the temporary place at the end.
    """

    def __init__(self, output: Output, destination: Path, overwrite: bool, cleanup: contextlib.ExitStack) -> None:
        self.output, self.destination, self.overwrite, self.cleanup = output, destination, overwrite, cleanup
        self.place = destination

    def _path(self, file: OutputFile) -> Path:
        return self.place / (file.name or self.destination.name)

    def create(self, digests: dict[int, bytes]) -> Conclusion[str]:
        """On rank 0: compares the ranks' plans and creates all files in their size; returns the temporary name."""
        if other := [rank for rank, digest in digests.items() if digest != digests[0]]:
            raise MismatchError(
                str(self.destination),
                expected="the same conversion on every rank",
                found=f"another one on rank {', '.join(map(str, other[:8]))}",
                hint="Call it with the same arguments, on the same files",
            )
        with write_errors_wrapped(str(self.destination)):
            check_free(self.destination, self.output, overwrite=self.overwrite)
            parent = self.destination.parent
            parent.mkdir(parents=True, exist_ok=True)
            _clear_litter(parent, self.destination.name)
            self.place = parent / f".{self.destination.name}.{secrets.token_hex(8)}.tmp"
            self.place.mkdir()
            # after a success nothing is there any more
            self.cleanup.callback(_remove, self.place)
            if fcntl is not None:
                self.cleanup.callback(os.close, _lock(self.place))  # so that it is not taken for litter
            for file in self.output.files:
                # before any rank begins: a part's checksum goes into the middle of what is literal
                with self._path(file).open("wb", buffering=0) as made:
                    made.truncate(file.nbytes)
                    for start, data in file.literals:
                        _pwrite(made.fileno(), memoryview(data), start)
        return Conclusion(self.place.name, last=False)

    def write(self, parts: Sequence[OutputPart], tile: int, *, every_file: bool) -> bytes:
        """Writes this rank's parts and makes them durable; with `every_file`, files without any too."""
        numbers = range(len(self.output.files)) if every_file else sorted({part.file for part in parts})
        with (
            write_errors_wrapped(str(self.destination)),
            contextlib.ExitStack() as stack,
            ThreadPool(WORKERS, "treeckpt-convert") as pool,
        ):
            fds: dict[int, int] = {}
            for number in numbers:
                fds[number] = os.open(self._path(self.output.files[number]), os.O_WRONLY | BINARY)
                stack.callback(os.close, fds[number])
            jobs = [pool.submit(_write_parts, fds, group, tile) for group in _together(parts, tile)]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                # else all other parts would be written before the error is raised
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            for fd in fds.values():
                sync_file(fd)
        return b""

    def publish(self, _: dict[int, bytes]) -> Conclusion[None]:
        """On rank 0: renames the files, after every rank has written its share."""
        with write_errors_wrapped(str(self.destination)), contextlib.ExitStack() as undo:
            sync_directory(self.place)
            if self.output.directory:
                with contextlib.suppress(FileNotFoundError):
                    self.destination.rmdir()  # an empty one only: check_free allowed it
                self.place.rename(self.destination)
            else:
                # something may be there by now
                check_free(self.destination, self.output, overwrite=self.overwrite)
                for place in beside(self.destination, self.output):
                    if not place.exists():
                        undo.callback(_remove, place)
                    (self.place / place.name).replace(place)
                (self.place / self.destination.name).replace(self.destination)
            undo.pop_all()
            sync_directory(self.destination.parent)
        return Conclusion(None)


def _together(parts: Sequence[OutputPart], nbytes: int) -> list[list[OutputPart]]:
    """Returns the parts in groups of at most so many bytes, each for one call of a thread; a larger part alone."""
    groups: list[list[OutputPart]] = []
    left = 0
    for part in parts:
        if part.nbytes > left:
            groups.append([])
            left = nbytes
        groups[-1].append(part)
        left -= part.nbytes
    return groups


def _write_parts(fds: Mapping[int, int], parts: Sequence[OutputPart], tile: int) -> None:
    for part in parts:
        write_part(fds[part.file], part, tile)


def write_part(fd: int, part: OutputPart, tile: int) -> None:
    """Writes one part of a file, a tile after the other."""
    position, crc = part.start, 0
    for region in tiles(part.region, tile // max(part.itemsize, WIDEST_ITEMSIZE)):
        data = np.ascontiguousarray(part.lazy.read(region)).reshape(-1).view(np.uint8).data
        if part.crcs:
            crc = zlib.crc32(data, crc)
        _pwrite(fd, data, position)
        position += len(data)
    for place in part.crcs:
        _pwrite(fd, memoryview(crc.to_bytes(4, "little")), place)


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += write_at(fd, data[done:], offset + done)


def _shares(parts: Sequence[OutputPart], world: int) -> list[list[OutputPart]]:
    """Returns the parts of each rank: the largest first, each to the rank with the fewest bytes."""
    shares: list[list[OutputPart]] = [[] for _ in range(world)]
    loads = [0] * world
    # one process writes in the order of the file
    for part in sorted(parts, key=lambda part: -part.nbytes) if world > 1 else parts:
        rank = loads.index(min(loads))
        shares[rank].append(part)
        # each part costs a read and a write, however small: tiny ones are shared too
        loads[rank] += part.nbytes + 4096
    return shares


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            place.unlink()


def _lock(place: Path) -> int:
    """Opens and locks a file or directory; returns the descriptor, with which the lock ends.

    Raises:
        OSError: another process holds the lock, or it cannot be opened.
    """
    # a link of this name is not followed, and a pipe is not waited for
    fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | BINARY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _clear_litter(parent: Path, name: str) -> None:
    """Removes what a conversion to the same destination left that was killed: nobody holds its lock any more.

    Windows locks no directory: there it stays, as it cannot be told from what is being written.
    """
    for place in parent.glob(f".{glob.escape(name)}.????????????????.tmp") if fcntl is not None else ():
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.callback(os.close, _lock(place))
            _remove(place)
