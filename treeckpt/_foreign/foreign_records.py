"""The index of files that another program wrote, as data; `foreign_index` makes it."""

from __future__ import annotations

from functools import cached_property

import msgspec

from .._core.format.records import File, Index
from .._core.sharding.int_runs import decode_runs

FREE = 64 << 20
"""Bytes that arrays may take beyond those of all files, whatever these are: views show bytes repeatedly."""
TIMES = 16
"""Times the bytes of all files that they may take beyond that."""


class ForeignIndex(Index, frozen=True, dict=True):
    """The index of files that another program wrote."""

    names: tuple[str, ...] = ()
    """Of the files; the number of a file is the rank whose stream it is."""
    computed: dict[int, int] = msgspec.field(default_factory=dict)
    """Bytes of each array that is computed when it is read, by the rank whose stream it is."""

    @cached_property
    def file_list(self) -> tuple[File, ...]:
        sizes = decode_runs(self.files.nbytes).tolist()
        return tuple(File(name, n, 0, 0, size, 0) for n, (name, size) in enumerate(zip(self.names, sizes, strict=True)))

    @property
    def file_kind(self) -> str:
        return "file"

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.entries)

    @property
    def repeated_nbytes(self) -> int:
        """Bytes that arrays may take beside those of the files, where several of them show the same bytes."""
        nbytes = int(decode_runs(self.files.nbytes).sum())
        return most_nbytes(nbytes) - nbytes

    def locate(self, rank: int, start: int, stop: int, path: str) -> tuple[File, int]:
        if rank in self.computed:
            return File(computed_name(rank), rank, 0, 0, self.computed[rank], 0), start
        return super().locate(rank, start, stop, path)


def computed_name(rank: int) -> str:
    """Returns the name under which a store has an array that is computed; no file has it."""
    return f"{rank}/computed"


def most_nbytes(nbytes: int) -> int:
    """Returns the bytes that the arrays in files of so many bytes may take."""
    return nbytes + FREE + TIMES * nbytes
