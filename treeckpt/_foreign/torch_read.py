"""Files of torch.save, read without torch.load: the pickle as data, the storages left in the file.

A tensor becomes a lazy array over its storage's entry of the zip archive; tensors over one storage are found to be
ties and views of each other by the address that the storage is given. Entries of the archive are not compressed, so
each is a range of the file.

hfai.checkpoint.save writes such a file for each rank, `PART_000.pt` ...: each part has some of the tensors whole, and
its share of every large one, `view(-1).chunk(n)[rank]`, with the shape beside it. What comes out is what
hfai.checkpoint.load gives, but for `__version__` and `__nshards__`.
"""

from __future__ import annotations

import bisect
import math
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from .._arrays.base import LazyArray
from .._core.sharding.dtypes import dtype_of, numpy_dtype
from .._core.sharding.region import Region, memory_order
from .._core.tree.dict_attributes import copy_attributes
from .._core.tree.spec import ArraySpec
from .._core.tree.structure import TensorNode
from .._core.tree.tensor_parts import TensorParts
from .._core.tree.value_codec import encode_value
from .._io.storage.foreign_formats import HFAI_PART
from .._io.storage.store import Store
from ..errors import CheckpointNotFound, CorruptError, FormatError, visible
from .checksums import ArchiveChecksums, EntryChecksum
from .files import FileRange, flat_of, from_ranges, store_window, strided_array, with_spec
from .pickle_reader import Constructors, Symbol, UnbuiltObject, brief, read_pickle
from .pickle_values import PLAIN, RefusedLeaf, build_tree, dtype_named, sizes_of

MAX_ENTRIES = 1 << 22
"""Entries of an archive, at most."""


class _RangeFile:
    """A window as zipfile reads it."""

    def __init__(self, window: FileRange) -> None:
        self._window, self._at = window, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, (0, self._at, self._window.size)[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._window.size - self._at)
        count = left if count < 0 else min(count, left)
        data = self._window.read(self._at, count).tobytes() if count else b""
        self._at += count
        return data


class ZipEntry(msgspec.Struct, frozen=True):
    """An entry of an archive that is read."""

    window: FileRange
    """The bytes of its contents."""
    crc: int
    """The CRC-32 of its contents, as the archive's directory has it."""


def find_entries(window: FileRange) -> dict[str, ZipEntry]:
    """Finds the contents of a zip archive's entries, by name.

    Raises:
        FormatError: no zip archive, or one with compressed or encrypted entries.
        CorruptError: entries that do not lie in it.
    """
    reader: Any = _RangeFile(window)
    try:
        with zipfile.ZipFile(reader) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, struct.error, EOFError) as error:
        raise FormatError(
            window.label,
            expected="a zip archive, as torch.save writes it",
            found=f"{error}"[:200] or "none",
            hint="It is damaged, or older than torch 1.6: load it there and save it anew",
        ) from error
    if len(infos) > MAX_ENTRIES:
        raise FormatError(window.label, expected=f"at most {MAX_ENTRIES} entries", found=f"{len(infos)}")
    heads = _Heads(window, infos)
    return {info.filename: ZipEntry(_contents(heads, info), info.CRC) for info in infos}


NEAR_NBYTES = 16 << 10
"""Bytes between the beginnings of two entries, at most, whose heads are read together, with what is between them."""
HEADS_NBYTES = 256 << 10
"""Bytes that are read at a time where entries are small."""


class _Heads:
    """Reads what precedes the contents of entries, many at a time where they lie close together."""

    def __init__(self, window: FileRange, infos: Iterable[zipfile.ZipInfo]) -> None:
        self.window = window
        self._starts = sorted(info.header_offset for info in infos)
        self._block, self._first = b"", 0

    def read(self, at: int) -> bytes:
        """Returns the 30 bytes of a head."""
        if not self._first <= at <= self._first + len(self._block) - 30:
            last = at
            for number in range(bisect.bisect(self._starts, at), len(self._starts)):
                start = self._starts[number]
                if start - last > NEAR_NBYTES or start - at > HEADS_NBYTES or start + 30 > self.window.size:
                    break
                last = start
            self._block, self._first = self.window.read(at, last + 30 - at).tobytes(), at
        return self._block[at - self._first : at - self._first + 30]


def _contents(heads: _Heads, info: zipfile.ZipInfo) -> FileRange:
    window = heads.window
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
        raise FormatError(
            window.label, expected="entries that are stored as they are", found=f"{info.filename[:80]!r}, packed"
        )
    head = heads.read(info.header_offset)
    if head[:4] != b"PK\3\4":
        raise CorruptError(window.label, expected=f"entry {info.filename[:80]!r}", found="no such entry at its place")
    # torch pads the extra field here, to align the data; the directory has another length
    name, extra = struct.unpack_from("<HH", head, 26)
    return window.within(info.header_offset + 30 + name + extra, info.file_size)


