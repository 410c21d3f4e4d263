"""Reads checkpoints on file systems of other machines (NFS, Lustre, GPFS, FUSE), with many reads in flight.

A read there waits for a network, so the number of reads in flight is found as that of requests to an object store is:
see `RangeFetcher`. Whether the page cache is read past is measured too.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from .bucket import FetchFailure, RangeResponse
from .fetching import Consume, FileRange
from .local_read import LocalReader
from .mapped_read import file_system
from .memory import PAGE_NBYTES, aligned_buffer
from .page_cache import is_cached
from .range_fetcher import RangeFetcher
from .request_depth import RequestDepth
from .store import LocalStore, Store, StoreTraits

FAR = {
    0x6969,  # NFS
    0x0BD00BD0,  # Lustre
    0x47504653,  # GPFS
    0x65735546,  # FUSE
    0x00C36400,  # CephFS
    0x19830326,  # BeeGFS
    0x01021997,  # 9p
    0x517B,  # SMB, and its later versions
    0xFF534D42,
    0xFE534D42,
    0x5346414F,  # AFS
    0x20030528,  # PVFS2
    0xAAD7AAEA,  # PanFS
}
"""Magic numbers of file systems whose bytes usually come through a network."""
START, MOST = 16, 64
"""Reads in flight at first, and at most: 16 of 8 MiB at 20 ms come to 6 GB/s where the network carries them."""
TRIALS = 3
"""Comparisons of reads past and through the page cache, before the faster way is preferred."""
COMPARED = 256 << 10
"""Bytes that are read each way for one."""
GAIN = 0.7
"""Part of the seconds past the page cache that reads through it may take, to be preferred."""


def for_reading(store: Store) -> Store:
    """Returns a store that reads the same files with many reads in flight, for a directory of a far file system."""
    if type(store) is LocalStore and file_system(store.directory) in FAR:
        return FarStore(store.directory, follow_links=store.follow_links)
    return store


class DirectChoice:
    """Whether to read past the page cache: parts of the first reads are read both ways, then the faster one stays."""

    def __init__(self) -> None:
        self._begun = itertools.count(1)
        self._seconds: list[tuple[float, float]] = []
        """Of each comparison, past and through the page cache."""
        self.direct = True

    def read_into(self, reader: LocalReader, offset: int, out: memoryview) -> None:
        """Fills `out` with bytes of a file that are not cached."""
        if len(out) >= 4 * COMPARED and next(self._begun) <= TRIALS:
            begin = time.monotonic()
            reader.read_into(offset, out[:COMPARED])
            middle = time.monotonic()
            reader.read_into(offset + COMPARED, out[COMPARED : 2 * COMPARED], shared=True)
            self.add(middle - begin, time.monotonic() - middle)
            offset, out = offset + 2 * COMPARED, out[2 * COMPARED :]
        reader.read_into(offset, out, shared=not self.direct)

    def add(self, past: float, through: float) -> None:
        """Counts a comparison: the seconds that as many bytes took past and through the page cache."""
        self._seconds.append((past, through))
        if len(self._seconds) == TRIALS:
            past, through = (sorted(times)[TRIALS // 2] for times in zip(*self._seconds, strict=True))
            self.direct = through > GAIN * past


class FarStore(LocalStore):
    """A directory of a file system whose reads take long, so that many are in flight at once. It is only read."""

    request_nbytes = 8 << 20

    def __init__(self, directory: str | os.PathLike[str], *, follow_links: bool | None = None) -> None:
        super().__init__(directory, follow_links=follow_links)
        self.choice = DirectChoice()
        self._fetchers = [
            RangeFetcher(partial(self._fetch_one, shared), _is_final, tries=1, depth=RequestDepth(START, most=MOST))
            for shared in (False, True)
        ]

    @property
    def traits(self) -> StoreTraits:
        return msgspec.structs.replace(super().traits, far=True, request_nbytes=self.request_nbytes)

    def fetch(
        self,
        ranges: Sequence[FileRange],
        consume: Consume,
        *,
        memory: int,
        first: int = 0,
        shared: bool = False,
    ) -> None:
        self._fetchers[shared].run(ranges, consume, memory=memory, first=first)

    def _fetch_one(self, shared: bool, wanted: FileRange) -> RangeResponse:
        """Reads a range, less what lies behind the end of the file, through the page cache if it is `shared`."""
        name, offset, nbytes = wanted
        with self._reader(name) as reader:
            size = os.fstat(reader.fd).st_size
            nbytes = max(min(nbytes, size - offset), 0)
            out = aligned_buffer(-(-nbytes // PAGE_NBYTES) * PAGE_NBYTES, huge=True)[:nbytes]
            if shared or is_cached(reader.fd, offset, nbytes):
                reader.read_into(offset, out, shared=True)
            else:
                self.choice.read_into(reader, offset, out)
        return RangeResponse(size, [out])


def _is_final(error: Exception) -> FetchFailure:
    """No error of a file system is tried again: the kernel has done so."""
    return FetchFailure(throttled=False, temporary=False)
