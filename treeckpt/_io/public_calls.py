"""What all public calls begin with: their options are checked, and saves inside of other calls are refused.

An unknown option is a TypeError that names what was likely meant.

A save is refused on a thread that is inside of another call of this package. So it is for a save of a signal handler, a
hook, a finalizer, or the `state_dict` of an object: it would wait for locks that its own thread holds, or for what that
thread was about to do. Which calls are under way is seen on the stack: a call that was interrupted leaves nothing
behind. Other calls, as loads, may be made inside of any call: the locks that two calls share are reentrant.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import gc
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, Literal, ParamSpec, TypeVar

from ..errors import CheckpointError, MismatchError

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger("treeckpt")
_PICKLE = "leave it out: no code of a file runs"
_LIKE = "like= is the tree that is wanted"
_DCP = "treeckpt.dcp has the calls of torch.distributed.checkpoint"
ELSEWHERE = {
    "map_location": "device= says where new tensors go",
    "weights_only": _PICKLE,
    "pickle_module": _PICKLE,
    "step": "give the path of the step, as run/step_00000100, or call Manager(run).restore(step=...)",
    "item": _LIKE,
    "items": _LIKE,
    "target": _LIKE,
    "checkpoint_id": f"the path comes first; {_DCP}",
    "storage_reader": _DCP,
    "storage_writer": _DCP,
    "planner": _DCP,
    "process_group": "comm= takes a process group",
    "no_dist": "comm='alone' saves or loads on one rank",
    "force": "overwrite=True replaces a checkpoint",
    "metrics": "Manager.save(step, tree, metrics=...) keeps them",
    "max_to_keep": "keep= takes a number, or policies",
}
"""What options of torch.load, torch.distributed.checkpoint and Orbax are here."""
GROUPS = {
    "read": ("ReadOptions", {"verify", "memory", "once", "mmap", "copy", "follow_links"}),
    "fallback": ("Fallback", {"on_corrupt", "per_rank"}),
    "background": ("BackgroundOptions", {"staging", "writer", "busy", "timeout"}),
}
"""The options that stand in a group, by the argument that takes it."""
_RENAMED = {"world_changed": "per_rank"}
"""Fields of groups by other names for them."""
_calls: dict[CodeType, tuple[str, str]] = {}
"""The code of the functions inside of which no save is made, with their names, and what they are to users."""


def check_options(given: Iterable[str], known: Iterable[str], of: str) -> None:
    """Checks the names of options.

    Args:
        given: the names that a call has.
        known: the names that there are.
        of: what has options of these names.

    Raises:
        TypeError: one is unknown; the error names what was likely meant.
    """
    for name in sorted(set(given) - set(known)):
        raise TypeError(f"{name!r} is no option of {of}{_meant_by(name, known)}")


def checks_options(call: Callable[P, T]) -> Callable[P, T]:
    """Has a function raise a TypeError for an unknown option that names what was likely meant."""
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def checked(*args: P.args, **options: P.kwargs) -> T:
        check_options(options, known, call.__name__)
        return call(*args, **options)

    return checked


def check_group(
    given: T | None, kind: type[T], name: str, example: str, call: str, refused: Mapping[str, str] = {}
) -> T:
    """Returns a group of options as it was given; with its defaults for None.

    Args:
        name: of the argument of `call` that takes the group.
        example: a field and its value, for the error.
        refused: the fields that the call cannot honour, each with what to do. False asks for nothing, and is taken.

    Raises:
        TypeError: something else is given; the error names the form.
        MismatchError: a field is refused, and is given.
    """
    default = kind()
    if given is None:
        return default
    if not isinstance(given, kind):
        group = f"tc.{kind.__name__}"
        raise TypeError(f"{call} takes {name}={group}({example}), found {name}={given!r:.60}")
    for field, hint in refused.items():
        value: Any = getattr(given, field)
        if value and value != getattr(default, field):
            expected = f"{getattr(default, field)!r}, in {call}"
            raise MismatchError(field, expected=expected, found=f"{value!r:.60}", hint=hint)
    return given


def _meant_by(name: str, known: Iterable[str]) -> str:
    """Returns what an unknown option likely means, as the end of an error; empty if nothing is like it."""
    known = set(known)
    fields = {field: (argument, group) for argument, (group, fields) in GROUPS.items() for field in fields
        if argument in known}  # fmt: skip
    near = [_RENAMED.get(name, name)]
    if near[0] not in fields and name not in ELSEWHERE:
        near = difflib.get_close_matches(name, [*known, *fields], n=1)
    if near and near[0] in fields:
        argument, group = fields[near[0]]
        return f"; write {argument}=tc.{group}({near[0]}=...)"
    if name in ELSEWHERE:
        without = " without allow_pickle=True" if ELSEWHERE[name] == _PICKLE and "allow_pickle" in known else ""
        return f"; {ELSEWHERE[name]}{without}"
    return "".join(f"; near to it is {one!r}" for one in near)


class _Refusals(threading.local):
    """The saves of this thread that were refused and not logged yet, with their errors."""

    def __init__(self) -> None:
        self.saves: list[tuple[str, CheckpointError]] = []


_refused = _Refusals()


def takes_no_save(
    function: Callable[P, T], *, name: str = "", kind: Literal["call", "save"] = "call"
) -> Callable[P, T]:
    """Has saves refused on a thread where this function is under way; `name` and `kind` say what it is to users.

    The error of a handler may be lost in the function, so refusals are logged at its end, except what it raises itself.
    """
    name = name or function.__qualname__
    _calls[function.__code__] = name, kind  # pyright: ignore[reportFunctionMemberAccess]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        raised: BaseException | None = None
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            raised = error
            raise
        finally:
            refused, _refused.saves = [save for save, error in _refused.saves if error is not raised], []
            if refused:
                _log.warning("inside of %s, %s was refused (%d calls)", name, refused[0], len(refused))

    return call


def call_back(function: Callable[[T], object], argument: T) -> None:
    """Calls a function of the user's when the call of this package has done its work: a save may be made in it."""
    function(argument)


def saves(function: Callable[P, T]) -> Callable[P, T]:
    """Refuses this function, which saves, on a thread where a call of this package is under way.

    Raises:
        CheckpointError: naming that call; or the modules of the interpreter are being torn down.
    """
    name, call = function.__qualname__, takes_no_save(function, kind="save")

    @functools.wraps(function)
    def refuse_or_call(*args: P.args, **kwargs: P.kwargs) -> T:
        if sys.is_finalizing():
            raise CheckpointError(
                name,
                expected="to be called before the interpreter ends",
                found="its modules are being torn down already",
                hint="Save in the foreground before the interpreter ends: in a handler of atexit at the latest",
            )
        frame: FrameType | None = sys._getframe()
        # a function of the user's under `call_back` may save: frames below it are not looked at
        while frame is not None and frame.f_code not in _calls and frame.f_code is not call_back.__code__:
            frame = frame.f_back
        if frame is None or frame.f_code is call_back.__code__:
            return call(*args, **kwargs)
        outer, kind = _calls[frame.f_code]
        refusal = CheckpointError(
            name,
            expected="to be called where no other call is under way on the thread",
            found=f"a {kind} is under way on this thread: {outer}, inside of which a handler, hook or finalizer saves",
            hint="Set a flag and save at the next step, as Manager.save_on_signal does",
        )
        _refused.saves.append((name, refusal))
        raise refusal

    return refuse_or_call


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the cyclic garbage collector: a tree of 20,000 leaves makes many small objects, none of them cyclic."""
    # a program that has switched it off finds it so afterwards
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