class EntryPlace(msgspec.Struct, frozen=True):
    """Where an entry lies in its archive."""

    start: int
    nbytes: int
    crc: int
    """The place of the CRC-32 of its contents in the directory of the archive."""
    copies: tuple[int, ...]
    """The places of other copies of it, which no reader looks at."""
    is_read: bool
    """Whether its contents say what the arrays are."""


def entry_places(window: FileRange) -> list[EntryPlace]:
    """Returns where the entries of an archive lie, of which `find_entries` has found nothing wrong."""
    reader: Any = _RangeFile(window)
    found: list[EntryPlace] = []
    with zipfile.ZipFile(reader) as archive:
        heads, record = _Heads(window, archive.infolist()), archive.start_dir
        for info in archive.infolist():
            contents = _contents(heads, info)
            start, stop = contents.start - window.start, contents.start - window.start + contents.size
            # in the header, and behind the contents where they were written before it was known
            copies = (info.header_offset + 14, *((stop + 4,) if info.flag_bits & 8 else ()))
            is_read = info.filename.endswith(_READ_ENTRIES)
            found.append(EntryPlace(start, contents.size, record + 16, copies, is_read))
            record += 46 + sum(struct.unpack("<HHH", window.read(record + 28, 6).tobytes()))
    return found


_READ_ENTRIES = ("/data.pkl", "/byteorder")
"""The ends of the names of the entries that are read to find the arrays in others."""
STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
"""The classes of storages that have a dtype, as torch names them in files."""
MAX_DIMS = 1000
"""Dimensions of a tensor that are looked at; `ForeignCheckpoint.contents` refuses fewer by the path of the leaf."""
MAX_KEY = 1000
"""Characters of the name of a storage."""
_DEVICE = re.compile(r"[a-z]{2,20}(:\d{1,5})?")


class TorchFileStorage(msgspec.Struct, frozen=True):
    """An entry of the archive with a storage's bytes. `dtype` is empty where the tensor has it."""

    entry: EntryChecksum
    dtype: str
    size: int
    """The number of elements, of bytes where there is no dtype."""
    device: str | None
    """Where it was, as torch names devices; None is the host."""

    def __repr__(self) -> str:
        return f"a storage of {self.dtype or 'bytes'}"


