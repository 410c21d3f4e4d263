"""safetensors: one file, or a directory with `model.safetensors.index.json`, as Hugging Face has them.

Names are flat. A name that `__metadata__` gives for another one is a tie, as
`safetensors.torch.save_model` writes them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from .._arrays.base import LazyArray
from .._core.format.decoding import decode_json
from .._core.sharding.dtypes import dtype_of
from .._core.tree.spec import ArraySpec
from .._io.storage.foreign_formats import SAFETENSORS_INDEX
from .._io.storage.store import Store
from ..errors import CheckpointNotFound, CorruptError, FormatError, TreeckptError
from .files import FileRange, ForeignTree, flat_array, new_address, store_window

MAX_HEADER = 100 << 20
"""Bytes of a header, at most; it is the limit of safetensors itself."""
TAGS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
"""The dtypes of safetensors."""


_SHARD = re.compile(r"(.*)-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors")
"""The name of one of several files: what they have in common, its number from 1 on, and how many there are."""


class _SafetensorsEntry(msgspec.Struct, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _header(window: FileRange) -> tuple[dict[str, msgspec.Raw], FileRange]:
    """Returns the entries of a file, and its data area."""
    length = int.from_bytes(window.read(0, 8).tobytes(), "little")
    if length > MAX_HEADER:
        raise CorruptError(
            window.label,
            expected=f"a header of at most {MAX_HEADER} bytes",
            found=f"{length}",
            hint="It is no safetensors file, or damaged",
        )
    entries = msgspec.json.decode(window.read(8, length).tobytes(), type=dict[str, msgspec.Raw])
    return entries, window.within(8 + length, window.size - 8 - length)


def read_safetensors(
    window: FileRange, *, tags: Mapping[str, str] = TAGS
) -> tuple[dict[str, LazyArray], dict[str, str]]:
    """Returns the tensors of one file by name, and its metadata.

    Args:
        tags: the dtypes that it may have, by their names there.

    Raises:
        FormatError, CorruptError: it is no such file, or damaged.
    """
    try:
        entries, data = _header(window)
        raw = entries.pop("__metadata__", None)
        metadata = msgspec.json.decode(raw, type=dict[str, str]) if raw is not None else {}
        tensors = {name: _entry(name, entry, data, tags) for name, entry in entries.items()}
    except TreeckptError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(window.label, expected="a safetensors file", found=f"{error}"[:200]) from error
    for name, of in list(metadata.items()):
        if of in entries and name not in tensors:
            tensors[name] = tensors[of]
            del metadata[name]
    return tensors, metadata


def _entry(name: str, raw: msgspec.Raw, data: FileRange, tags: Mapping[str, str]) -> LazyArray:
    entry = decode_json(raw, _SafetensorsEntry)
    dtype = tags.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"dtype {entry.dtype[:20]!r} of {name[:80]!r}, which is not known")
    start, stop = entry.data_offsets
    if any(n < 0 for n in entry.shape) or math.prod(entry.shape) * dtype_of(dtype).itemsize != stop - start:
        raise ValueError(f"{name[:80]!r} has {stop - start} bytes for shape {entry.shape} of {dtype}")
    return flat_array(ArraySpec(entry.shape, dtype), data.within(start, stop - start), new_address(stop - start))


class _SafetensorsIndex(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


def read_sharded(store: Store) -> ForeignTree:
    """Returns the tensors and the metadata of a directory, of the files in its index or of all.

    Raises:
        FormatError, CorruptError: files or tensors are missing, or named twice.
    """
    sizes = store.sizes()
    indexes = [name for name in sizes if name.endswith(SAFETENSORS_INDEX)]
    wanted = _read_index(store, indexes) if indexes else {}
    names = set(wanted.values()) if indexes else {name for name in sizes if name.endswith(".safetensors")}
    if not names:
        raise CheckpointNotFound(store.url, expected="files of safetensors", found="none that can be read")
    if not indexes:
        _check_shards(store.url, names)
    stored: dict[str, LazyArray] = {}
    metadata: dict[str, str] = {}
    for name in sorted(names):
        if name not in sizes:
            raise CorruptError(f"{store.url}/{name}", expected="a shard that the index names", found="no such file")
        tensors, more = read_safetensors(store_window(store, name, sizes))
        if twice := stored.keys() & tensors.keys():
            raise FormatError(f"{store.url}/{name}", expected="each tensor once", found=f"{min(twice)[:80]!r} again")
        stored |= tensors
        metadata |= more
    if missing := wanted.keys() - stored.keys():
        raise CorruptError(store.url, expected=f"the tensor {min(missing)[:80]!r}", found="none in its file")
    listed = {name: stored.pop(name) for name in wanted}
    beside = sorted(name for name in sizes if name.endswith(".safetensors") and name not in names)
    return ForeignTree(listed | stored, metadata, tuple(beside))


def _check_shards(url: str, names: Iterable[str]) -> None:
    """Checks that of files with numbers in their names none is missing."""
    groups: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if shard := _SHARD.fullmatch(name):
            groups.setdefault((shard[1], shard[3]), set()).add(int(shard[2]))
    for (common, count), numbers in groups.items():
        if len(numbers) < int(count):
            missing = next(n for n in itertools.count(1) if n not in numbers)
            raise CorruptError(
                f"{url}/{common}-{missing:0{len(count)}d}-of-{count}.safetensors",
                expected=f"{int(count)} files, as the names of the others say",
                found=f"{len(numbers)}, and not this one",
                hint="Load the files that are there one by one, if a part is meant",
            )


def _read_index(store: Store, names: list[str]) -> dict[str, str]:
    if len(names) > 1:
        raise FormatError(
            store.url, expected="one index", found=", ".join(sorted(names)[:4]), hint="Put each model in its own place"
        )
    data = store.read(names[0], limit=MAX_HEADER)
    try:
        files = decode_json(data, _SafetensorsIndex).weight_map
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(f"{store.url}/{names[0]}", expected="a weight_map", found=f"{error}"[:200]) from error
    # a path could lead out of the directory
    if bad := next((file for file in files.values() if "/" in file or file.startswith(".")), None):
        raise FormatError(f"{store.url}/{names[0]}", expected="files beside the index", found=f"{bad[:80]!r}")
    return files
