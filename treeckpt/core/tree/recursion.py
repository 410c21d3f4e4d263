"""Recursion of any depth by a trampoline, without Python's limit of nested calls.

A recursive function is a generator that yields each call of itself and is sent its result: `found = yield walk(child)`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")
Recursive = Generator[Any, Any, T]
"""One call of a recursive function that returns a T."""


def trampoline(first: Recursive[T]) -> T:
    """Runs a recursive function, and returns its result."""
    calls: list[Recursive[Any]] = [first]
    result: Any = None
    while calls:
        try:
            calls.append(calls[-1].send(result))
            result = None
        except StopIteration as stop:
            calls.pop()
            result = stop.value
    return result
