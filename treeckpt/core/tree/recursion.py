"""Walks of any depth: functions that call themselves, free of Python's limit of nested calls.

Such a function is a generator that yields each call of itself and is sent the result: `found = yield walk(child)`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

__all__ = ["Walk", "run"]

T = TypeVar("T")
Walk = Generator[Any, Any, T]
"""One call of a walk, which comes to a T."""


def run(first: Walk[T]) -> T:
    """The result of a walk."""
    calls: list[Walk[Any]] = [first]
    result: Any = None
    while calls:
        try:
            calls.append(calls[-1].send(result))
            result = None
        except StopIteration as stop:
            calls.pop()
            result = stop.value
    return result
