"""Digests of what several ranks hold, by which it is compared: of all bytes, or of samples of a large array.

The samples are `SAMPLE_NBYTES` at each multiple of `PERIOD_NBYTES` of the array's content, in C order whatever its
strides, and its last `SAMPLE_NBYTES`. Any range of `PERIOD_NBYTES` has `SAMPLE_NBYTES` of samples in it, so arrays that
differ all along such a range differ in samples; those that differ in single rows may not. Of 1.5 GB in host memory
samples are hashed in 1.5 ms, all bytes in 60 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from .._core.sharding.region import Region, flat_regions
from .base import ArrayReader, FlatRangeArray, HostArray, HostMemory, tensor_at
from .registry import torch_adapter

Comparison = bool | Literal["sample"]
"""What is compared of arrays above `SMALL_LEAF_NBYTES`: all bytes, samples, or nothing. Smaller ones always are."""
SMALL_LEAF_NBYTES = 64 << 10
"""Replicas of up to this many bytes are compared on every save, byte by byte."""
PERIOD_NBYTES = 256 << 10
SAMPLE_NBYTES = 1 << 10
_STEP_NBYTES = 4 << 20
"""The bytes of an array that are read at once where all are compared, or of samples that a device copies together."""


class SampleRuns(msgspec.Struct, frozen=True, gc=False):
    """Which elements of a 1-D sequence are sampled: `length` at each multiple of `every`, and the last `length`."""

    size: int
    length: int
    every: int

    @classmethod
    def of(cls, size: int, itemsize: int) -> SampleRuns:
        """Returns the samples of `size` elements, which have more bytes than two samples."""
        every = max(1, PERIOD_NBYTES // itemsize)
        return cls(size, min(max(1, SAMPLE_NBYTES // itemsize), every), every)

    @property
    def count(self) -> int:
        """Number of whole samples at multiples of `every`."""
        return (self.size - self.length) // self.every + 1

    def starts(self) -> np.ndarray:
        """Returns where each sample begins, the last one included: int64[count + 1]."""
        return np.append(np.arange(self.count, dtype=np.int64) * self.every, self.size - self.length)

    def index(self) -> np.ndarray:
        """Returns the positions of all sampled elements: int64[(count + 1) * length]."""
        return (self.starts()[:, None] + np.arange(self.length)).reshape(-1)


class ComparedPart(msgspec.Struct, frozen=True, gc=False):
    """A box of an array, as one rank holds it."""

    data: ArrayReader
    box: Region
    itemsize: int
    sampled: bool = False
    """Whether samples of it are compared, not all bytes."""
    by_rows: bool = False
    """Whether the samples are whole rows, as of a table, whose reader gathers rows."""

    @property
    def nbytes(self) -> int:
        return self.box.size * self.itemsize


def compared(part: ComparedPart, compare: Comparison) -> ComparedPart | None:
    """Returns a part as it is compared; None where it is not."""
    if part.nbytes <= SMALL_LEAF_NBYTES or compare is True:
        return part
    return msgspec.structs.replace(part, sampled=True) if compare == "sample" else None


def digests_of(parts: Sequence[ComparedPart]) -> list[bytes]:
    """Returns the digest of each part, equal for equal content wherever it lies and whatever its strides.

    Of arrays on a device the samples, and all of small ones, are gathered there, and copied together.
    """
    found = [b""] * len(parts)
    waiting: list[tuple[int, Any]] = []
    nbytes = 0

    def finish() -> None:
        copies = torch_adapter().copy_together([tensor for _, tensor in waiting])
        for (number, _), data in zip(waiting, copies, strict=True):
            found[number] = xxhash.xxh3_128_digest(data.data)
        waiting.clear()

    for number, part in enumerate(parts):
        if part.by_rows and part.sampled:
            found[number] = _hash_rows(part)
        elif (part.sampled or part.nbytes <= SMALL_LEAF_NBYTES) and (tensor := _gathered(part)) is not None:
            waiting.append((number, tensor))
            nbytes += tensor.nbytes
            if nbytes > _STEP_NBYTES:
                finish()
                nbytes = 0
        else:
            found[number] = _hash_samples(part) if part.sampled else _hash_all(part)
    if waiting:
        finish()
    return found


def _gathered(part: ComparedPart) -> Any:
    """Returns the bytes of an array on a device that are compared, as a tensor there; None for an array elsewhere."""
    tensor = tensor_at(part.data, part.box.slices()) if part.box.size else None
    if tensor is None:
        return None
    return torch_adapter().gather_samples(tensor, SampleRuns.of(part.box.size, part.itemsize) if part.sampled else None)


def _hash_rows(part: ComparedPart) -> bytes:
    rows = part.box.shape[0]
    runs = SampleRuns.of(rows, part.nbytes // rows)
    reader: Any = part.data  # of a table, which takes numbers of rows in place of a range
    return xxhash.xxh3_128_digest(np.ascontiguousarray(reader.read((runs.index(), *part.box.slices()[1:]))).data)


def _hash_samples(part: ComparedPart) -> bytes:
    runs, box, itemsize = SampleRuns.of(part.box.size, part.itemsize), part.box, part.itemsize
    state = xxhash.xxh3_128()
    inner = part.data.data if isinstance(part.data, FlatRangeArray) else part.data
    if not isinstance(inner, (HostArray, HostMemory)):  # what is read is a copy: it is read run by run
        for start in runs.starts().tolist():
            for region in flat_regions(box.shape, start, start + runs.length):
                state.update(np.ascontiguousarray(part.data.read(region.shifted(box.offset).slices())).data)
        return state.digest()
    array = part.data.read(box.slices())
    if not array.flags.c_contiguous:
        return xxhash.xxh3_128_digest(array[np.unravel_index(runs.index(), array.shape)].data)
    step = max(1, _STEP_NBYTES // SAMPLE_NBYTES)
    for first in range(0, runs.count, step):
        shape, offset = (min(step, runs.count - first), runs.length), first * runs.every * itemsize
        state.update(np.ndarray(shape, array.dtype, array, offset, (runs.every * itemsize, itemsize)).tobytes())
    state.update(array.reshape(-1)[-runs.length :].data)
    return state.digest()


def _hash_all(part: ComparedPart) -> bytes:
    data, slices = part.data, part.box.slices()
    if part.nbytes <= SMALL_LEAF_NBYTES or not slices:
        if isinstance(data, HostMemory) and part.box.shape == data.shape:
            return xxhash.xxh3_128_digest(data.tobytes())
        return xxhash.xxh3_128_digest(np.ascontiguousarray(data.read(slices)).data)
    state = xxhash.xxh3_128()
    first, stop = part.box.offset[0], part.box.stop[0]
    step = max(1, _STEP_NBYTES // max(part.nbytes // part.box.shape[0], 1))
    for low in range(first, stop, step):
        rows = data.read((slice(low, min(low + step, stop)), *slices[1:]))
        state.update(np.ascontiguousarray(rows).data)
    return state.digest()