class _TorchArchive:
    """The entries and storages of one file."""

    def __init__(self, window: FileRange, sums: ArchiveChecksums) -> None:
        self.entries = {
            name: sums.sum_of(entry.window, entry.crc, name) for name, entry in find_entries(window).items()
        }
        names = [name for name in self.entries if name.endswith("/data.pkl")]
        if len(names) != 1 or any("/code/" in name or name.endswith("/constants.pkl") for name in self.entries):
            raise FormatError(
                window.label,
                expected="a file of torch.save",
                found="a TorchScript module" if names else "an archive of something else",
                hint="Save the state dict with torch.save",
            )
        self.prefix = names[0].removesuffix("data.pkl")
        self._storages: dict[str, TorchFileStorage] = {}
        order = self.entries.get(f"{self.prefix}byteorder")
        # older versions of torch write no such entry
        text = order.read(0, min(order.window.size, 16)).tobytes() if order is not None else b"little"
        if text != b"little":
            raise FormatError(
                window.label,
                expected="little-endian data",
                found=f"{visible(text.decode('ascii', 'backslashreplace'))}-endian",
                hint="Load it with torch and save it anew on a little-endian machine",
            )

    def storage(self, identity: Any) -> TorchFileStorage | UnbuiltObject:
        """Resolves a persistent id; a storage of a class without a dense dtype is an `UnbuiltObject`."""
        if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
            raise ValueError(f"a persistent id {brief(identity)}")
        _, kind, key, device, size = identity
        module, _, name = kind.text.partition(" ") if isinstance(kind, Symbol) else ("", "", "")
        dtype = STORAGES.get(name)
        if (dtype is None and name != "UntypedStorage") or module not in ("torch", "torch.storage"):
            named = kind.text if isinstance(kind, Symbol) else brief(kind)
            return UnbuiltObject(named, (), why="a storage of no dtype that is known")
        if not isinstance(key, str) or len(key) > MAX_KEY or type(size) is not int or size < 0:
            raise ValueError(f"a storage {brief(key)} of {brief(size)} elements")
        if key not in self._storages:
            entry = self.entries.get(f"{self.prefix}data/{key}")
            nbytes = size * (dtype_of(dtype).itemsize if dtype else 1)
            if entry is None:
                raise ValueError(f"a storage {key:.40} that is not in the file")
            # raises where the entry has fewer bytes than the storage
            entry.window.within(0, nbytes)
            entry.is_storage = True
            where = device if isinstance(device, str) and _DEVICE.fullmatch(device) and device != "cpu" else None
            self._storages[key] = TorchFileStorage(entry, dtype or "", size, where)
        storage = self._storages[key]
        if (storage.dtype, storage.size) != (dtype or "", size):
            raise ValueError(f"storage {key:.40} with two sizes or dtypes")
        return storage


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = False, hooks: Any = None,
    metadata: Any = None, *, dtype: str = "",
) -> LazyArray:  # fmt: skip
    """Returns a tensor over a storage; `dtype` for one of bytes."""
    if not isinstance(storage, TorchFileStorage) or not (dtype or storage.dtype):
        raise ValueError(f"a tensor over {storage!r:.80}")
    listed = isinstance(shape, (tuple, list)) and isinstance(strides, (tuple, list)) and len(shape) <= MAX_DIMS
    numbers = (offset, *shape, *strides) if listed and len(strides) <= MAX_DIMS else (None,)
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers) or len(shape) != len(strides):
        raise _misplaced(storage, f"a tensor of shape {brief(shape)}, strides {brief(strides)} at {brief(offset)}")
    order = memory_order(shape, strides)
    spec = ArraySpec(
        tuple(shape),
        dtype or storage.dtype,
        device=storage.device,
        requires_grad=requires_grad is True,
        order=order,
    )
    itemsize = dtype_of(spec.dtype).itemsize
    size = storage.entry.window.size // itemsize
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if 0 not in shape and offset + reach > size:
        raise _misplaced(storage, f"a tensor of {reach} elements from {offset} on in a storage of {size}")
    # an expanded tensor is written out in full: more than a row expanded to a batch is refused
    if math.prod(map(float, shape)) > 1024 * max(reach, 1 << 20):
        raise _misplaced(storage, f"a tensor of shape {spec.shape} over {reach} elements")
    entry = storage.entry
    flat = flat_of(entry.read, itemsize)
    made = strided_array(spec, flat, offset, tuple(strides), entry.address, window=entry.window)
    return _resolved(made, metadata) if metadata else made


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any,
    metadata: Any = None,
) -> LazyArray:  # fmt: skip
    return _tensor(
        storage,
        offset,
        shape=shape,
        strides=strides,
        requires_grad=requires_grad,
        hooks=hooks,
        metadata=metadata,
        dtype=dtype_named(dtype),
    )


def _misplaced(storage: TorchFileStorage, found: str) -> CorruptError:
    return CorruptError(
        storage.entry.window.label,
        expected="tensors that lie in their storages",
        found=found,
        hint="The file is damaged, or not what its name says",
    )


def _resolved(made: LazyArray, metadata: Any) -> LazyArray:
    """Returns a conjugate or negative view with its elements computed."""
    if not isinstance(metadata, dict) or set(metadata) - {"conj", "neg"}:
        raise ValueError(f"a tensor with {brief(metadata)}")
    element = numpy_dtype(made.spec.dtype)

    def read(region: Region) -> np.ndarray:
        raw = made.read(region)
        data = np.ascontiguousarray(raw).view(element)
        data = np.conj(data) if metadata.get("conj") else data
        return np.ascontiguousarray(-data if metadata.get("neg") else data).view(raw.dtype).reshape(region.shape)

    return LazyArray(made.spec, read)


def _parameter(data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None) -> Any:
    if not isinstance(data, (LazyArray, TensorParts)):
        raise ValueError("a parameter that is no tensor")
    return _with(data, kind="parameter", requires_grad=requires_grad is True)


def _with(made: LazyArray | TensorParts, **changes: Any) -> LazyArray | TensorParts:
    if isinstance(made, TensorParts):
        return TensorParts(msgspec.structs.replace(made.node, **changes), made.parts)
    return with_spec(made, msgspec.structs.replace(made.spec, **changes))


_SPARSE = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
"""The parts of sparse tensors, by the name of their layout."""


