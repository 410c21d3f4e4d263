"""The keyword arguments of loads, for functions that pass them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from .._core.tree.leaf_differences import Strict
from .._core.tree.paths import Selection
from ..reports import LoadReport
from ..rules import Renaming, Transforms
from .options import Fallback, ReadOptions


class LoadKeywords(TypedDict, total=False):
    """The options of `treeckpt.load` that `Manager.restore` passes on."""

    select: Selection
    exclude: Selection
    rename: Renaming
    transforms: Transforms
    strict: Strict
    ids: Any
    cast: bool
    device: str | None
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
