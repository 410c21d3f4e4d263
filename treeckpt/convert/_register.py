"""Formats from outside: functions that recognise, read and write them, registered beside those of this package."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .._arrays.base import LazyArray
from .._core.sharding.dtypes import numpy_dtype
from .._core.sharding.region import Region
from .._foreign.foreign_checkpoint import READERS
from .._foreign.source_files import SourceFiles, read_registered
from .._io.comm.collective import from_rank0
from .._io.comm.comm import Comm
from .._io.os_errors import write_errors_wrapped
from .._io.storage.foreign_formats import KnownFormat, add_format
from .._io.storage.local_files import sync_directory, sync_file
from .._io.storage.open import is_same_function
from ..errors import TreeckptError, TreeError
from ._contents import SOURCES
from ._conversion import WRITTEN, ConvertJob, WrittenFormat, add_written, local_destination
from ._format_fit import FittedContents, fit_arrays
from ._output import Output, check_free

_registered: dict[str, tuple[Any, ...]] = {}
"""What `register` was given, by the names of formats."""


class WrittenArray:
    """An array that is read when numpy asks for it, for the function that writes it.

    >>> def write(arrays, file):
    ...     for name, array in arrays.items():
    ...         file.write(f"{name} {array.dtype} {array.shape} {np.asarray(array).sum()}".encode())

    Attributes:
        shape, dtype: of the array; the dtype is one of numpy or ml_dtypes.
    """

    def __init__(self, lazy: LazyArray) -> None:
        self.shape, self.dtype = lazy.spec.shape, numpy_dtype(lazy.spec.dtype)
        self._lazy, self.is_read = lazy, False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.is_read = True
        data = np.ascontiguousarray(self._lazy.read(Region.whole(self.shape))).view(self.dtype).reshape(self.shape)
        return data if dtype is None else data.astype(dtype)


def register(
    name: str,
    *,
    suffix: str = "",
    file: Callable[[str, bytes], bool] | None = None,
    directory: Callable[[frozenset[str]], bool] | None = None,
    read: Callable[[SourceFiles], Any] | None = None,
    write: Callable[[Mapping[str, WrittenArray], BinaryIO], Any] | None = None,
) -> None:
    """Has checkpoints of a format of one's own read wherever those of other programs are, and written by `convert`.

    >>> def read_npz(files):
    ...     with np.load(files.open(files.names[0])) as arrays:
    ...         return dict(arrays)
    >>> def write_npz(arrays, file):
    ...     np.savez(file, **arrays)
    >>> tc.convert.register("npz", suffix=".npz", read=read_npz, write=write_npz)
    >>> tc.convert.convert("run/step_00000100", "new.npz", subtree="model").format
    'npz'
    >>> tc.load("new.npz")["bias"].shape
    (2,)

    Args:
        name: of the format, one of `SOURCES` if it has `read`, and of `FORMATS` if it has `write`.
        suffix: the end of the names of its files: by it a destination of `convert` is of this format.
        file: whether a file is of the format, by its name and its first 64 bytes; by default by its suffix. It is asked
            before the formats that are there.
        directory: whether a directory is of the format, by the names of its files; None where it is always a file.
        read: returns the tree of the files: containers, values, and arrays of numpy; an `np.memmap` is read when it is
            needed.
        write: writes arrays by name to a file, on rank 0. All have to be read; values are losses.

    Raises:
        TreeckptError: the name is that of another format, or neither `read` nor `write` is given.
    """
    given = (suffix, file, directory, read, write)
    functions = [one for one in (read, write) if one is not None]
    named = isinstance(name, str) and re.fullmatch(r"[a-z][a-z0-9_.-]*", name)
    if not named or not functions or not all(map(callable, functions)):
        expected = "a name of lower case letters, digits and _ . -, and a function to read or to write"
        raise TreeckptError("register", expected=expected, found=f"{name!r:.80}")
    before = _registered.get(name)
    of_treeckpt = before is None and (name in SOURCES or name in WRITTEN or name == "pickle")
    if of_treeckpt or (before is not None and not all(map(is_same_function, before[1:], given[1:]))):
        raise TreeckptError("register", expected="a format that is not registered", found=f"{name!r}, which is")
    if read is not None and suffix == "" and file is None and directory is None:
        raise TreeckptError(
            "register", expected="suffix=, file= or directory=, to recognise what is read", found="none"
        )
    _registered[name] = given
    if read is not None:
        by_suffix = (lambda one, _: one.endswith(suffix)) if suffix else None
        add_format(KnownFormat(name, f"a checkpoint of format {name}", directory, file or by_suffix))
        READERS[name] = lambda store, sums, refused: read_registered(name, read, store)
        SOURCES[:] = ["treeckpt", *READERS]
    if write is not None:
        job = partial(_write, name, write)
        add_written(WrittenFormat(name, fit_arrays, write=job, suffixes=(suffix,) if suffix else ()))


def _write(
    name: str,
    write: Callable[[Mapping[str, WrittenArray], BinaryIO], Any],
    held: FittedContents,
    _: Mapping[str, bytes],
    options: ConvertJob,
    comm: Comm,
) -> tuple[tuple[str, ...], int]:
    """Writes one file on rank 0, which appears when it is whole; returns its name, and the bytes of the arrays."""
    place = local_destination(options.destination)
    if options.dry_run:
        check_free(place, Output((), (), directory=False), overwrite=options.overwrite)
        return (place.name,), 0
    arrays = {
        held.names[path]: WrittenArray(leaf) for path, leaf in held.contents.leaves if isinstance(leaf, LazyArray)
    }

    def run() -> int:
        check_free(place, Output((), (), directory=False), overwrite=options.overwrite)
        part = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")
        with write_errors_wrapped(str(place)), contextlib.ExitStack() as cleanup:
            place.parent.mkdir(parents=True, exist_ok=True)
            cleanup.callback(Path.unlink, part, missing_ok=True)
            with part.open("xb") as out:
                write(arrays, out)
                out.flush()
                sync_file(out.fileno())
            if left := [path for path, array in arrays.items() if not array.is_read]:
                expected = f"the writer of {name} to write every array"
                raise TreeError(left[0], expected=expected, found=f"{len(left)} that it did not read")
            check_free(place, Output((), (), directory=False), overwrite=options.overwrite)
            part.replace(place)
            sync_directory(place.parent)
        return sum(array._lazy.nbytes for array in arrays.values())

    written = from_rank0(comm, f"convert {place}", run, int, call="convert")
    return (place.name,), written if comm.rank == 0 else 0
