"""safetensors: one file, or a directory with `model.safetensors.index.json`, as Hugging Face has them.

Names are flat. The metadata has ties: those that treeckpt writes under one key (`TIES`), and those of
`safetensors.torch.save_model`. What the library of safetensors refuses is refused.
"""

from __future__ import annotations

import itertools
import json
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

MAX_HEADER = 100_000_000
"""Bytes of a header, at most; it is the limit of safetensors itself."""
METADATA = "__metadata__"
"""The key of a header that is no tensor's."""
TIES = "treeckpt.ties"
"""The key of the metadata with the names of tied arrays, as JSON: each with the name of the tensor that it shows."""
ONE_FILE = "model.safetensors"
"""The file that transformers loads of a directory, whatever else is there."""
PACKED = "float4_e2m1fn_x2"
"""The dtype that has two elements of the file in one of its own, in the last dimension."""
TAGS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "F4": PACKED, "C64": "complex64",
}  # fmt: skip
"""The dtypes of safetensors that torch has too."""


_TAG_OF = {dtype: tag for tag, dtype in TAGS.items()}
_SHARD = re.compile(r"(.*)-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors")
"""The name of one of several files: what they have in common, its number from 1 on, and how many there are."""


def tag_of(spec: ArraySpec) -> str | None:
    """Returns the dtype of safetensors that an array has in a file; None where it has none."""
    return None if spec.dtype == PACKED and not spec.shape else _TAG_OF.get(spec.dtype)


