"""The state of a loop for a last save, where a signal ends workers of its data loader, and their error the loop.

Such an error can come at any line of the loop. The state is that of a step as long as no optimizer has begun a step
since `should_save` was called for it; after that it is between two steps, and is not saved. Several ranks save only if
the loop breaks on all of them: one that waits for another in a collective does not get there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .._arrays.registry import is_value
from .._core.tree.flatten import flatten

_WORKERS = "DataLoader worker"
"""How torch's errors about dead workers begin."""


class LoopState:
    """Where a loop stands."""

    def __init__(self) -> None:
        self.tree: Callable[[], Any] | None = None
        """Returns the state; None where nothing tells how the loop saves."""
        self.step: int | None = None
        """For which `should_save` was called last."""
        self._parts: frozenset[Any] | None = None
        self._begun = self._begun_before = 0
        self._hook: Any = None

    def reach(self, step: int) -> None:
        """Notes the call of `should_save` for a step."""
        if self._hook is None and "torch.optim" in sys.modules:
            from ..training._guard import before_any_step

            self._hook = before_any_step(self._begin)
        self.step, self._begun_before = step, self._begun

    def _begin(self) -> None:
        self._begun += 1

    def note_saved(self, tree: Any) -> None:
        """Notes the keys at the root of a tree that the loop saves."""
        self._parts = frozenset(tree) if isinstance(tree, Mapping) else None

    def last_tree(self) -> Any:
        """Returns the state to save.

        Raises:
            LookupError: it is not known, or not that of a step; with the reason.
        """
        if self.step is None or self._begun != self._begun_before:
            raise LookupError("the error came between two steps")
        if self.tree is None:
            raise LookupError("resume was not given all that is saved, and step no function that returns it")
        tree = self.tree()
        if self._parts is not None and frozenset(tree) != self._parts:
            what = ", ".join(sorted(map(str, self._parts)))
            raise LookupError(f"the loop saves {what}, and resume was given objects for {', '.join(map(str, tree))}")
        return tree

    def close(self) -> None:
        """Ends counting steps."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def is_of_workers(error: BaseException) -> bool:
    """Whether an error is that of dead workers of a data loader, or follows one."""
    return any(_WORKERS in str(one) for one in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def training_state(model: Any, optimizer: Any, options: Mapping[str, Any]) -> Any:
    """Returns the state of the objects that `resume` got.

    Raises:
        LookupError: values are among them, of which the loop may have others by now in variables of its own.
    """
    from ..training import state

    asked = {name: options.get(name) for name in ("scheduler", "loader", "extra")}
    parts: dict[str, Any] = {name: None if one is False else one for name, one in asked.items()}
    given = {name: one for name, one in parts.items() if one is not None}
    for path, leaf in flatten(given, namespace=options.get("namespace", ""))[1]:
        if is_value(leaf):
            raise LookupError(f"{path} is a value, which the loop alone knows: call step with a function for the state")
    return state(model, optimizer, rng=options.get("rng") is not False, **parts)
