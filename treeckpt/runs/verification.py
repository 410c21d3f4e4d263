"""Keeps what verifications of checkpoints found, in the user's cache directory.

There is one small file for each save and place. That all bytes match is believed for as long as the names, sizes and
modification times of the save's files are the same; damage, until another verification of that save has compared every
byte and found none. Both the command `verify` and the dashboard write and read these files; without them nothing is
lost but the time of another verification.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from ..core.format.file_names import parse_file_name
from ..core.format.index import INDEX_NAME
from ..core.format.records import Index
from ..io.storage.checkpoint import Checkpoint
from ..io.storage.run_store import DirectoryEntry, Folder
from ..io.storage.store import Store
from ..loading.consistent_reads import on_one_version
from ..loading.leaf_moments import LeafMoments
from ..loading.verify import verify_checkpoint
from ..reports import Problem, VerifyReport
from .column_files import key_of_parts, place_of
from .statistics_store import StatisticsStore

MAX_PROBLEMS = 100
"""Problems that are kept of one verification."""
MAX_TEXT = 1000
"""Characters that are kept of the text of a problem."""
TICK_NS = 50_000_000
"""Nanoseconds within which two changes of a directory may have the same modification time."""
MAX_RECORD = 1 << 20
"""Bytes of a file beyond which it is not read."""

OnShard = Callable[[Sequence[Problem]], object]
"""Takes the problems of a shard, after it was compared."""


class DamagedPart(msgspec.Struct, frozen=True):
    """A problem that a verification found."""

    file: str
    text: str


class VerificationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a verification found, as it is kept and as the dashboard shows it."""

    complete: bool
    """Whether every byte was compared; False if it was cancelled, or compared a part only."""
    by: str
    """The program, user and host that did it."""
    files: int
    nbytes: int
    """Bytes of array data whose checksums match."""
    seconds: float
    total: int
    """How many problems it found."""
    problems: list[DamagedPart]
    """The first of them."""
    changed: bool = False
    """Whether the files were written since. Never stored."""


class Verification(VerificationResult, frozen=True, kw_only=True):
    """What is kept of a verification."""

    save_id: str
    ended_ns: int
    """Unix time of its end."""
    fingerprint: str
    """Of the names, sizes and modification times of the save's files before the first byte was read."""

    @property
    def ok(self) -> bool:
        """Whether every byte was compared, and is intact."""
        return self.complete and not self.total


def cache_directory() -> Path:
    """Returns $TREECKPT_CACHE if it is set, else the platform's cache directory."""
    if given := os.environ.get("TREECKPT_CACHE"):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "treeckpt" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "treeckpt"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treeckpt"


