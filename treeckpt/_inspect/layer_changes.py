"""Ranks arrays, and the layers that they belong to, by how far they moved relative to their size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
from numpy.typing import ArrayLike

_LAYER = re.compile(r"(.*?(?:^|[/._])[0-9]+)(?:[/.]|$)")
"""A path up to its first key or module name that is a number."""


class LayerChange(msgspec.Struct, frozen=True):
    """How far the arrays of one layer moved together, as one vector."""

    layer: str
    arrays: int
    changed: int
    """Arrays of which a bit differs."""
    before: float
    """Euclidean norm."""
    after: float
    change: float
    """Norm of the difference."""
    cosine: float | None
    """Of the angle between the two; None where one is zero."""
    not_finite: int
    """Changed elements of which one is infinite or not a number."""

    @property
    def relative(self) -> float:
        """The norm of the difference over the norm; infinity if that is zero, or if elements are not finite."""
        return float(relative_changes(self.before, self.change, self.not_finite))


def layer_of(path: str) -> str:
    """Returns the part of a path that names its layer: up to the first number, or else up to the last key."""
    found = _LAYER.match(path)
    return found[1] if found is not None else path.rpartition("/")[0]


def relative_changes(before: ArrayLike, change: ArrayLike, not_finite: ArrayLike) -> np.ndarray:
    """Returns change over norm; infinity where elements became or were not finite, or where zeros changed."""
    with np.errstate(all="ignore"):
        found = np.where(np.equal(change, 0), 0.0, np.divide(change, before))
    return np.where(np.greater(not_finite, 0) | np.isnan(found), np.inf, found)


def layer_changes(paths: Iterable[str], columns: Mapping[str, np.ndarray]) -> list[LayerChange]:
    """Returns the changes of all layers, the largest relative one first.

    Args:
        paths: of the rows.
        columns: `changed`, `not_finite`, `before`, `after`, `change` and `cosine` of each array.
    """
    numbers: dict[str, int] = {}
    group = np.array([numbers.setdefault(layer_of(path), len(numbers)) for path in paths], np.int64)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(group, values, len(numbers))

    if not len(group):
        return []
    with np.errstate(all="ignore"):
        norms = {name: np.sqrt(total(np.square(columns[name]))) for name in ("before", "after", "change")}
        dots = np.where(np.isnan(columns["cosine"]), 0.0, columns["cosine"]) * columns["before"] * columns["after"]
        cosine = np.clip(total(dots) / (norms["before"] * norms["after"]), -1.0, 1.0)
    found = [
        LayerChange(
            layer=layer,
            arrays=int(arrays),
            changed=int(changed),
            before=float(norms["before"][at]),
            after=float(norms["after"][at]),
            change=float(norms["change"][at]),
            cosine=float(cosine[at]) if np.isfinite(cosine[at]) else None,
            not_finite=int(not_finite),
        )
        for (layer, at), arrays, changed, not_finite in zip(
            numbers.items(),
            total(np.ones(len(group))),
            total(columns["changed"] > 0),
            total(columns["not_finite"]),
            strict=True,
        )
    ]
    return sorted(found, key=lambda one: (-one.relative, one.layer))