def _sparse(layout: Any, data: Any) -> TensorParts:
    """Returns a sparse tensor in parts; their elements are checked when a tensor is made of them."""
    module, _, name = layout.text.partition(" ") if isinstance(layout, Symbol) else ("", "", "")
    keys = _SPARSE.get(name) if module == "torch" else None
    if keys is None or not isinstance(data, tuple) or len(data) - len(keys) not in (1, 2):
        raise ValueError(f"a tensor of the layout {brief(layout)}")
    parts = dict(zip(keys, data, strict=False))
    if not all(isinstance(part, LazyArray) for part in parts.values()):
        raise ValueError(f"a tensor of the layout {name} without its parts")
    context = {"is_coalesced": data[-1] is True} if name == "sparse_coo" else None
    node = TensorNode(
        f"torch:{name}",
        encode_value(context, ""),
        shape=sizes_of(data[len(keys)], "a sparse tensor"),
        strides=None,
        kind="tensor",
        requires_grad=False,
        layout=None,
        keys=keys,
        children=(),
    )
    return TensorParts(node, parts)


_REBUILD: Constructors = {
    "torch._utils _rebuild_tensor": _tensor,
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_tensor_v3": _tensor_v3,
    "torch._utils _rebuild_parameter": _parameter,
    "torch._utils _rebuild_parameter_with_state": _parameter,
    "torch._utils _rebuild_device_tensor_from_cpu_tensor": lambda data, *_: data,
    "torch._utils _rebuild_sparse_tensor": _sparse,
    "torch._utils _rebuild_sparse_csr_tensor": _sparse,
}
_CLASSES = ("torch Tensor", "torch.nn.parameter Parameter", "torch.nn.parameter Buffer")


