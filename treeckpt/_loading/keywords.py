"""The keyword arguments of loads, for functions that pass them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict

from .._core.tree.leaf_differences import Strict
from .._core.tree.paths import Selection
from ..reports import LoadReport
from ..rules import Renaming, Transforms
from .read_batch import Verify


class LoadIntoKeywords(TypedDict, total=False):
    """The options of `treeckpt.load_into` that `Manager.restore` passes on."""

    select: Selection
    exclude: Selection
    rename: Renaming
    transforms: Transforms
    strict: Strict
    cast: bool
    verify: Verify
    on_corrupt: Literal["error", "skip"]
    per_rank: Literal["error", "take"]
    read: Literal["each", "once"]
    memory: int | None
    allow_pickle: bool
    namespace: str


class LoadKeywords(LoadIntoKeywords, total=False):
    """The options of `treeckpt.load` that `Manager.restore` passes on."""

    ids: Any
    device: str | None
    copy: bool
    mmap: bool
    on_report: Callable[[LoadReport], None] | None


class LoadAsyncKeywords(LoadKeywords, total=False):
    """The options of `treeckpt.load` that `treeckpt.load_async` takes."""

    together: bool
    follow_links: bool
    comm: Any
