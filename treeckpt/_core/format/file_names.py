"""Builds and parses the names of the files in a checkpoint's directory.

    index.json                                   the commit
    shard-<rank>-of-<world>.<save id>.safetensors, timings.<save id>.json, progress-<rank>.<save id>.json
    file.<save id>.<name>                        a sidecar file, see `_core.format.sidecars`
    deleted.<save id>.json, deleted.<save id>.<id>.json
                                                 the save's checkpoint is being deleted; the second one holds the index
                                                 that was taken away
    deleting.<id>.json, repairing.<id>.json      a process is about to take away or replace the index
    damage.<save id>.json                        what a verification found wrong with the save; removed when it is whole
    lease.<id>.json                              a process is reading; renewed until it ends
    pinned.json                                  retention does not delete the checkpoint
    <one of these>.<id>.damaged                  a file that a repair has replaced
    .<one of these>.<id>.tmp                     a file that is being published; the id begins with the process's tag

Files of any other name do not belong to treeckpt.
"""

from __future__ import annotations

import operator
import re
from typing import Literal, SupportsIndex, cast

import msgspec

from ...errors import TreeError
from .save_progress import parse_progress_name
from .shard_header import parse_shard_name
from .sidecars import parse_stored_name

PIN_NAME = "pinned.json"
LockKind = Literal["deleting", "repairing"]
FileKind = Literal[
    "index",
    "shard",
    "sidecar",
    "timings",
    "progress",
    "deleted",
    "deleting",
    "repairing",
    "verdict",
    "lease",
    "pin",
    "damaged",
    "temporary",
]

_TIMINGS = re.compile(r"timings\.([0-9a-f]{16})\.json")
_DELETED = re.compile(r"deleted\.([0-9a-f]{16})(?:\.[0-9a-f]{16})?\.json")
_OF_PROCESS = re.compile(r"(lease|deleting|repairing)\.[0-9a-f]{16}\.json")
_TEMPORARY = re.compile(r"\.(.+?)(?:\.([0-9a-f]{8})[0-9a-f]{8})?\.tmp")
_DAMAGED = re.compile(r"(.+)\.[0-9a-f]{16}\.damaged")
_VERDICT = re.compile(r"damage\.([0-9a-f]{16})\.json")
_PROCESS_KINDS: dict[str, FileKind] = {"lease": "lease", "deleting": "deleting", "repairing": "repairing"}
_STEP = re.compile(r"step_(\d{1,18})", re.ASCII)
MAX_STEP = 10**18 - 1


_STEP_HINT = "Pass the number of training steps that were done"


class CheckpointFile(msgspec.Struct, frozen=True):
    """The kind of a file that treeckpt wrote, and the save that it belongs to."""

    kind: FileKind
    save_id: str | None = None
    """None for files that belong to no save in particular."""


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
    if (match := _VERDICT.fullmatch(name)) is not None:
        return CheckpointFile("verdict", match[1])
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


def is_undecided(name: str) -> bool:
    """Returns whether this is the name of an index that was taken away by a deletion that may still put it back."""
    return _DELETED.fullmatch(name) is not None and name.count(".") == 3


def lock_name(kind: LockKind, lock_id: str) -> str:
    """Returns the name of one process's lock on the index."""
    return f"{kind}.{lock_id}.json"


def verdict_name(save_id: str) -> str:
    """Returns the name of the file that says what a verification found wrong with a save."""
    return f"damage.{save_id}.json"


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


def is_step_name(name: str) -> bool:
    """Returns whether a manager gives a directory this name."""
    step = step_of(name)
    return step is not None and step_name(step) == name


def step_name(step: int) -> str:
    """Returns the name of a step's directory in a run."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Parses the step from the name of a directory, None if it has none."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None
