"""Which elements of a large array are its samples, by which it is compared with the replicas of other ranks.

The samples are `SAMPLE_NBYTES` at each multiple of `PERIOD_NBYTES` of the array's content, in C order whatever its
strides, and its last `SAMPLE_NBYTES`. Any range of `PERIOD_NBYTES` has `SAMPLE_NBYTES` of samples in it, so arrays that
differ all along such a range differ in samples; those that differ in single rows may not. Of 1.5 GB in host memory
samples are hashed in 1.5 ms, all bytes in 60 ms.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

Comparison = bool | Literal["sample"]
"""What is compared of arrays above `SMALL_LEAF_NBYTES`: all bytes, samples, or nothing. Smaller ones always are."""
SMALL_LEAF_NBYTES = 64 << 10
"""Replicas of up to this many bytes are compared on every save, byte by byte."""
PERIOD_NBYTES = 256 << 10
SAMPLE_NBYTES = 1 << 10


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
