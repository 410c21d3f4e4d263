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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from ..arrays.lazy import Lazy
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.region import Region, tiles
from ..errors import CheckpointExists, MismatchError
from ..io.comm.comm import Comm
from ..io.comm.failures import Fault, raise_faults, silent_faults, to_fault, wrap_os_error
from ..io.comm.rounds import Round
from ..io.storage.local_write import sync_directory

__all__ = ["Output", "OutputFile", "Part", "check_free", "run_output"]

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


class Part(msgspec.Struct, frozen=True):
    """A region of an array, and where in which file it goes, in C order."""

    file: int
    start: int
    path: str
    """Of the leaf."""
    lazy: Lazy
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
    parts: tuple[Part, ...]
    directory: bool
    """Whether the destination is a directory of the files, or the one file itself."""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


class _Word(msgspec.Struct, array_like=True):
    faults: list[Fault] = []
    name: str = ""


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
    talk = Round(comm, f"convert {destination}")
    if (missed := talk.join()) is not None:
        raise_faults(msgspec.msgpack.decode(missed, type=_Word).faults, str(destination), comm)
    run = _Run(output, destination, comm, talk, memory, overwrite)
    with run.prepared() as place:
        return run.write(place)


class _Run:
    def __init__(
        self, output: Output, destination: Path, comm: Comm, talk: Round, memory: int, overwrite: bool
    ) -> None:
        self.output, self.destination, self.comm, self.talk = output, destination, comm, talk
        self.memory, self.overwrite = memory, overwrite
        self.error: Exception | None = None

    def _fault(self, act: Callable[[], None]) -> list[Fault]:
        """Does something; what goes wrong becomes a message."""
        try:
            act()
        except Exception as error:
            self.error = wrap_os_error(error, str(self.destination))
            return [to_fault(self.error, self.comm.rank)]
        return []

    def _agree(self, data: bytes, conclude: Callable[[dict[int, bytes]], _Word], *, last: bool) -> _Word:
        """Every rank's message to rank 0, and its conclusion to every rank; raises what it names."""
        heard = self.talk.gather(data)
        word = None
        if heard is not None:
            word = _Word(silent_faults(self.talk.lost)) if self.talk.lost else conclude(heard)
        encoded = msgspec.msgpack.encode(word) if word is not None else None
        ends = last or (word is not None and bool(word.faults))
        found = msgspec.msgpack.decode(self.talk.share(encoded, last=ends), type=_Word)
        hint = "Nothing was written; look at the cause"
        raise_faults(found.faults, str(self.destination), self.comm, cause=self.error, hint=hint)
        return found

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Path]:
        """A temporary place, on all ranks the same; rank 0 clears it away whatever happens."""
        made: list[tuple[Path, int]] = []

        def start(heard: dict[int, bytes]) -> _Word:
            if other := [rank for rank, digest in heard.items() if digest != heard[0]]:
                error = MismatchError(
                    str(self.destination),
                    expected="the same conversion on every rank",
                    found=f"another one on rank {', '.join(map(str, other[:8]))}",
                    hint="Call it with the same arguments, on the same files",
                )
                return _Word([to_fault(error, 0, common=True)])
            faults = self._fault(lambda: made.append(self._make()))
            return _Word([msgspec.structs.replace(f, common=True) for f in faults], made[0][0].name if made else "")

        try:
            word = self._agree(self._digest(), start, last=False)
            yield self.destination.parent / word.name
        finally:
            for place, fd in made:
                _remove(place)
                os.close(fd)

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
        """Writes this rank's share, and sees it to the end."""
        mine = _shares(self.output.parts, self.comm.size)[self.comm.rank]
        faults = self._fault(lambda: self._write_share(place, mine))

        def finish(heard: dict[int, bytes]) -> _Word:
            all_faults = [f for data in heard.values() for f in msgspec.msgpack.decode(data, type=list[Fault])]
            if not all_faults:
                all_faults = [
                    msgspec.structs.replace(f, common=True) for f in self._fault(lambda: self._publish(place))
                ]
            return _Word(all_faults)

        self._agree(msgspec.msgpack.encode(faults), finish, last=True)
        return sum(part.nbytes for part in mine)

    def _write_share(self, place: Path, parts: Sequence[Part]) -> None:
        tile = max(4096, min(TILE, self.memory // (6 * WORKERS)))
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(WORKERS, "treeckpt-convert") as pool:
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

    def _publish(self, place: Path) -> None:
        if self.output.directory:
            sync_directory(place)
            with contextlib.suppress(FileNotFoundError):
                self.destination.rmdir()  # an empty one only: check_free allowed it
            place.rename(self.destination)
        else:
            check_free(self.destination, self.output, overwrite=self.overwrite)
            place.replace(self.destination)
        sync_directory(self.destination.parent)


def _write_part(fd: int, part: Part, tile: int) -> None:
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


def _shares(parts: Sequence[Part], world: int) -> list[list[Part]]:
    """The parts of each rank: the largest first, each to whom has the fewest bytes."""
    found: list[list[Part]] = [[] for _ in range(world)]
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
