"""The files in a checkpoint's directory: their names, sidecar files, and the record of a save in progress.

    index.json                                   the commit
    shard-<rank>-of-<world>.<save id>.safetensors, timings.<save id>.json, progress-<rank>.<save id>.json
    file.<save id>.<name>                        a sidecar file
    <name>                                       a copy of it, see below
    deleted.<save id>.json, deleted.<save id>.<id>.json
                                                 the save's checkpoint is being deleted; the second one holds the index
                                                 that was taken away
    prepared.<save id>.json                      the index of a node-local save, until its commit is known on this disk
    deleting.<id>.json, repairing.<id>.json      a process is about to take away or replace the index
    damage.<save id>.json                        what a verification found wrong with the save; removed when it is whole
    ended.<save id>.json                         the run ended after this save, see `_runs.run_end`
    shared.<save id>.json                        other checkpoints of the run may name shards of the save
    lease.<id>.json                              a process is reading; renewed until it ends
    pinned.json                                  retention does not delete the checkpoint
    <one of these>.<id>.damaged                  a file that a repair has replaced
    .<one of these>.<id>.tmp                     a file that is being published; the id begins with the process's tag

Files of any other name do not belong to treeckpt.

A sidecar file is a small file, such as a config or a tokenizer, that belongs to a checkpoint. The index lists name,
size and checksum of each. On disk the file `config.json` is `file.<save id>.config.json`: a save that replaces another
has files of its own, and no name of an index points to another file. So a save that is killed leaves the checkpoint
before it whole, and whose a file is, its name says.

Other programs open `config.json`, which is a copy. It is treeckpt's as long as it has the content of a
`file.<save id>.config.json` beside it, and goes with that; a file of other content is its owner's, and is neither
overwritten nor deleted. It is a copy and no link: object stores have none, and a program that writes into the file in
place does not damage the checkpoint. It is not the only file, under a name that the index lists: then a save could not
replace a step without a moment in which one of two checkpoints lacks it, or has that of the other. See
`_io.storage.plain_names`.

A progress record says how much of a save is written, and by which process. A rank keeps it until the save ends. No save
or load depends on a record: it may be missing, old, or left by a save that was killed. Files of a save are removed
early only where its coordinator's record proves that the save is dead; see `_inspect.deletion`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Literal, SupportsIndex, cast

import msgspec
import xxhash

from ...errors import FormatError, TreeError
from .shard_header import MAX_NBYTES, MAX_WORLD, SAVE_ID, parse_shard_name

PIN_NAME = "pinned.json"
LockKind = Literal["deleting", "repairing"]
FileKind = Literal[
    "index",
    "shard",
    "sidecar",
    "timings",
    "progress",
    "deleted",
    "prepared",
    "deleting",
    "repairing",
    "verdict",
    "ended",
    "shared",
    "lease",
    "pin",
    "damaged",
    "temporary",
]

_TIMINGS = re.compile(r"timings\.([0-9a-f]{16})\.json")
_DELETED = re.compile(r"deleted\.([0-9a-f]{16})(?:\.[0-9a-f]{16})?\.json")
_PREPARED = re.compile(r"prepared\.([0-9a-f]{16})\.json")
_OF_PROCESS = re.compile(r"(lease|deleting|repairing)\.[0-9a-f]{16}\.json")
_TEMPORARY = re.compile(r"\.(.+?)(?:\.([0-9a-f]{8})[0-9a-f]{8})?\.tmp")
_DAMAGED = re.compile(r"(.+)\.[0-9a-f]{16}\.damaged")
_VERDICT = re.compile(r"damage\.([0-9a-f]{16})\.json")
_ENDED = re.compile(r"ended\.([0-9a-f]{16})\.json")
_SHARED = re.compile(r"shared\.([0-9a-f]{16})\.json")
_PROCESS_KINDS: dict[str, FileKind] = {"lease": "lease", "deleting": "deleting", "repairing": "repairing"}
MAX_STEP = 10**18 - 1
MAX_STEP_DIGITS = 18
STEP_PATTERN = "step_{step:08d}"
"""The pattern of the names of steps, unless a manager was given another one."""
# without `re.ASCII` digits of any script would do, and two names could be those of one step
_PATTERN = re.compile(r"(|[^{}]*[^{}0-9])\{step(?::0([1-9]|1[0-8])d)?\}(|[^{}0-9][^{}]*)", re.ASCII)
_NUMBER = re.compile(rf"(?<![0-9])[0-9]{{1,{MAX_STEP_DIGITS}}}(?![0-9])")

_STEP_HINT = "Pass the number of training steps that were done"


class CheckpointFile(msgspec.Struct, frozen=True):
    """The kind of a file that treeckpt wrote, and the save that it belongs to."""

    kind: FileKind
    save_id: str | None = None
    """The id of that save; None for files that belong to no save in particular."""


def parse_file_name(name: str) -> CheckpointFile | None:
    """Returns the kind and save of a file, None for a file that treeckpt did not write."""
    if (shard := parse_shard_name(name)) is not None:
        return CheckpointFile("shard", shard[0])
    if (sidecar := parse_stored_name(name)) is not None:
        return CheckpointFile("sidecar", sidecar[0])
    if (match := _TIMINGS.fullmatch(name)) is not None:
        return CheckpointFile("timings", match[1])
    if (match := _DELETED.fullmatch(name)) is not None:
        return CheckpointFile("deleted", match[1])
    if (progress := parse_progress_name(name)) is not None:
        return CheckpointFile("progress", progress[1])
    if (match := _PREPARED.fullmatch(name)) is not None:
        return CheckpointFile("prepared", match[1])
    if (match := _VERDICT.fullmatch(name)) is not None:
        return CheckpointFile("verdict", match[1])
    if (match := _ENDED.fullmatch(name)) is not None:
        return CheckpointFile("ended", match[1])
    if (match := _SHARED.fullmatch(name)) is not None:
        return CheckpointFile("shared", match[1])
    if (match := _TEMPORARY.fullmatch(name)) is not None:
        inner = parse_file_name(match[1])
        return CheckpointFile("temporary", inner.save_id) if inner is not None and inner.kind != "temporary" else None
    if (match := _DAMAGED.fullmatch(name)) is not None:
        inner = parse_file_name(match[1])
        return CheckpointFile("damaged", inner.save_id) if inner is not None and inner.kind != "damaged" else None
    if (match := _OF_PROCESS.fullmatch(name)) is not None:
        return CheckpointFile(_PROCESS_KINDS[match[1]])
    named: dict[str, FileKind] = {"index.json": "index", PIN_NAME: "pin"}
    return CheckpointFile(named[name]) if name in named else None


def final_name(name: str) -> str:
    """Returns the name under which a temporary file will be published; any other name unchanged."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else name