def _of_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Returns a tensor with attributes, such as a buffer; all but the kind are dropped."""
    make = _REBUILD.get(function.text) if isinstance(function, Symbol) else None
    named = kind.text if isinstance(kind, Symbol) else ""
    if make is None or named not in _CLASSES:
        raise ValueError(f"a tensor of the class {brief(named.replace(' ', '.') or kind)}")
    made = make(*args)
    buffer = isinstance(state, dict) and state.get("_is_buffer") is True
    return _with(made, kind="buffer") if buffer and isinstance(made, (LazyArray, TensorParts)) else made


_CONSTRUCTORS: Constructors = {**PLAIN, **_REBUILD, "torch._tensor _rebuild_from_type_v2": _of_type}


def read_torch(window: FileRange, sums: ArchiveChecksums, refused: list[RefusedLeaf] | None = None) -> Any:
    """Returns the tree in a file of torch.save, with its tensors left in the file.

    Raises:
        FormatError, CorruptError: it is no such file, or damaged.
        TreeError: it holds an object that only its own code could make; noted in `refused` if that is given.
    """
    archive = _TorchArchive(window, sums)
    pickled = archive.entries[f"{archive.prefix}data.pkl"]
    # before it is read: changed bytes could say anything
    pickled.check()
    read = read_pickle(pickled.window, _CONSTRUCTORS, persistent=archive.storage)
    return build_tree(read, window.label, refused)


VERSION = "2.0.0"
"""The version of the parts of hfai.checkpoint.save that is read."""
_OWN_KEYS = ("model", "optimizer", "__version__", "__nshards__")


class HfaiParts:
    """The parts of one checkpoint, in order."""

    def __init__(self, store: Store, sums: ArchiveChecksums, refused: list[RefusedLeaf]) -> None:
        self.store = store
        files = store.sizes()
        names = sorted((int(match[1]), name) for name in files if (match := HFAI_PART.fullmatch(name)))
        if not names:
            raise CheckpointNotFound(store.url, expected="PART_000.pt", found="none", hint="Check the path")
        if [number for number, _ in names] != list(range(len(names))):
            raise self._wrong(f"PART_000.pt to PART_{len(names) - 1:03d}.pt", f"{[name for _, name in names][:8]}")
        self.states: list[Any] = []
        for _, name in names:
            self.states.append(read_torch(store_window(store, name, files), sums, refused))
        self._check([name for _, name in names])

    def _wrong(self, expected: str, found: str) -> CorruptError:
        return CorruptError(
            self.store.url,
            expected=expected,
            found=found,
            hint="Parts of another save may lie here, or some are missing; hfai writes no record that could tell",
        )

    def _check(self, names: Sequence[str]) -> None:
        for number, (name, state) in enumerate(zip(names, self.states, strict=True)):
            label = f"{self.store.url}/{name}"
            if not isinstance(state, dict) or not {"model", "optimizer"} <= state.keys():
                raise FormatError(label, expected="a part of hfai.checkpoint.save", found=f"{type(state).__name__}")
            if (version := state.get("__version__", "1.0.0")) != VERSION:
                raise FormatError(label, expected=f"version {VERSION}", found=brief(version))
            if state.get("__nshards__") != len(self.states):
                raise self._wrong(f"{len(self.states)} parts in part {number}", f"{brief(state.get('__nshards__'))}")
            for key in ("model", "optimizer"):
                if not isinstance(state[key], list) or len(state[key]) != len(self.states[0][key]):
                    raise self._wrong(f"{len(self.states[0][key])} entries of {key} in each part", f"part {number}")
                if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in state[key]):
                    raise FormatError(label, expected="pairs of whole and large tensors", found=f"{key}")

    def _large(self, pairs: Sequence[tuple[Any, Any]]) -> dict[Any, LazyArray]:
        """Assembles the tensors that are split over all parts."""
        found: dict[Any, list[tuple[Any, Any]]] = {}
        for _, large in pairs:
            if not isinstance(large, dict) or any(not isinstance(v, tuple) or len(v) != 2 for v in large.values()):
                raise FormatError(self.store.url, expected="shapes and shares of large tensors", found=brief(large))
            for name, share in large.items():
                found.setdefault(name, []).append(share)
        return {name: self._joined(name, shares) for name, shares in found.items()}

    def _joined(self, name: Any, shares: Sequence[tuple[Any, Any]]) -> LazyArray:
        shapes = {sizes_of(shape, self.store.url) for shape, _ in shares}
        arrays = [array for _, array in shares]
        kinds = {array.spec.dtype for array in arrays if isinstance(array, LazyArray) and len(array.spec.shape) == 1}
        if len(shapes) != 1 or len(kinds) != 1 or not all(isinstance(array, LazyArray) for array in arrays):
            raise self._wrong(f"shares of one shape and dtype of {brief(name)}", f"{brief(sorted(shapes))}, {kinds}")
        spec = ArraySpec(shapes.pop(), kinds.pop(), device=arrays[0].spec.device)
        dtype_of(spec.dtype)
        return from_ranges(spec, arrays, f"{brief(name)}: {self.store.url}")

    def _united(self, whole: dict[Any, Any], large: dict[Any, Any]) -> dict[Any, Any]:
        if twice := sorted(map(str, whole.keys() & large.keys())):
            raise CorruptError(self.store.url, expected="each tensor once", found=f"{twice[:3]} twice")
        return whole | large

    def model(self, number: int) -> dict[Any, Any]:
        """Returns the state dict of model number `number`."""
        pairs = [state["model"][number] for state in self.states]
        whole: dict[Any, Any] = {}
        for params, _ in pairs:
            if not isinstance(params, dict):
                raise FormatError(self.store.url, expected="state dicts of models", found=brief(params))
            whole |= params
        united, first = self._united(whole, self._large(pairs)), pairs[0][0]
        return copy_attributes(first, OrderedDict(united)) if type(first) is OrderedDict else united

    def optimizer(self, number: int) -> dict[Any, Any]:
        """Returns the state dict of optimizer number `number` as torch has it; param groups are in every part."""
        pairs = [state["optimizer"][number] for state in self.states]
        first = pairs[0][0]
        state: dict[Any, Any] = {}
        for opt, _ in pairs:
            if not isinstance(opt, dict) or not isinstance(opt.get("state"), dict):
                raise FormatError(self.store.url, expected="state dicts of optimizers", found=f"{type(first).__name__}")
            state |= opt["state"]
        for key, tensor in self._large(pairs).items():
            if not isinstance(key, tuple) or len(key) != 2 or not isinstance(state.get(key[0]), dict):
                raise FormatError(self.store.url, expected="the parameter and name of a moment", found=brief(key))
            state[key[0]] = self._united(state[key[0]], {key[1]: tensor})
        return first | {"state": {key: state[key] for key in sorted(state, key=_order)}}


def _order(key: Any) -> tuple[bool, Any]:
    return (False, key) if type(key) is int else (True, str(key))


def read_hfai(store: Store, sums: ArchiveChecksums, refused: list[RefusedLeaf]) -> dict[str, Any]:
    """Returns the state in a directory of hfai.checkpoint.save, with its tensors left in the files.

    Raises:
        CheckpointNotFound, FormatError, CorruptError: there is none, or its parts do not fit together.
    """
    parts = HfaiParts(store, sums, refused)
    first = parts.states[0]
    state: dict[str, Any] = {}
    for key, make in (("model", parts.model), ("optimizer", parts.optimizer)):
        made = [make(number) for number in range(len(first[key]))]
        if made or key == "model":
            state[key] = made[0] if len(made) == 1 else made
    return state | {key: value for key, value in first.items() if key not in _OWN_KEYS}
