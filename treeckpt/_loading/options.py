"""The groups of options that all loads take: how bytes are read, and what happens where a checkpoint does not fit.

At the end stand the keyword arguments of loads, for functions that pass them on.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

import msgspec

from .._core.tree.leaf_differences import Strict
from .._core.tree.paths import Selection, globs_of
from .._io.public_calls import check_group
from ..errors import MismatchError
from ..reports import LoadReport
from ..rules import Renaming, Transforms, as_rules

Verify = bool | Literal["first", "stream"]
Merge = Callable[[list[Any], int, int], Any]
"""merge(states of all old ranks, rank, world) -> state of this rank."""
Policy = Literal["error", "take"] | Merge
Device = str | Callable[[str], str] | None
"""Where new tensors go: a device, "original" for where each was, or a function of that; None is the host."""
Policies = Policy | Mapping[str, Policy] | None
"""One policy for all parts, or one each by name; None, or no entry, where nothing is said."""
PARTS = ("rng", "loader", "buffers", "extra")
"""The parts of a training state that may have state of each rank's own."""
_VALUES_OF_READ: dict[str, tuple[Any, ...]] = {
    "verify": (True, False, "first", "stream"),
    "once": (None, True, False),
    "mmap": (True, False),
    "copy": (True, False),
    "follow_links": (True, False),
}
IN_PLACE = {
    "mmap": "Arrays are filled in place: load returns new ones, which can be maps of files",
    "copy": "Arrays are filled in place, in memory of their own: leave it out",
}
"""What a call cannot do that fills arrays in place, with what helps."""
NO_SALVAGE = {
    "on_corrupt": "A training state with holes cannot be continued: Manager.resume takes the checkpoint before, and "
    "load salvages"
}
"""What a restore of a training state cannot do, with what helps."""
_PER_RANK_OF_LOAD = "training.restore and Manager.resume take functions, and a policy for each part"


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a load reads bytes: `read=` of `load`, `load_into`, `training.restore`, `Manager.resume` and others.

    One object serves all of them. A call that cannot do what a field asks for refuses it.

    >>> careful = tc.ReadOptions(verify="first", memory=256 << 20)
    >>> tc.load_into("run/step_00000100", {"model": model, "step": 0}, read=careful).loaded
    3

    Args:
        verify: compares checksums of all that is read; "first" compares all of them before the first byte is put into
            an array in place, which reads twice.
        memory: bytes of buffers, at least 1 MiB; None is 64 MiB, 512 MiB from object stores and network file systems.
        once: what several ranks of a host want is read by one and handed on, and every rank has to call. What lies on
            the private disk of another host is read by a rank there. None has each rank read for itself, but for
            `Manager.restore` and `resume` from an object store, or the disks of several hosts, where the ranks are
            all those of torch.distributed.
        mmap: maps whole arrays, in C order: bytes come when touched, without checksums, from a file that has to stay.
        copy: gives each array memory of its own, where whole ones are views of what a range of a file was read into.
        follow_links: reads links out of a local checkpoint, too.

    Raises:
        MismatchError: a field has another value.
    """

    verify: Verify = True
    memory: int | None = None
    once: bool | None = None
    mmap: bool = False
    copy: bool = False
    follow_links: bool = False

    def __post_init__(self) -> None:
        for name, known in _VALUES_OF_READ.items():
            _check_value(name, getattr(self, name), known)
        memory: Any = self.memory
        if memory is not None and (isinstance(memory, bool) or not hasattr(memory, "__index__") or memory < 1):
            hint = "Give an integer of 1 MiB or more, as 256 << 20 for 256 MiB"
            raise MismatchError("memory", expected="a number of bytes, or None", found=f"{memory!r:.60}", hint=hint)


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """What a load does with damage, and with state of each rank's own that another number of ranks has saved.

    It is `fallback=` of the calls that take `ReadOptions`.

    >>> tc.load("run/step_00000100", fallback=tc.Fallback(on_corrupt="skip"))["step"]
    100

    Args:
        on_corrupt: "error" refuses damage; "skip" salvages what is intact, on all ranks, from one checkpoint: what is
            damaged is `...` in a new tree, and stays as it was in one that is filled.
        per_rank: what a rank gets of `PerRank` state, where the world has another size: "error" refuses, "take" gives
            rank r that of rank r % old number. For a training state it is also merge(states, rank, world), which
            returns that of one rank, or a dict of these for "rng", "loader", "buffers", "extra" (no merge).
            None refuses, but for `load_abstract`, which takes, and the random generators of a training state: these
            continue on the same ranks of a smaller world, and in a larger one stay as the program has seeded them.

    Raises:
        MismatchError: a field has another value.
    """

    on_corrupt: Literal["error", "skip"] = "error"
    per_rank: Policies = None

    def __post_init__(self) -> None:
        _check_value("on_corrupt", self.on_corrupt, ("error", "skip"))
        if isinstance(self.per_rank, Mapping):
            for part in self.per_rank:
                _check_part(part)
                policy_of(self.per_rank, part)
        else:
            policy_of(self.per_rank, "per_rank")


def read_of(given: ReadOptions | None, call: str, refused: Mapping[str, str] = {}) -> ReadOptions:
    """Returns the argument `read` of a call.

    Args:
        refused: the fields that the call cannot honour, each with what to do.

    Raises:
        TypeError: it is something else.
        MismatchError: a field is given that is refused.
    """
    return check_group(given, ReadOptions, "read", "once=True", call, refused)


def fallback_of(given: Fallback | None, call: str, refused: Mapping[str, str] = {}) -> Fallback:
    """Returns the argument `fallback` of a call; raises as `read_of`."""
    return check_group(given, Fallback, "fallback", 'per_rank="take"', call, refused)


def fallback_of_load(given: Fallback | None, call: str, refused: Mapping[str, str] = {}) -> Fallback:
    """Returns the argument `fallback` of a load of any tree, which has no parts of known names.

    Raises:
        MismatchError: it has a function, or a policy for each part.
    """
    fallback = fallback_of(given, call, refused)
    if fallback.per_rank not in (None, "error", "take"):
        raise MismatchError(
            "per_rank",
            expected=f"'error' or 'take', in {call}",
            found=f"{fallback.per_rank!r:.60}",
            hint=_PER_RANK_OF_LOAD,
        )
    return fallback


def read_alone(read: ReadOptions) -> ReadOptions:
    """Returns how a part of a load reads, a new tree in which this rank takes part alone."""
    return ReadOptions(verify=read.verify is not False, memory=read.memory)


def policy_of(given: Policies, part: str) -> Policy | None:
    """Returns the policy for one part; None where none is given for it.

    Raises:
        MismatchError: an unknown policy.
    """
    policy: Any = given.get(part) if isinstance(given, Mapping) else given
    if policy not in (None, "error", "take") and not callable(policy):
        raise MismatchError(part, expected="'error', 'take' or a function", found=f"{policy!r:.60}")
    return policy


def _check_value(name: str, given: object, known: tuple[Any, ...]) -> None:
    if given not in known:
        raise MismatchError(name, expected=" or ".join(map(repr, known)), found=f"{given!r:.60}")


def _check_part(name: str) -> None:
    if name not in PARTS:
        near = difflib.get_close_matches(str(name), PARTS, n=1)
        raise MismatchError(
            "per_rank",
            expected=f"policies for some of {', '.join(PARTS)}",
            found=f"one for {name!r}" + (f"; near to it is {near[0]!r}" if near else ""),
            hint="Mend the name",
        )


def choice_of(
    select: Selection, exclude: Selection, rename: Renaming = None, transforms: Transforms = None
) -> dict[str, Any]:
    """Returns the fields of `LoadOptions` that say which leaves are read, and as what; only those that are given.

    Raises:
        MismatchError: `select` or `exclude` is neither globs nor paths.
        TreeckptError: as `as_rules`.
    """
    chosen: dict[str, Any] = {}
    if select is not None:
        chosen["select"] = globs_of(select)
    if exclude is not None:
        chosen["exclude"] = globs_of(exclude, "exclude")
    if rename is not None or transforms is not None:
        chosen["rules"] = as_rules(rename, transforms)
    return chosen


class LoadKeywords(TypedDict, total=False):
    """The options of `treeckpt.load` that `Manager.restore` passes on."""

    select: Selection
    exclude: Selection
    rename: Renaming
    transforms: Transforms
    strict: Strict
    partial: bool
    ids: Any
    cast: bool
    device: Device
    read: ReadOptions | None
    fallback: Fallback | None
    allow_pickle: bool
    namespace: str
    on_report: Callable[[LoadReport], None] | None


class LoadAsyncKeywords(LoadKeywords, total=False):
    """The options of `treeckpt.load` that `treeckpt.load_async` takes."""

    together: bool
    comm: Any


ONLY_OF_LOAD = frozenset(("ids", "device", "on_report"))
"""The options of `treeckpt.load` that `treeckpt.load_into` lacks."""