def writer_tag(name: str) -> str:
    """Returns the tag of the process that writes a temporary file; empty where the name has none."""
    match = _TEMPORARY.fullmatch(name)
    return match[2] or "" if match else ""


def deleted_name(save_id: str, taken_id: str = "") -> str:
    """Returns the name of a file that marks a save's checkpoint as being deleted.

    Args:
        taken_id: of the file that holds the index which was taken away; "" once the deletion has decided not to put it
            back.
    """
    return f"deleted.{save_id}.{taken_id}.json" if taken_id else f"deleted.{save_id}.json"


def prepared_name(save_id: str) -> str:
    """Returns the name of the index of a node-local save whose commit another disk decides."""
    return f"prepared.{save_id}.json"


def is_undecided(name: str) -> bool:
    """Returns whether this is the name of an index that was taken away by a deletion that may still put it back."""
    return _DELETED.fullmatch(name) is not None and name.count(".") == 3


def lock_name(kind: LockKind, lock_id: str) -> str:
    """Returns the name of one process's lock on the index."""
    return f"{kind}.{lock_id}.json"


def verdict_name(save_id: str) -> str:
    """Returns the name of the file that says what a verification found wrong with a save."""
    return f"damage.{save_id}.json"


def ended_name(save_id: str) -> str:
    """Returns the name of the file that says that the run has ended after a save."""
    return f"ended.{save_id}.json"


def shared_mark_name(save_id: str) -> str:
    """Returns the name of the file that says that other checkpoints may name shards of a save."""
    return f"shared.{save_id}.json"


def damaged_name(name: str, repair_id: str) -> str:
    """Returns the name under which a repair keeps a file that it has replaced."""
    return f"{name}.{repair_id}.damaged"


def lease_name(lease_id: str) -> str:
    """Returns the name of one reader's lease."""
    return f"lease.{lease_id}.json"


