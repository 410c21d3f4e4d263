"""`Reader`, a StorageReader of DCP on treeckpt's format: DCP's planner says what is wanted.

`metadata_of` gives the `Metadata` that DCP plans by.
"""

from __future__ import annotations

import inspect
import io
import uuid
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .. import _api
from .._arrays.sharded import Sharded
from .._arrays.torch import torch_dtype
from .._core.format.index import INDEX_NAME
from .._core.format.records import Index
from .._io.comm.comm import as_comm
from .._io.storage.checkpoint import Checkpoint
from .._io.storage.foreign_formats import DCP_METADATA
from .._io.storage.open import open_store
from .._loading.run_load import on_one_version
from ..errors import CheckpointNotFound, TreeckptError
from ._names import Entry, entries_of, fill_tensors, load_values
from ._writer import DcpBytes, DcpWriter, WholeValue


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
        return metadata_of(_api.inspect(self._path), self._path)

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            return getattr(object.__getattribute__(self, "_read"), name)
        return object.__getattribute__(self, name)

    def __reduce__(self) -> Any:
        return SavedMetadata, (self._path,)


_FIELDS = frozenset(dcp.Metadata.__dataclass_fields__)


_DCP_READER = filesystem.FileSystemReader
_DCP_ARGUMENTS = inspect.signature(_DCP_READER)


class DcpReader(StorageReader):
    """Loads through DCP's planner from treeckpt's format, and from directories that DCP has written.

        torch.distributed.checkpoint.load(state_dict, storage_reader=treeckpt.dcp.Reader("run/step_00000100"))

    It gives each tensor as one chunk; treeckpt itself finds and reads the parts that a rank wants.

    >>> state = {"step": 0}
    >>> tc.dcp.load(state, storage_reader=tc.dcp.Reader("run/step_00000100"), no_dist=True)
    >>> state["step"]
    100

    Args:
        path: a path or URL, as for `treeckpt.load`.
        options, named: those of `FileSystemReader`, for directories of DCP.
        allow_pickle: unpickles values that were saved so, which can run any code, as DCP does with all.

    Raises:
        TypeError: an argument that `FileSystemReader` does not have.
    """

    def __init__(self, path: Any, *options: Any, allow_pickle: bool = True, **named: Any) -> None:
        super().__init__()
        _DCP_ARGUMENTS.bind(path, *options, **named)
        self.path, self.allow_pickle = path, allow_pickle
        self._options, self._named = options, named
        self._dcp: filesystem.FileSystemReader | None = None
        self.load_id = uuid.uuid4().hex

    @property
    def url(self) -> str:
        """The name of the path in messages."""
        return open_store(self.path).url

    def is_of_dcp(self) -> bool:
        """Whether DCP has written what is at the path; also False where that cannot be seen, which a read will say."""
        try:
            names = open_store(self.path).sizes()
        except (OSError, TreeckptError):
            return False
        return DCP_METADATA in names and INDEX_NAME not in names

    def reset(self, checkpoint_id: Any = None) -> None:
        """Takes another path, if one is given."""
        if checkpoint_id:
            self.path = checkpoint_id
        self._dcp, self.load_id = None, uuid.uuid4().hex

    @property
    def checkpoint_id(self) -> Any:
        """The path."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is a path or URL that treeckpt knows."""
        return DcpWriter.validate_checkpoint_id(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata, with one chunk for each tensor.

        Raises:
            CheckpointNotFound, CorruptError, FormatError: the state of the files.
        """
        if self.is_of_dcp():
            self._dcp = _DCP_READER(self.path, *self._options, **self._named)
            return self._dcp.read_metadata(*args, **kwargs)

        return on_one_version(self.path, lambda found: metadata_of(found.index, self.path, self.load_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Passes the metadata on to DCP's reader, where that reads."""
        if self._dcp is not None:
            self._dcp.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Reads what the plan lists, into the planner's tensors."""
        if self._dcp is not None:
            return self._dcp.read_data(plan, planner)
        on_one_version(self.path, lambda checkpoint: self._read(checkpoint, plan, planner))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, checkpoint: Checkpoint, plan: LoadPlan, planner: LoadPlanner) -> None:
        entries = entries_of(checkpoint.index)
        values: dict[str, ReadItem] = {}
        tensors: dict[str, list[tuple[ReadItem, torch.Tensor]]] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if name not in entries:
                raise CheckpointNotFound(name, expected="an entry of the checkpoint", found="none")
            if item.type == LoadItemType.BYTE_IO:
                values[name] = item
            else:
                tensors.setdefault(name, []).append((item, planner.resolve_tensor(item).detach()))
        comm = as_comm(None, sends_messages=False)
        wanted = {name: entries[name] for name in values}
        loaded = load_values(checkpoint, wanted, comm, allow_pickle=self.allow_pickle)
        fill_tensors(
            checkpoint, [(entries[name], _joined(entries[name], found)) for name, found in tensors.items()], comm
        )
        for found in tensors.values():
            for item, tensor in found:
                planner.commit_tensor(item, tensor)
        for name, value in loaded.items():
            _give_value(planner, values[name], value)


def _joined(entry: Entry, pieces: list[tuple[ReadItem, torch.Tensor]]) -> Any:
    """Returns the leaf that the planner's tensors for one entry form."""
    spec, (_, first) = entry.leaf.spec, pieces[0]
    assert spec is not None, "a tensor has a spec"
    if len(pieces) == 1 and tuple(first.shape) == spec.shape:
        return first
    return Sharded([tensor for _, tensor in pieces], spec.shape, [tuple(item.storage_offsets) for item, _ in pieces])


def _give_value(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Gives a planner a value: itself to DCP's default one, which unpickles, and bytes to others."""
    name = item.dest_index.fqn
    if isinstance(value, WholeValue):
        value = value.value
    if isinstance(value, DcpBytes):
        planner.load_bytes(item, io.BytesIO(value.data))
    elif not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        planner.load_bytes(item, data)
    elif planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], value)
    else:
        planner.state_dict[name] = value
