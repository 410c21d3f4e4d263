"""Limit of the output size relative to the source: views can repeat the same bytes."""

from __future__ import annotations

from ..arrays.lazy import LazyArray
from ..errors import FormatError
from .contents import Contents
from .ties import ties_of

__all__ = ["check_growth", "own_nbytes"]

FREE = 64 << 20
"""Bytes that may be written whatever the source is."""
TIMES = 16
"""Times the bytes of the source's arrays that may be written beyond those."""


def check_growth(source: Contents, nbytes: int) -> None:
    """Refuses to write far more bytes than the arrays of a source have.

    Args:
        nbytes: to be written.

    Raises:
        FormatError: naming the leaf with the most bytes.
    """
    if nbytes <= FREE:
        return
    arrays = [(path, leaf) for path, leaf in source.leaves if isinstance(leaf, LazyArray)]
    held = _held(arrays)
    if nbytes > FREE + TIMES * held:
        path, largest = max(arrays, key=lambda pair: pair[1].nbytes)
        raise FormatError(
            f"{path}: {source.label}",
            expected=f"at most {FREE + TIMES * held} bytes to write of arrays that take {held}",
            found=f"{nbytes} bytes, of which {largest.nbytes} are a view that shows the same bytes over and over",
            hint=f"Leave it out (exclude={path!r}, --exclude {path!r}), or save a copy of it in the place of the view",
        )


def own_nbytes(contents: Contents) -> int:
    """Bytes of the arrays that are no ties or views of others among them."""
    sizes = {path: leaf.nbytes for path, leaf in contents.leaves if isinstance(leaf, LazyArray)}
    total = sum(sizes.values())
    return total - sum(sizes[path] for path in ties_of(contents)) if total > FREE else total


def _held(arrays: list[tuple[str, LazyArray]]) -> int:
    """Bytes that the arrays show, each once."""
    total = reach = 0
    for start, nbytes in sorted((a.storage.address, a.storage.nbytes) for _, a in arrays if a.storage is not None):
        total += max(0, start + nbytes - max(start, reach))
        reach = max(reach, start + nbytes)
    return total + sum(leaf.nbytes for _, leaf in arrays if leaf.storage is None)
