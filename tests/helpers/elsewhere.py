"""Calls that stand for those of another process: on one thread no save is made inside of another call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def elsewhere(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Makes a call in another thread, and returns its result or raises its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *arguments, **options).result()
