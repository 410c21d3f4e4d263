"""Processes that are stopped for minutes in the middle of what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treeckpt._core.format.index import INDEX_NAME
from treeckpt._io.storage.store import Store


def stopping(kind: type[Any], meanwhile: Callable[[Store], object]) -> type[Any]:
    """A kind of store in which a process is stopped once, behind its look at its files before it publishes an index.

    Args:
        meanwhile: what others do, who take it for an ended one.
    """
    acts = [meanwhile]

    class Stopping(kind):
        def publish(self, name: str, data: bytes, *, replace: Any, check: Callable[[], object] = lambda: None) -> None:
            def stopped_behind() -> None:
                check()
                if name == INDEX_NAME and acts:
                    acts.pop()(self)

            super().publish(name, data, replace=replace, check=stopped_behind)

    return Stopping
