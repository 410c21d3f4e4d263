"""A small file by which other processes see what this one does in a checkpoint's directory, for as long as it does it.

Such are the progress record of a save, a reader's lease and a lock on the index. Its name is that of no other process's
file. It is replaced as a whole, and not made durable: behind a power loss no process is left that it speaks of. A
thread writes it again now and then, and it is deleted at the end. Of a killed process it stays, and names a process
that has ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from ..._core.format.decoding import decode_json
from ..._core.format.files import Owner
from ..._threads import start_unnamed_thread
from ...errors import TreeckptError
from ..os_errors import shows_damage
from .late_requests import delete_late
from .local_write import DIRECTORY_TRIES
from .process_owner import is_running, this_process
from .store import Store

LAPSE = 600.0
"""Seconds after which a file that was not renewed counts as that of an ended process, where the process cannot be seen;
the clocks of hosts may differ by less."""
DELETE_PAUSES = (0.0, 0.05, 0.2)
"""Seconds before each try to delete a file."""
LATE_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds before each try after these, for which nobody waits."""
MAX_CLAIM = 4096
"""Bytes of a lock or lease, at most."""

_kept: set[str] = set()
"""The names of the files that this process keeps."""


class Claim(msgspec.Struct, frozen=True):
    """The content of a lock or lease."""

    owner: Owner
    alive_ns: int
    """Unix time at which it was written."""


class KeptFile:
    """A file that this process keeps until `end`.

    Args:
        encode: returns the content of a write that follows.
    """

    def __init__(self, store: Store, name: str, encode: Callable[[], bytes]) -> None:
        self.name, self._store, self._encode = name, store, encode
        self._writing, self._ended = threading.Lock(), threading.Event()
        self.exists = False
        """Whether it may be there: a write that fails may have reached an object store."""

    def write(self, put: Callable[[str, bytes], object] | None = None) -> None:
        """Writes it, unless its end has begun; `put` does so in the place of `replace_file`.

        Raises:
            OSError | StoreError: it cannot be written.
        """
        with self._writing:
            if not self._ended.is_set():
                self.exists = True
                _kept.add(self.name)
                (put or partial(replace_file, self._store))(self.name, self._encode())

    def try_write(self) -> bool:
        """Writes it as `write`; returns whether that was possible."""
        with contextlib.suppress(Exception):
            self.write()
            return True
        return False

    def create(self, make_directory: Callable[[], object]) -> None:
        """Writes it for the first time.

        Args:
            make_directory: called where a clean-up has removed the directory, which was empty, or the temporary file.

        Raises:
            OSError | StoreError: it cannot be written.
        """
        for tries_left in reversed(range(DIRECTORY_TRIES)):
            try:
                self.write()
                return
            except FileNotFoundError:
                if not tries_left:
                    raise
                make_directory()

    def renew(self, seconds: float, *, create: bool = False) -> bool:
        """Starts a thread that writes it again and again after so many seconds; returns whether one was started.

        Args:
            create: the thread writes it at once, and ends where that is not possible.
        """
        return start_unnamed_thread(partial(self._renew, seconds, create))

    def _renew(self, seconds: float, create: bool) -> None:
        if create and not self.try_write():
            self.forget()
            return
        while not self._ended.wait(seconds):
            self.try_write()

    def stop(self) -> None:
        """Writes it no more; what is being written is complete."""
        self._ended.set()
        with self._writing:
            pass

    def forget(self) -> None:
        """Leaves it to another process, or nowhere where it could not be written: `end` does not delete it."""
        self.exists = False
        _kept.discard(self.name)

    def end(self) -> bool:
        """Deletes it; returns whether it is gone."""
        self._ended.set()
        _kept.discard(self.name)
        return self._delete(DELETE_PAUSES)

    def end_late(self, pauses: Iterable[float] = DELETE_PAUSES) -> None:
        """Deletes it in a thread, for which the process waits, with a try behind each of the pauses, in seconds."""
        self._ended.set()
        _kept.discard(self.name)
        delete_late(self._store.url, self.name, partial(self._delete, pauses))

    def _delete(self, pauses: Iterable[float]) -> bool:
        with self._writing:  # a write that is under way would create it again
            exists = self.exists
        for pause in pauses if exists else ():
            if pause:
                time.sleep(pause)
            with contextlib.suppress(Exception):  # what it spoke of is over, and must not fail
                self._store.delete(self.name)
                self.exists = False
                break
        return not self.exists


def is_kept(name: str) -> bool:
    """Whether this process keeps the file of that name."""
    return name in _kept


def replace_file(store: Store, name: str, data: bytes) -> None:
    """Replaces a small file atomically; on a local file system without making it durable."""
    if (directory := store.traits.local_path) is None:
        store.publish(name, data, replace=True)
        return
    temporary = directory / f".{name}.{this_process().tag}{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, directory / name)
    except BaseException:  # a full disk creates the name and refuses the content
        temporary.unlink(missing_ok=True)
        raise


def encode_claim() -> bytes:
    """Returns the content of a lock or lease of this process."""
    return msgspec.json.encode(Claim(this_process(), time.time_ns()))


def read_claim(store: Store, name: str, *, damaged: bool | None) -> tuple[Owner | None, bool | None]:
    """Returns the process that keeps a lock or lease, and whether it may still do so; None for what is not known here.

    Args:
        damaged: whether one that does not decode is kept. One that could not be read this time may be.

    Raises:
        FileNotFoundError: it was deleted since it was listed.
    """
    try:
        claim = decode_json(store.read(name, limit=MAX_CLAIM), Claim)
    except FileNotFoundError:
        raise
    except (msgspec.MsgspecError, TreeckptError, OSError) as error:
        return None, damaged if shows_damage(error) else True
    if claim.owner == this_process():
        return claim.owner, is_kept(name)
    return claim.owner, time.time_ns() - claim.alive_ns < LAPSE * 1e9 and is_running(claim.owner) is not False