def check_step(step: object) -> int:
    """Converts a step of any integer type to int.

    Raises:
        TreeError: it is no integer, negative, or has more digits than the name of a directory holds.
    """
    try:
        # bools of every library have `__index__`, but are no steps
        is_bool = isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool")
        number = None if is_bool else operator.index(cast(SupportsIndex, step))
    except TypeError:
        number = None
    if number is None:
        found = text if len(text := repr(step)) <= 60 else type(step).__qualname__
        raise TreeError("step", expected="an integer", found=found, hint=_STEP_HINT)
    if not 0 <= number <= MAX_STEP:
        expected = "a step, 0 or more" if number < 0 else f"a step, at most {MAX_STEP}"
        found = f"{number}" if abs(number) < 10**24 else "a number of more than 24 digits"
        raise TreeError("step", expected=expected, found=found, hint=_STEP_HINT)
    return number


CheckpointId = int | str
"""What a manager calls a checkpoint of its run: its step, or a text, which then is the name of its directory."""


def check_id(given: object) -> CheckpointId:
    """Returns the id of a checkpoint: a step of any integer type as int, or a text.

    Raises:
        TreeError: it is no step, or a text that cannot be the name of a checkpoint's directory.
    """
    if not isinstance(given, str):
        return check_step(given)
    if is_number_text(given):
        hint = f"{_STEP_HINT}, and not as text"
        raise TreeError("step", expected="an integer, or a name that is no number", found=f"{given!r:.80}", hint=hint)
    if not is_sidecar_name(given) or parse_file_name(given) is not None:
        raise TreeError("step", expected=f"an integer, or {NAME_RULE}", found=f"{given!r:.80}", hint=_STEP_HINT)
    return given


def is_number_text(text: str) -> bool:
    """Returns whether a text may be meant as a step: a number of any kind, or the name of a step."""
    try:
        float(text)
    except ValueError:
        return step_of(text) is not None
    return True


def id_name(step: CheckpointId, pattern: str = STEP_PATTERN) -> str:
    """Returns the name that a manager gives to the directory of a checkpoint in a run.

    Args:
        pattern: by which it names steps.
    """
    return step if isinstance(step, str) else step_name(step, pattern)


def id_text(step: CheckpointId) -> str:
    """Returns the id of a checkpoint for messages."""
    return step if isinstance(step, str) else f"step {step}"


def id_order(step: CheckpointId) -> tuple[int, str]:
    """Returns a sort key: texts first, by themselves, then steps."""
    return (-1, step) if isinstance(step, str) else (step, "")


def is_step_name(name: str) -> bool:
    """Returns whether the name of a directory is that of a step, with as many digits as it may have."""
    return step_of(name) is not None


def step_name(step: int, pattern: str = STEP_PATTERN) -> str:
    """Returns the name that a manager gives to a step's directory in a run."""
    return pattern.format(step=step)


def step_of(name: str, patterns: Iterable[str] = ()) -> int | None:
    """Parses the step from the name of a directory, None if it has none.

    Args:
        patterns: of names of steps beside `STEP_PATTERN`; the step may have fewer or more digits than they say.
    """
    return next(
        (step for pattern in (STEP_PATTERN, *patterns) if (step := _parse_step(name, pattern)) is not None), None
    )


def _parse_step(name: str, pattern: str) -> int | None:
    if (match := _PATTERN.fullmatch(pattern)) is None:
        return None
    before, after = match[1], match[3]
    digits = name[len(before) : len(name) - len(after)]
    fits = name.startswith(before) and name.endswith(after) and digits.isascii() and digits.isdigit()
    return int(digits) if fits and len(digits) <= MAX_STEP_DIGITS else None


def is_pattern(text: str) -> bool:
    """Returns whether steps may be named by this pattern: `{step}` is in it once, beside no digit."""
    if _PATTERN.fullmatch(text) is None:
        return False
    names = [step_name(10**digits - 1, text) for digits in range(1, MAX_STEP_DIGITS + 1)]
    return all(is_sidecar_name(name) and parse_file_name(name) is None for name in names)


def check_pattern(given: object) -> str:
    """Returns the pattern by which a manager names steps.

    Raises:
        TreeError: it is none.
    """
    if not isinstance(given, str) or not is_pattern(given):
        expected = "{step} or {step:08d} once, beside no digit, with which it is " + NAME_RULE
        raise TreeError("name", expected=expected, found=f"{given!r:.80}", hint='As name="checkpoint-{step}"')
    return given


