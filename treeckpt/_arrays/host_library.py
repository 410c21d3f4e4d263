"""The adapter of an array library in this process's memory, by its way to and from arrays of numpy.

Both ways share the memory: what is saved is read through a view, and an array that is loaded is made of memory that is
filled later. That a library copies in place of sharing is found where an array is made, before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from .._core.tree.spec import ArraySpec
from ..errors import MismatchError, TreeError
from . import numpy
from .base import Allocate, ArraySource, ArrayTarget, StridedMemory


class HostLibrary:
    """The adapter of one library.

    Args:
        name: the `ArraySpec.kind` of its arrays.
        to_numpy: returns the elements of an array as one of numpy, in the same memory.
        from_numpy: returns an array of the library that uses the memory of one of numpy.
    """

    known_dtype = staticmethod(numpy.known_dtype)
    cast = staticmethod(numpy.cast)

    def __init__(self, name: str, to_numpy: Callable[[Any], np.ndarray], from_numpy: Callable[[np.ndarray], Any]):
        self.name, self._to_numpy, self._from_numpy = name, to_numpy, from_numpy

    def _elements(self, leaf: Any, path: str) -> np.ndarray:
        array = self._to_numpy(leaf)
        if type(array) is not np.ndarray:
            found = f"a {type(array).__qualname__} from to_numpy of {self.name}"
            raise TreeError(path, expected="an array of numpy", found=found)
        return array

    def _spec(self, spec: ArraySpec) -> ArraySpec:
        return msgspec.structs.replace(spec, kind=self.name)

    def source(self, leaf: Any, path: str, rank: int) -> ArraySource:
        """Describes an array to save."""
        source = numpy.source(self._elements(leaf, path), path, rank)
        return msgspec.structs.replace(source, spec=self._spec(source.spec))

    def abstract(self, leaf: Any, path: str, rank: int) -> ArraySpec:
        """Returns the spec of an array."""
        return self._spec(numpy.abstract(self._elements(leaf, path), path, rank))

    def target(self, leaf: Any, path: str, rank: int) -> ArrayTarget:
        """Describes an array to fill in place.

        Raises:
            MismatchError: to_numpy gives a copy, so that what is written to it would be lost.
        """
        elements = self._elements(leaf, path)
        if _memory(elements) != _memory(self._elements(leaf, path)):
            raise self._copied("to_numpy", path)
        target = numpy.target(elements, path, rank)
        return msgspec.structs.replace(target, spec=self._spec(target.spec), leaf=leaf)

    def like(
        self, leaf: Any, path: str, rank: int, device: str | None, *, allocate: Allocate | None = None
    ) -> ArrayTarget:
        """Creates an array of the leaf's shape and dtype."""
        return self.empty(self.abstract(leaf, path, rank), path, device, allocate=allocate)

    def empty(self, spec: ArraySpec, path: str, device: str | None, *, allocate: Allocate | None = None) -> ArrayTarget:
        """Creates an array from a spec."""
        target = numpy.empty(spec, path, device, allocate=allocate)
        return msgspec.structs.replace(target, leaf=self._made(target.leaf, path))

    def wrap(self, spec: ArraySpec, memory: memoryview, offset: int) -> Any:
        """Returns an array that uses `memory` from byte `offset` on, without a copy."""
        return self._made(numpy.wrap(spec, memory, offset), "")

    def view(self, base: Any, spec: ArraySpec, offset: int, strides: tuple[int, ...]) -> Any:
        """Returns a strided view, in elements of its memory, of a dense array."""
        return self._made(numpy.view(self._elements(base, ""), spec, offset, strides), "")

    def mark_written(self, leaves: Sequence[Any]) -> None:
        """Does nothing: such a library keeps no state that depends on the content of an array."""

    def _made(self, elements: np.ndarray, path: str) -> Any:
        """Returns the array of the library that uses the memory of one of numpy.

        Raises:
            MismatchError: it has other memory, or another shape or dtype.
        """
        made = self._from_numpy(elements)
        there = self._elements(made, path)
        if (there.shape, there.dtype) != (elements.shape, elements.dtype):
            raise MismatchError(
                path,
                expected=f"an array of shape {elements.shape} of {elements.dtype} from from_numpy of {self.name}",
                found=f"shape {there.shape} of {there.dtype}",
            )
        if elements.size and _memory(there) != _memory(elements):
            raise self._copied("from_numpy, or to_numpy", path)
        return made

    def _copied(self, function: str, path: str) -> MismatchError:
        return MismatchError(
            path,
            expected=f"{function} of {self.name} to share the memory of the array",
            found="a copy of it",
            hint="A library that cannot share memory gives arrays of numpy to save, and takes those that load gives",
        )


def _memory(array: np.ndarray) -> StridedMemory:
    return StridedMemory(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)
