"""Holds an optimizer's step until a lazily staged save has copied what the step is about to change.

With `save_async(..., staging="lazy")` the copy runs beside the next forward and backward, which read the parameters and
the optimizer's state but do not change them. The step does: a hook before it waits for the copy. Buffers that the
forward itself changes (running statistics of BatchNorm), and anything else that the loop changes before the step, are
not held: call `Pending.wait_staged` before, or stage by copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from ..saving.future import Pending
from .optimizers import unwrapped

__all__ = ["Guard", "guard"]


class Guard:
    """What holds an optimizer's steps; one for each optimizer, however many saves it has seen."""

    def __init__(self) -> None:
        self._pending: list[Pending] = []
        self._hook: Any = None

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The hook before each step."""
        for pending in list(self._pending):
            with contextlib.suppress(Exception):  # a copy that failed is told by the save, and holds nothing up
                pending.wait_staged()
            self._forget(pending)

    def _forget(self, pending: Pending) -> None:
        self._pending = [other for other in self._pending if other is not pending]

    def add(self, optimizer: Any, pending: Pending) -> None:
        """Holds the optimizer's next step for one more save."""
        self._pending.append(pending)
        if self._hook is None:
            self._hook = optimizer.register_step_pre_hook(self)

    def remove(self) -> None:
        """Takes the hook away: steps are not held any more."""
        self._pending.clear()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def guard(optimizer: Any, pending: Pending) -> Guard:
    """Has the optimizer's next step wait until the save has copied the tree.

    Call it after each `save_async` with `staging="lazy"`; an optimizer keeps one guard for all of them.

    Args:
        optimizer: a `torch.optim.Optimizer`, or what wraps one.
        pending: what `save_async` gave.

    Returns:
        the optimizer's guard; its `remove` lets steps go on without waiting.
    """
    optimizer = unwrapped(optimizer)[-1]
    hooks: Iterable[Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    found = next((hook for hook in hooks if isinstance(hook, Guard)), None) or Guard()
    found.add(optimizer, pending)
    return found