class _SafetensorsEntry(msgspec.Struct, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_FIELDS = (METADATA, *_SafetensorsEntry.__struct_fields__)
"""The names that stand once in a header, or in an entry of it."""


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
    text = window.read(8, length).tobytes()
    entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    tensors = len(entries) - (METADATA in entries)
    most = {name: 1 if name == METADATA else tensors for name in _FIELDS}
    if any(text.count(f'"{name}"'.encode()) > count for name, count in most.items()):
        _check_fields(json.loads(text, object_pairs_hook=tuple))
    return entries, window.within(8 + length, window.size - 8 - length)


def _check_fields(header: tuple[tuple[str, Any], ...]) -> None:
    """Refuses a header in which the metadata, or a field of an entry, stands twice.

    Args:
        header: its JSON, with each object as a tuple of its names and values.
    """
    tensors = [(name, entry) for name, entry in header if name != METADATA and isinstance(entry, tuple)]
    fields = [(name, [field for field, _ in entry]) for name, entry in tensors]
    for place, names in (("the header", [name for name, _ in header if name == METADATA]), *fields):
        if twice := next((name for name in _FIELDS if names.count(name) > 1), None):
            raise ValueError(f"{twice!r} twice in {place[:80]!r}")


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
        raw, data = _header(window)
        given = raw.pop(METADATA, None)
        metadata = (msgspec.json.decode(given, type=dict[str, str] | None) if given is not None else None) or {}
        entries = {name: decode_json(entry, _SafetensorsEntry) for name, entry in raw.items()}
        tensors = {name: _array(name, entry, data, tags) for name, entry in entries.items()}
        ties = _take_ties(metadata, tensors)
    except TreeckptError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(window.label, expected="a safetensors file", found=f"{error}"[:200]) from error
    _check_ranges(entries, data)
    return tensors | {name: tensors[of] for name, of in ties.items()}, metadata


def _array(name: str, entry: _SafetensorsEntry, data: FileRange, tags: Mapping[str, str]) -> LazyArray:
    dtype, shape = tags.get(entry.dtype), entry.shape
    if dtype is None:
        raise ValueError(f"dtype {entry.dtype[:20]!r} of {name[:80]!r}, which is not known")
    if dtype == PACKED:
        if not shape or shape[-1] % 2:
            raise ValueError(f"{name[:80]!r} of {entry.dtype} in shape {shape}, whose last dimension is not even")
        shape = (*shape[:-1], shape[-1] // 2)
    start, stop = entry.data_offsets
    if any(n < 0 for n in shape) or math.prod(shape) * dtype_of(dtype).itemsize != stop - start:
        raise ValueError(f"{name[:80]!r} has {stop - start} bytes for shape {shape} of {dtype}")
    return flat_array(ArraySpec(shape, dtype), data.within(start, stop - start), new_address(stop - start))


def _check_ranges(entries: Mapping[str, _SafetensorsEntry], data: FileRange) -> None:
    """Refuses tensors that overlap, and bytes that no tensor has: a name that stands twice leaves such bytes.

    Raises:
        CorruptError: naming the first tensor that does not begin where the one before it ends.
    """
    reached = 0
    for (start, stop), name in sorted((entry.data_offsets, name) for name, entry in entries.items()):
        if start != reached:
            raise _wrong_range(data, f"{name[:80]!r} to begin at byte {reached} of the data", f"byte {start}")
        reached = stop
    if reached != data.size:
        raise _wrong_range(data, f"{reached} bytes of data, as its tensors take", f"{data.size}")


def _wrong_range(data: FileRange, expected: str, found: str) -> CorruptError:
    return CorruptError(
        data.label,
        expected=expected,
        found=found,
        hint="The library of safetensors refuses such a file too: tensors overlap, a name stands twice, or the file "
        "was cut short or written over",
    )


def _take_ties(metadata: dict[str, str], tensors: Mapping[str, LazyArray]) -> dict[str, str]:
    """Removes ties from the metadata of a file; returns the tensor that each of their names shows.

    Raises:
        ValueError: ties of a name that a tensor has, or to no tensor.
    """
    ties = msgspec.json.decode(metadata.pop(TIES, "{}"), type=dict[str, str])
    if wrong := next((name for name, of in ties.items() if name in tensors or of not in tensors), None):
        raise ValueError(f"{TIES!r} with {wrong[:80]!r}, a tie of {ties[wrong][:80]!r}")
    for name, of in list(metadata.items()):
        if of in tensors and name not in tensors and _is_parameter_tie(name, of):
            ties[name] = metadata.pop(name)
    return ties


def _is_parameter_tie(name: str, of: str) -> bool:
    """Returns whether `save_model` writes a name so: it keeps the first of the names of a parameter, by their order.

    Other metadata may be equal to the name of a tensor. Only names in modules that end alike are ties.
    """
    (_, dot, last), (_, other_dot, other_last) = name.rpartition("."), of.rpartition(".")
    return bool(dot and other_dot) and last == other_last and of < name


class _SafetensorsIndex(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


def read_sharded(store: Store) -> ForeignTree:
    """Returns the tensors and the metadata of a directory: of its one file, of the files in its index, or of all.

    Raises:
        FormatError, CorruptError: files or tensors are missing, or named twice.
    """
    sizes = store.sizes()
    files = {name for name in sizes if name.endswith(".safetensors")}
    indexes = [name for name in sizes if name.endswith(SAFETENSORS_INDEX)]
    wanted: dict[str, str] = {}
    if ONE_FILE in files:
        names = {ONE_FILE}
    elif indexes:
        wanted = _read_index(store, indexes)
        names = set(wanted.values())
    else:
        names = files
        _check_shards(store.url, names)
    if not names:
        raise CheckpointNotFound(store.url, expected="files of safetensors", found="none that can be read")
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
    stale = [name for name in indexes if not wanted and not _agrees(store, name, stored)]
    return ForeignTree(listed | stored, metadata, tuple(sorted([*stale, *(files - names)])))


def _agrees(store: Store, index: str, stored: Mapping[str, LazyArray]) -> bool:
    """Returns whether an index beside the one file names nothing but tensors in it."""
    try:
        places = _read_index(store, [index])
    except FormatError:
        return False
    return places.keys() <= stored.keys() and set(places.values()) <= {ONE_FILE}


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