def user_name() -> str:
    """Returns the name of the user of this process; the number of one without a name, as is usual in containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # the last one on Windows
        return f"{os.getuid()}" if hasattr(os, "getuid") else "unknown"


def this_user(program: str) -> str:
    """Returns the `by` of a verification by this process."""
    return f"{user_name()}@{socket.gethostname()}, {program}"


def fingerprint_of(entries: Mapping[str, DirectoryEntry], save_id: str) -> str:
    """Returns a hash of the names, sizes and modification times of the index, shards and sidecar files of a save."""
    text: list[str] = []
    for name, entry in sorted(entries.items()):
        kind = parse_file_name(name)
        if name == INDEX_NAME or (kind and kind.kind in ("shard", "sidecar") and kind.save_id == save_id):
            text.append(f"{name}\0{entry.nbytes}\0{entry.modified_ns}\0{entry.number}")
    return hashlib.blake2s("\n".join(text).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def verify_folder(
    folder: Folder,
    store: Store,
    by: str,
    *,
    on_shard: OnShard | None = None,
    statistics: StatisticsStore | None = None,
) -> tuple[VerifyReport, Verification]:
    """Verifies a checkpoint; see `treeckpt.verify`.

    Args:
        store: reads the files of the folder.
        by: as in `Verification`.
        statistics: where the statistics of all arrays are kept, computed from the same bytes; only if all are intact.

    Raises:
        CheckpointNotFound, CorruptError, FormatError: there is no index that can be read.
    """
    entries = folder.listed().entries()

    def verify(one: Checkpoint) -> tuple[VerifyReport, Index, LeafMoments | None]:
        moments = LeafMoments(one.index) if statistics is not None else None
        return verify_checkpoint(one, on_shard=on_shard, moments=moments), one.index, moments

    report, index, moments = on_one_version(store, verify, is_suspect=lambda found: found[0].problems)
    found = verification_of(report, index.save_id, fingerprint_of(entries, index.save_id), by)
    if statistics is not None and moments is not None and found.ok:
        statistics.record(folder.url, index, found.fingerprint, found.ended_ns, moments.found())
    return report, found


def verification_of(
    report: VerifyReport, save_id: str, fingerprint: str, by: str, *, complete: bool = True
) -> Verification:
    """Returns what is kept of a report that ends now."""
    return Verification(
        save_id=save_id,
        complete=complete,
        ended_ns=time.time_ns(),
        by=by,
        files=report.files,
        nbytes=report.nbytes,
        seconds=report.seconds,
        total=len(report.problems),
        problems=[DamagedPart(one.file, one.text[:MAX_TEXT]) for one in report.problems[:MAX_PROBLEMS]],
        fingerprint=fingerprint,
    )


_DECODER = msgspec.json.Decoder(Verification)


class VerificationStore:
    """The verifications that are kept below a cache directory."""

    def __init__(self, cache: Path) -> None:
        self.directory = cache / "verified-1"
        self._lock = threading.RLock()
        self._listed = (-1, 0)
        """Modification time of the directory when it was listed, and when that was."""
        self._names: set[str] = set()
        self._read: dict[str, Verification | None] = {}

    def find(self, folder: Folder, save_id: str | None) -> Verification | None:
        """Returns what is known of a save's bytes in a folder; None if that is nothing, or no longer holds."""
        found = self._find(_name(folder.url, save_id)) if save_id is not None else None
        if save_id is None or found is None or found.save_id != save_id:
            return None
        changed = fingerprint_of(folder.entries(), save_id) != found.fingerprint
        return None if changed and not found.total else msgspec.structs.replace(found, changed=changed)

    @property
    def version(self) -> int:
        """A number that changes whenever a verification is kept; -1 before the first."""
        try:
            return self.directory.stat().st_mtime_ns
        except OSError:
            return -1

    def _find(self, name: str) -> Verification | None:
        if (modified_ns := self.version) < 0:
            return None
        with self._lock:
            # one listing answers for all saves that were never verified; a change soon after it may have the same time
            known_ns, at_ns = self._listed
            if modified_ns != known_ns or at_ns - known_ns < TICK_NS:
                self._listed = modified_ns, time.time_ns()
                self._names, self._read = {path.name for path in self.directory.iterdir()}, {}
            if name not in self._names:
                return None
            if name not in self._read:
                self._read[name] = self._decode(name)
            return self._read[name]

    def _decode(self, name: str) -> Verification | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError), (self.directory / name).open("rb") as file:
            return _DECODER.decode(file.read(MAX_RECORD))
        return None

    def record(self, folder: Folder, verification: Verification) -> bool:
        """Keeps a verification; returns whether it could be written.

        One that was incomplete replaces no known damage of the same files, and is kept only for what it found.
        """
        name = _name(folder.url, verification.save_id)
        before = self._find(name)
        known = before is not None and before.complete and before.total
        if not verification.complete and (not verification.total or known):
            return True
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self.directory, delete=False) as file:
                file.write(msgspec.json.encode(verification))
            Path(file.name).replace(self.directory / name)
        except OSError:
            return False
        return True


def _name(url: str, save_id: str) -> str:
    return f"{key_of_parts(place_of(url), save_id)}.json"
