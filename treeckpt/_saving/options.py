"""The options of a save as one struct, and the protocol by which a manager gives a save its lineage."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Literal, Protocol, SupportsIndex

import msgspec

from .._arrays.digests import Comparison
from .._core.format.lineage import Lineage
from .._core.tree.structure import check_unicode
from ..errors import TreeckptError, TreeError

BusyPolicy = Literal["wait", "skip", "error"]
StagingMode = Literal["copy", "lazy"]
WriterKind = Literal["process", "thread"]
UNLIMITED_SHARD = 1 << 62


class LineageSource(Protocol):
    """Gives one save of a manager its place in the run."""

    def lineage(self, save_id: str) -> Lineage:
        """Returns the lineage of the save with this id; raises nothing.

        It is called on rank 0 after the ranks have agreed, and for a background save in the thread that saves.
        """
        ...


class CommonOptions(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The options of a save that must be equal on every rank."""

    step: int | None = None
    overwrite: bool = False
    verify_replicas: Comparison = "sample"
    max_shard_bytes: int = UNLIMITED_SHARD
    busy: BusyPolicy = "wait"
    plan_only: bool = False
    """Ranks only agree on the plan: nothing is written, and the path is not looked at."""

    def __post_init__(self) -> None:
        if not isinstance(self.verify_replicas, bool) and self.verify_replicas != "sample":  # pyright: ignore
            raise TreeckptError(
                "verify_replicas",
                expected='True, "sample" or False',
                found=f"{self.verify_replicas!r:.60}",
                hint='"sample", the default, compares samples of what is above 64 KiB; False trusts that it is equal',
            )


class SaveOptions(CommonOptions, frozen=True, kw_only=True):
    """All options of a save; see `treeckpt.save` and `treeckpt.save_async`."""

    allow_pickle: bool = False
    namespace: str = ""
    staging: StagingMode = "copy"
    writer: WriterKind = "process"
    timeout: float | None = None

    @property
    def common(self) -> CommonOptions:
        """The options that ranks compare."""
        return CommonOptions(**{name: getattr(self, name) for name in CommonOptions.__struct_fields__})


def check_metadata(metadata: object) -> Mapping[str, object]:
    """Returns the argument `custom_metadata`, an empty mapping for None.

    Raises:
        TreeError: it is no mapping, or a key is no name.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        expected, found = 'values by name, as {"commit": "1f3a"}', f"{type(metadata).__name__} {metadata!r:.60}"
        raise TreeError(
            "custom_metadata", expected=expected, found=found, hint="Give it a name, as a dict of one entry"
        )
    for key in metadata:
        if not isinstance(key, str):
            found = f"a key of {type(key).__name__}: {key!r:.60}"
            raise TreeError("custom_metadata", expected="names of type str", found=found, hint="Use str(key)")
        check_unicode(key, "custom_metadata")
    return metadata


def shard_limit(limit: object) -> int:
    """Returns the largest number of data bytes in a shard, from an integer of any type; None is no limit.

    Raises:
        TreeckptError: it is not an integer, or it is below 1.
    """
    if limit is None:
        return UNLIMITED_SHARD
    if isinstance(limit, bool) or not isinstance(limit, SupportsIndex) or operator.index(limit) < 1:
        hint = "None has each rank write one file"
        raise TreeckptError("max_shard_bytes", expected="bytes, 1 or more", found=f"{limit!r:.60}", hint=hint)
    return operator.index(limit)
