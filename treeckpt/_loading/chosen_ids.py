"""The ids of keyed tables whose rows a load is to give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from .._core.tree.structure import TABLE_KEYS
from ..errors import MismatchError


class ChosenIds(msgspec.Struct, frozen=True):
    """The ids whose rows are loaded, of tables by path, or of every table."""

    of_table: Mapping[str, np.ndarray]
    of_all: np.ndarray | None = None

    def beside(self, ids_path: str) -> np.ndarray | None:
        """Returns the chosen ids of the table whose ids have a path; None for a table that is loaded whole."""
        return self.of_table.get(table_path(ids_path), self.of_all)


def table_path(ids_path: str) -> str:
    """Returns the path of a table from that of its ids."""
    return ids_path.removesuffix(TABLE_KEYS[0]).removesuffix("/")


def chosen_ids(given: Any) -> ChosenIds | None:
    """Returns `ids=` of a load: one array of ids for all tables, or a dict of these by the path of a table.

    Raises:
        MismatchError: they are no whole numbers of 64 bits in one dimension, or one is twice there.
    """
    if given is None or isinstance(given, ChosenIds):
        return given
    if isinstance(given, Mapping):
        return ChosenIds({f"{path}": _as_ids(ids, f"ids[{path!r:.80}]") for path, ids in given.items()})
    return ChosenIds({}, _as_ids(given, "ids"))


def _as_ids(given: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (TypeError, ValueError) as error:
        raise MismatchError(what, expected="an array of ids", found=f"{given!r:.60} ({error})") from error
    whole = array.dtype.kind in "iu" and array.dtype != np.uint64
    if array.ndim != 1 or not (whole or not array.size):
        found = f"{array.dtype} of shape {array.shape}"
        raise MismatchError(what, expected="ids of int64[N]", found=found, hint="One id is [id]")
    ids = np.ascontiguousarray(array, np.int64)
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        raise MismatchError(
            what,
            expected="each id once",
            found=f"{values[counts > 1][0]} {counts.max()} times",
            hint="Pass numpy.unique(ids), and take rows with its return_inverse",
        )
    return ids
