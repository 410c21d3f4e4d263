"""DCP's `Metadata` of a checkpoint of treeckpt."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from ..api import inspect
from ..arrays.torch import torch_dtype
from ..core.format.records import Index
from .names import Entry, entries_of


def metadata_of(index: Index, path: Any, load_id: str | None = None) -> dcp.Metadata:
    """Returns the metadata: one chunk for each tensor, as treeckpt itself finds the parts that a reader wants."""
    entries = entries_of(index)
    found = {
        name: _of_tensor(entry) if entry.is_tensor else dcp.BytesStorageMetadata() for name, entry in entries.items()
    }
    planned = {name: entry.path for name, entry in entries.items()}
    return dcp.Metadata(found, planned, {}, dcp.StorageMeta(path, index.save_id, load_id))


def _of_tensor(entry: Entry) -> dcp.TensorStorageMetadata:
    spec = entry.leaf.spec
    assert spec is not None, "a tensor has a spec"
    size = torch.Size(spec.shape)
    chunk = dcp.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    properties = dcp.TensorProperties(torch_dtype(spec.dtype, entry.leaf.path), requires_grad=spec.requires_grad)
    return dcp.TensorStorageMetadata(properties, size, [chunk])


class SavedMetadata(dcp.Metadata):
    """The metadata of a checkpoint that was just saved; read from its index when a field is first asked for."""

    def __init__(self, path: Any) -> None:
        self._path = path

    @cached_property
    def _read(self) -> dcp.Metadata:
        return metadata_of(inspect(self._path), self._path)

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            return getattr(object.__getattribute__(self, "_read"), name)
        return object.__getattribute__(self, name)

    def __reduce__(self) -> Any:
        return SavedMetadata, (self._path,)


_FIELDS = frozenset(dcp.Metadata.__dataclass_fields__)
