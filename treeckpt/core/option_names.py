"""Names what was likely meant where a public function is called with an option that it does not have."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_PICKLE = "leave it out: no code of a file runs without allow_pickle=True"
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


def checks_options(call: Callable[P, R]) -> Callable[P, R]:
    """Has a function raise a TypeError for an unknown option that names what was likely meant."""
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        check_options(options, known, call.__name__)
        return call(*args, **options)

    return checked


def _meant_by(name: str, known: Iterable[str]) -> str:
    """Returns what an unknown option likely means, as the end of an error; empty if nothing is like it."""
    if name in ELSEWHERE:
        return f"; {ELSEWHERE[name]}"
    return "".join(f"; near to it is {one!r}" for one in difflib.get_close_matches(name, known, n=1))
