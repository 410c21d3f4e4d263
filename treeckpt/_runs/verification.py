"""Keeps what verifications of checkpoints found: damage beside the checkpoint, and all in the user's cache directory.

Damage is for all who use the checkpoint, on any host: a clean-up that does not know of it deletes the good one before.
It is written to `damage.<save id>.json` in the checkpoint's directory, whose presence alone says it, and holds until
another verification has compared every byte of that save and found none. In the cache there is one small file for each
save and place. That all bytes match stands there alone, and is believed for as long as the names, sizes and
modification times of the save's files are the same; damage stands there too, and counts where it could not be written
beside the checkpoint. What could not be read is no verdict, and is not kept. The dashboard only reads checkpoints, so
what it finds is in the cache alone.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from .._core.format.files import checksum, parse_file_name, verdict_name
from .._core.format.index import INDEX_NAME, MAX_INDEX
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.store import DirectoryEntry, Store
from .._loading.run_load import on_one_version
from .._loading.verify import LeafMoments, verify_checkpoint
from ..errors import TreeckptError, visible
from ..reports import Problem, VerifyReport
from .statistics_store import StatisticsStore, cache_key, replace_file

MAX_PROBLEMS = 10_000
"""Problems that are kept of one verification; `treeckpt verify --json` prints all."""
MAX_TEXT = 1000
"""Characters that are kept of the text of a problem."""
MAX_TEXTS = 1_500_000
"""Characters that are kept of the texts of all problems of a verification: so its file is smaller than MAX_RECORD."""
TICK_NS = 50_000_000
"""Nanoseconds within which two changes of a directory may have the same modification time."""
MAX_RECORD = 16 << 20
"""Bytes of a file beyond which it is not read."""
NO_CACHE = "this user has no home directory; name one for it in TREECKPT_CACHE"

OnShard = Callable[[Sequence[Problem]], object]
"""Takes the problems of a shard, after it was compared."""


class DamagedPart(msgspec.Struct, frozen=True):
    """A problem that a verification found."""

    file: str
    text: str
    start: int = 0
    """Where the damaged bytes start in the file."""
    stop: int = 0
    """Where they end; 0 if it is not known which they are."""


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
    """The first of the problems."""
    unread: list[DamagedPart] = []
    """The first parts that could not be read. Without problems a verification that has some is not kept."""
    nan: int | None = None
    """How many elements of arrays are NaN; None where they were not counted. Infinities count as healthy: masks have
    them."""
    nan_in: str = ""
    """The path of the first array with NaN."""
    infinite: int | None = None
    """How many elements of arrays are infinite; None where they were not counted."""
    beside: bool = False
    """Whether it stands beside the checkpoint, where all who use it see it; it holds for as long as it stands there."""
    changed: bool = False
    """Whether the files were written since. Never stored."""


class Verification(VerificationResult, frozen=True, kw_only=True):
    """What is kept of a verification."""

    save_id: str
    ended_ns: int
    """The Unix time at which it ended."""
    fingerprint: str
    """A hash of the names, sizes and modification times of the save's files before the first byte was read."""
    index_xxh3: str = ""
    """Checksum of the index; empty where it is not known."""

    @property
    def ok(self) -> bool:
        """Whether every byte was compared, and is intact."""
        return self.complete and not self.total


def cache_directory() -> Path | None:
    """Returns $TREECKPT_CACHE if it is set, else the platform's cache directory; None for a user without a home."""
    if given := os.environ.get("TREECKPT_CACHE"):
        return Path(given)
    try:
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "treeckpt" / "cache"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "treeckpt"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treeckpt"
    except RuntimeError:  # neither HOME nor an entry of the user, as of a container with a user of its own
        return None