def numbers_in(name: str) -> list[int]:
    """Returns the numbers in a name that may be a step."""
    return [int(digits) for digits in _NUMBER.findall(name)]


MAX_SIDECARS = 1000
MAX_SIDECAR_NBYTES = 64 << 20
"""Bytes of one sidecar file, at most."""
MAX_SIDECARS_NBYTES = 256 << 20
"""Bytes of all sidecar files of a save, at most, which are in memory until they are written."""
MAX_SIDECAR_NAME = 128
NAME_RULE = f"a plain name: up to {MAX_SIDECAR_NAME} of A-Z a-z 0-9 . _ + = @ -, not beginning with one of . + = @ -"

_SIDECAR_NAME = re.compile(rf"\w[\w.+=@-]{{0,{MAX_SIDECAR_NAME - 1}}}", re.ASCII)
_STORED = re.compile(r"file\.([0-9a-f]{16})\.(.+)")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


class Sidecar(msgspec.Struct, frozen=True):
    """A sidecar file, as the index lists it."""

    name: str
    nbytes: int
    xxh3: str
    """The xxh3-64 of the content, as 16 hexadecimal digits."""


def is_sidecar_name(name: str) -> bool:
    """Returns whether a sidecar file can have this name; `is_own_name` says whether a file of treeckpt has it."""
    return _SIDECAR_NAME.fullmatch(name) is not None


def is_own_name(name: str) -> bool:
    """Returns whether a file of treeckpt may have this name, on some file systems in another case."""
    return parse_file_name(name.lower()) is not None


def stored_name(save_id: str, name: str) -> str:
    """Returns the name of a sidecar file in its checkpoint's directory."""
    return f"file.{save_id}.{name}"


def parse_stored_name(name: str) -> tuple[str, str] | None:
    """Returns the save id and name of a sidecar file from its name on disk; None for any other file."""
    match = _STORED.fullmatch(name)
    sound = match is not None and is_sidecar_name(match[2]) and not is_own_name(match[2])
    return (match[1], match[2]) if match is not None and sound else None


def checksum(data: bytes | bytearray) -> str:
    """Returns the checksum of a content, as the index holds it."""
    return xxhash.xxh3_64_hexdigest(data)


def are_sound(sidecars: tuple[Sidecar, ...]) -> bool:
    """Returns whether a save can have written this list."""
    each = all(
        is_sidecar_name(sidecar.name)
        and not is_own_name(sidecar.name)
        and 0 <= sidecar.nbytes <= MAX_SIDECAR_NBYTES
        and _CHECKSUM.fullmatch(sidecar.xxh3)
        for sidecar in sidecars
    )
    return len(sidecars) <= MAX_SIDECARS and each and not alike_names([sidecar.name for sidecar in sidecars])


def alike_names(names: Iterable[str]) -> list[str]:
    """Returns the names that differ from an earlier one at most in case: some file systems do not tell them apart."""
    seen: set[str] = set()
    alike: list[str] = []
    for name in names:
        if name.lower() in seen:
            alike.append(name)
        seen.add(name.lower())
    return alike


SavePhase = Literal["write", "commit"]
MAX_RECORDED_STEP = (1 << 63) - 1
MAX_PROGRESS = 4096
"""Bytes of a progress record, at most."""
_PROGRESS_NAME = re.compile(r"progress-([0-9]{5,9})\.([0-9a-f]{16})\.json")


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
    """`write`: shards are being written; `commit`: this rank's shards are durable, and it waits for the others."""
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
    match = _PROGRESS_NAME.fullmatch(name)
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
        progress = _PROGRESS.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(name, expected="a record of progress", found=f"{error}"[:200]) from error
    known = SAVE_ID.fullmatch(progress.save_id) is not None and 0 <= progress.rank < progress.world <= MAX_WORLD
    numbers = (progress.written, progress.planned, progress.started_ns, progress.updated_ns, progress.alive_ns)
    bounded = min(numbers) > -MAX_NBYTES and max(numbers) < MAX_NBYTES and abs(progress.step or 0) <= MAX_RECORDED_STEP
    if not known or min(progress.written, progress.planned) < 0 or not bounded:
        raise FormatError(name, expected="a rank's progress in a save", found=f"{progress!r:.200}")
    return progress
