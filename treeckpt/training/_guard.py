"""Delays an optimizer's step until a lazily staged save has copied the tensors that the step changes.

With `BackgroundOptions(staging="lazy")` the copy runs beside the next forward and backward, which read the parameters
and the optimizer's state but do not change them. The step does: a hook before it waits for the copy. Buffers that the
forward itself changes (running statistics of BatchNorm), and anything else that the loop changes before the step, are
not protected: call `Pending.wait_staged` before, or stage by copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._saving.session import Pending
from ._optimizers import optimizer_chain


class Guard:
    """A step pre-hook that waits for saves; each optimizer has one, for all its saves.

    >>> lazy = tc.BackgroundOptions(staging="lazy")
    >>> pending = tc.save_async("run/step_00000200", model.state_dict(), background=lazy)
    >>> guard = tc.training.guard(optimizer, pending)
    >>> guard.remove()
    """

    def __init__(self) -> None:
        self._pending: list[Pending] = []
        self._hook: Any = None

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Waits for the staging of all pending saves; torch calls it before each step."""
        for pending in list(self._pending):
            with contextlib.suppress(Exception):  # the save reports a failed copy; the step goes on
                pending.wait_staged()
            self._pending = [other for other in self._pending if other is not pending]

    def add(self, optimizer: Any, pending: Pending) -> None:
        """Lets the optimizer's next step wait for one more save."""
        self._pending.append(pending)
        if self._hook is None:
            self._hook = optimizer.register_step_pre_hook(self)

    def remove(self) -> None:
        """Removes the hook: steps no longer wait."""
        self._pending.clear()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def guard(optimizer: Any, pending: Pending) -> Guard:
    """Lets the optimizer's next step wait until the save has copied the tree.

    Call it after each `save_async` that stages lazily; an optimizer keeps one guard for all of them.

    >>> lazy = tc.BackgroundOptions(staging="lazy")
    >>> pending = tc.save_async("run/step_00000200", model.state_dict(), background=lazy)
    >>> guard = tc.training.guard(optimizer, pending)
    >>> optimizer.step()  # waits until the parameters are copied

    Args:
        optimizer: a `torch.optim.Optimizer`, or what wraps one.
        pending: the result of `save_async`.

    Returns:
        the optimizer's guard; its `remove` lets steps go on without waiting.
    """
    optimizer = optimizer_chain(optimizer)[-1]
    hooks: Iterable[Any] = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    own = next((hook for hook in hooks if isinstance(hook, Guard)), None) or Guard()
    own.add(optimizer, pending)
    return own


def before_any_step(call: Callable[[], None]) -> Any:
    """Calls a function before each step of every optimizer of torch in this process; returns a handle with `remove`."""
    return register_optimizer_step_pre_hook(lambda *_: call())