def user_name() -> str:
    """Returns the name of the user of this process; the number of one without a name, as is usual in containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # the last one on Windows
        return f"{os.getuid()}" if hasattr(os, "getuid") else "unknown"


def this_user(program: str) -> str:
    """Returns the `by` of a verification by this process."""
    return f"{user_name()}@{socket.gethostname()}, {program}"


def _files_of(entries: Mapping[str, DirectoryEntry], save_id: str) -> Iterator[tuple[str, DirectoryEntry]]:
    """Yields the index, shards and sidecar files of a save, by name."""
    for name, entry in sorted(entries.items()):
        kind = parse_file_name(name)
        if name == INDEX_NAME or (kind and kind.kind in ("shard", "sidecar") and kind.save_id == save_id):
            yield name, entry


def fingerprint_of(entries: Mapping[str, DirectoryEntry], save_id: str) -> str:
    """Returns a hash of the names, sizes and modification times of the index, shards and sidecar files of a save."""
    text = [f"{name}\0{e.nbytes}\0{e.modified_ns}\0{e.number}" for name, e in _files_of(entries, save_id)]
    return hashlib.blake2s("\n".join(text).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def verify_folder(
    folder: Store,
    by: str,
    *,
    on_shard: OnShard | None = None,
    statistics: StatisticsStore | None = None,
) -> tuple[VerifyReport, Verification]:
    """Verifies a checkpoint; see `treeckpt.verify`.

    Args:
        by: as in `Verification`.
        statistics: where the statistics of all arrays are kept, computed from the same bytes; only if all are intact.

    Raises:
        The errors of `treeckpt.verify`.
    """
    entries = folder.listed().entries()

    def verify(one: Checkpoint) -> tuple[VerifyReport, Checkpoint, LeafMoments | None]:
        moments = LeafMoments(one.index) if statistics is not None else None
        return verify_checkpoint(one, on_shard=on_shard, moments=moments), one, moments

    report, checkpoint, moments = on_one_version(
        folder, verify, is_suspect=lambda result: result[0].problems, joined=False
    )
    index = checkpoint.index
    fingerprint = fingerprint_of(entries, index.save_id)
    verification = verification_of(report, index.save_id, fingerprint, by, index=checkpoint.index_bytes)
    if statistics is not None and moments is not None and verification.ok:
        found = moments.found()
        statistics.record(folder.place, index, verification.fingerprint, verification.ended_ns, found)
        first = next((leaf for leaf, numbers in sorted(found.items()) if numbers.nan), None)
        verification = msgspec.structs.replace(
            verification,
            nan=sum(numbers.nan for numbers in found.values()),
            nan_in="" if first is None else index.entries[first].path,
            infinite=sum(numbers.infinite for numbers in found.values()),
        )
    return report, verification


def verification_of(report: VerifyReport, save_id: str, fingerprint: str, by: str, *, index: bytes) -> Verification:
    """Returns what is kept of a report that ends now; `index` is the content of the index file."""
    return Verification(
        save_id=save_id,
        complete=not report.unread and not report.elsewhere,
        ended_ns=time.time_ns(),
        by=by,
        files=report.files,
        nbytes=report.nbytes,
        seconds=report.seconds,
        total=len(report.problems),
        problems=shown_parts(report.problems),
        unread=shown_parts(report.unread),
        fingerprint=fingerprint,
        index_xxh3=checksum(index),
    )


def found_part(save_id: str, fingerprint: str, problems: list[DamagedPart], *, by: str) -> Verification:
    """Returns what is kept of problems that were found though not every byte was compared."""
    return Verification(
        save_id=save_id,
        complete=False,
        ended_ns=time.time_ns(),
        by=by,
        files=0,
        nbytes=0,
        seconds=0.0,
        total=len(problems),
        problems=problems,
        fingerprint=fingerprint,
    )


def shown_parts(problems: Sequence[Problem]) -> list[DamagedPart]:
    """Returns what is kept of problems."""
    kept = problems[:MAX_PROBLEMS]
    most = min(MAX_TEXT, MAX_TEXTS // max(1, len(kept)))
    return [DamagedPart(one.file, one.text[:most], one.start or 0, one.stop or 0) for one in kept]


_DECODER = msgspec.json.Decoder(Verification)


class VerificationStore:
    """The verifications that are kept below a cache directory; one that cannot be read counts as empty.

    Args:
        cache: None for a user without one.
    """

    def __init__(self, cache: Path | None) -> None:
        self.directory = cache / "verified-1" if cache is not None else None
        self._lock = threading.RLock()
        self._listed = (-1, 0)
        """Modification time of the directory when it was listed, and when that was."""
        self._names: set[str] = set()
        self._read: dict[str, Verification | None] = {}

    def find(self, folder: Store, save_id: str | None, *, beside: bool) -> Verification | None:
        """Returns what is known of a save's bytes in a folder; None if that is nothing, or no longer holds.

        Args:
            beside: whether the folder has a file that says that the save is damaged: only then is it read. It counts,
                unless this user's cache has a later verification that found all intact, and could not remove it.
        """
        cached = self._find(_file_name(folder, save_id)) if save_id is not None else None
        if save_id is None or cached is None or cached.save_id != save_id or (cached.beside and not beside):
            cached = None
        if beside and save_id is not None:
            verdict = _read_beside(folder, save_id)
            if verdict is not None and (cached is None or cached.total or cached.ended_ns < verdict.ended_ns):
                return verdict
        if save_id is None or cached is None:
            return None
        changed = fingerprint_of(folder.entries(), save_id) != cached.fingerprint
        return None if changed and not cached.total else msgspec.structs.replace(cached, changed=changed)

    @property
    def version(self) -> int:
        """A number that changes whenever a verification is kept; -1 before the first."""
        try:
            return self.directory.stat().st_mtime_ns if self.directory is not None else -1
        except OSError:
            return -1

    def _find(self, name: str) -> Verification | None:
        if self.directory is None or (modified_ns := self.version) < 0:
            return None
        with self._lock:
            # one listing answers for all saves that were never verified; a change soon after it may have the same time
            known_ns, at_ns = self._listed
            if modified_ns != known_ns or at_ns - known_ns < TICK_NS:
                self._listed, self._names, self._read = (modified_ns, time.time_ns()), set(), {}
                with contextlib.suppress(OSError):
                    self._names = {path.name for path in self.directory.iterdir()}
            if name not in self._names:
                return None
            if name not in self._read:
                self._read[name] = _decode(self.directory / name)
            return self._read[name]

    def record(self, folder: Store, verification: Verification, *, beside: bool) -> list[str]:
        """Keeps a verification; returns what could not be kept, and why.

        One that was incomplete replaces no known damage of the same files, and is kept only for what it found.

        Args:
            beside: writes damage beside the checkpoint too; removes it there where every byte was found intact.
        """
        if not verification.complete and not verification.total:
            return []
        save_id, failed = verification.save_id, list[str]()
        entries, before = dict[str, DirectoryEntry](), None
        try:
            entries = folder.listed().entries()
            before = self.find(folder, save_id, beside=verdict_name(save_id) in entries)
        except (TreeckptError, OSError) as error:
            failed.append(f"whether it is known to be damaged was not read: {error}")
        there = verdict_name(save_id) in entries
        if not verification.complete and before is not None and before.complete and before.total:
            return []
        if beside and INDEX_NAME in entries and (there or verification.total):
            failed += (why := _keep_beside(folder, verification))
            verification = msgspec.structs.replace(verification, beside=bool(verification.total) and not why)
        elif there and not verification.total:
            failed.append(f"{verdict_name(save_id)} still says that it is damaged: treeckpt verify removes that")
        if self.directory is None:
            failed.append(f"the result could not be written to the cache: {NO_CACHE}")
            return failed
        try:
            replace_file(self.directory / _file_name(folder, save_id), [msgspec.json.encode(verification)])
        except OSError as error:
            failed.append(f"the result could not be written to the cache: {error}")
        return failed


def _decode(path: Path) -> Verification | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
        return _DECODER.decode(file.read(MAX_RECORD))
    return None


def _keep_beside(folder: Store, verification: Verification) -> list[str]:
    """Writes or removes the file beside a checkpoint that says that it is damaged; returns why that failed."""
    name = verdict_name(verification.save_id)
    try:
        if verification.total:
            data = msgspec.json.encode(msgspec.structs.replace(verification, beside=True))
            folder.publish(name, data, replace=True)
        else:
            folder.delete(name)
            folder.sync()
    except (OSError, TreeckptError) as error:
        if verification.total:
            left = "only the cache of this user has that it is damaged: clean-ups of others may keep it for a good one"
        else:
            left = "it still says that the checkpoint is damaged, which no longer holds"
        return [f"{name} could not be {'written' if verification.total else 'removed'}, so {left}: {error}"]
    return []


def _read_beside(folder: Store, save_id: str) -> Verification | None:
    """Reads the file beside a checkpoint that says that it is damaged; None if it was removed meanwhile.

    Its name says that: where it could not be read, or was changed, that stands in the place of the problems.
    """
    name = verdict_name(save_id)
    try:
        found = _DECODER.decode(folder.read(name, limit=MAX_RECORD))
    except FileNotFoundError:
        return None
    except (OSError, TreeckptError, msgspec.MsgspecError) as error:
        text = f"it says that a verification found damage; more is not known, as it could not be read: {error}"
        found = found_part(save_id, "", [DamagedPart(name, text)], by="")
    return msgspec.structs.replace(
        found,
        save_id=save_id,
        by=visible(found.by[:MAX_TEXT]),
        total=max(found.total, 1),
        problems=[
            DamagedPart(visible(p.file), visible(p.text[:MAX_TEXT]), p.start, p.stop)
            for p in found.problems[:MAX_PROBLEMS]
        ],
        unread=[],
        beside=True,
        changed=_is_written_since(folder, name, found),
    )


def _is_written_since(folder: Store, name: str, verdict: Verification) -> bool:
    """Whether a file of a save is newer than the verdict beside it, or the index is another one."""
    entries = folder.entries()
    since = entries[name].modified_ns if name in entries else 0
    if any(entry.modified_ns > since for _, entry in _files_of(entries, verdict.save_id)):
        return True
    with contextlib.suppress(OSError, TreeckptError):
        return verdict.index_xxh3 not in ("", checksum(folder.read(INDEX_NAME, limit=MAX_INDEX)))
    return False


def _file_name(folder: Store, save_id: str) -> str:
    return f"{cache_key((folder.place, save_id))}.json"
