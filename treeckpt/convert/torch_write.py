"""Files of torch.save, written without ever holding the tensors: the pickle first, the storages streamed into place.

The pickle is Python's own, of a tree in which each tensor is rebuilt by torch's function from a storage named by a
persistent id, as torch writes it, so `torch.load(weights_only=True)` takes it. Tied tensors and views share a storage.
"""

from __future__ import annotations

import collections
import importlib
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from ..arrays.lazy import LazyArray
from ..arrays.torch import torch_dtype
from ..core.sharding.dtypes import dtype_of
from ..core.sharding.region import Region
from ..core.tree.flatten import replace_leaves
from ..core.tree.spec import ArraySpec
from .files import c_strides
from .output import OutputPart
from .ties import Tie
from .torch_read import STORAGES
from .zip_archive import NewZipEntry, ZipLayout, lay_out

__all__ = ["TorchArchiveLayout", "build_archive"]

_KINDS = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}


class PickledStorage(msgspec.Struct, frozen=True):
    """What a persistent id stands for."""

    key: str
    dtype: str
    size: int


class PickledTensor(msgspec.Struct, eq=False):
    """A tensor in the tree that is pickled."""

    spec: ArraySpec
    storage: PickledStorage
    offset: int
    strides: tuple[int, ...]


class TorchArchiveLayout(msgspec.Struct, frozen=True):
    """One archive: its layout, and the arrays that its storages are."""

    layout: ZipLayout
    arrays: tuple[tuple[str, LazyArray], ...]
    """Path and array of each storage."""
    entries: tuple[int, ...]
    """The number of each storage's entry."""

    def literals(self, at: int = 0) -> tuple[tuple[int, bytes], ...]:
        """Its known bytes, for an archive that starts at byte `at` of its file."""
        return tuple((at + start, data) for start, data in self.layout.literals)

    def parts(self, file: int, at: int = 0) -> list[OutputPart]:
        """Its storages, for an archive that starts at byte `at` of file number `file`."""
        found: list[OutputPart] = []
        for (path, lazy), number in zip(self.arrays, self.entries, strict=True):
            crcs = tuple(at + place for place in self.layout.crcs[number])
            whole = Region.whole(lazy.spec.shape)
            found.append(OutputPart(file, at + self.layout.starts[number], path, lazy, whole, crcs))
        return found


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, PickledStorage):
            return None
        kind = _KINDS.get(obj.dtype)
        if kind is None:  # torch has no class for the dtype: a storage of bytes
            return ("storage", torch.UntypedStorage, obj.key, "cpu", obj.size * dtype_of(obj.dtype).itemsize)
        return ("storage", kind, obj.key, "cpu", obj.size)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, PickledTensor):
            return NotImplemented
        requires_grad = obj.spec.requires_grad and obj.spec.kind != "parameter"
        args = (obj.storage, obj.offset, obj.spec.shape, obj.strides, requires_grad, collections.OrderedDict())
        utilities: Any = importlib.import_module("torch._utils")
        if obj.storage.dtype in _KINDS:
            made = (utilities._rebuild_tensor_v2, args)
        else:
            made = (utilities._rebuild_tensor_v3, (*args, torch_dtype(obj.storage.dtype)))
        if obj.spec.kind != "parameter":
            return made
        inner = _PickledCall(*made)
        return utilities._rebuild_parameter, (inner, obj.spec.requires_grad, collections.OrderedDict())


class _PickledCall:
    """A call, as an argument of another one."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def build_archive(
    tree: Any, leaves: Sequence[tuple[str, Any]], ties: Mapping[str, Tie], name: str
) -> TorchArchiveLayout:
    """The archive of a tree.

    Args:
        leaves: of the tree, with their paths; the tree holds the lazy arrays among them by identity.
        ties: by path, leaves that show the array of another one.
        name: of the folder in the archive.
    """
    bases: dict[str, PickledStorage] = {}
    arrays: list[tuple[str, LazyArray]] = []
    for path, leaf in leaves:
        if isinstance(leaf, LazyArray) and path not in ties:
            bases[path] = PickledStorage(str(len(arrays)), leaf.spec.dtype, Region.whole(leaf.spec.shape).size)
            arrays.append((path, leaf))
    tensors = [
        _tensor(path, leaf, bases, ties) if isinstance(leaf, LazyArray) else _ordered(leaf) for path, leaf in leaves
    ]
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(replace_leaves(tree, iter(tensors)))
    entries = [NewZipEntry(f"{name}/data.pkl", len(stream.getvalue()), stream.getvalue())]
    entries += [NewZipEntry(f"{name}/.format_version", 1, b"1"), NewZipEntry(f"{name}/.storage_alignment", 2, b"64")]
    entries.append(NewZipEntry(f"{name}/byteorder", 6, b"little"))
    first = len(entries)
    entries += [
        NewZipEntry(f"{name}/data/{i}", Region.whole(lazy.spec.shape).size * dtype_of(lazy.spec.dtype).itemsize)
        for i, (_, lazy) in enumerate(arrays)
    ]
    entries.append(NewZipEntry(f"{name}/version", 2, b"3\n"))
    return TorchArchiveLayout(lay_out(entries), tuple(arrays), tuple(range(first, first + len(arrays))))


def _ordered(leaf: Any) -> Any:
    """A value whose pickle is the same in every process: the order of a set is not."""
    return _PickledCall(set, (sorted(leaf, key=repr),)) if type(leaf) is set else leaf


def _tensor(path: str, leaf: LazyArray, bases: Mapping[str, PickledStorage], ties: Mapping[str, Tie]) -> PickledTensor:
    tie = ties.get(path)
    if tie is None or tie.view is None:
        return PickledTensor(leaf.spec, bases[path if tie is None else tie.of], 0, c_strides(leaf.spec.shape))
    return PickledTensor(leaf.spec, bases[tie.of], tie.view.offset, tie.view.strides)
