"""What is compared on an object store: each saves a state under a prefix, loads it as a new one, and fills another.

Each is called as its own documentation shows and with its own defaults; a save returns when the store has answered,
which is when its bytes are durable. The limit is obstore itself, with 16 to 128 connections and one buffer.
"""

# pyright: reportMissingImports=false
# what it compares with may not be installed
from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import treeckpt
from tests.bench.results import RAW
from treeckpt._bench.checkpointers import is_installed
from treeckpt._bench.states import State
from treeckpt._io.storage.memory import aligned_buffer

CONNECTIONS = (16, 32, 64, 128)
RANGE = 8 << 20
"""Bytes of a request of the raw limit."""
BUCKET, REGION, KEY, SECRET = "bench", "us-east-1", "key", "secret"


class RemoteCheckpointer:
    """A library, or a way to use one.

    Args:
        endpoint: the URL of the S3 server.
    """

    name: str
    kinds: tuple[str, ...] = ("save", "load", "fill")
    modules: tuple[str, ...] = ()
    """What it needs beside treeckpt's own extras."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def prepare(self, state: State) -> State:
        """Returns what is saved, or filled; before the clock starts."""
        return state

    def save(self, prefix: str, state: State) -> None:
        """Saves under a prefix of the bucket that holds nothing."""
        raise NotImplementedError

    def load(self, prefix: str, like: State) -> State:
        """Returns a new state with the shapes of `like`; by default fills empty tensors."""
        state = {name: torch.empty_like(leaf) for name, leaf in like.items()}
        self.load_into(prefix, state)
        return state

    def load_into(self, prefix: str, state: State) -> None:
        """Fills a state; by default copies what was loaded."""
        for name, tensor in self.load(prefix, state).items():
            state[name].copy_(tensor)

    def restore(self, prefix: str) -> State:
        """Finds the newest checkpoint of a run and returns it as a new state."""
        raise NotImplementedError


class RawObstore(RemoteCheckpointer):
    """obstore with one buffer: ranges of 8 MiB in threads, and its multipart upload without hashes of the parts."""

    def __init__(self, endpoint: str, connections: int) -> None:
        super().__init__(endpoint)
        self.name = f"{RAW} {connections}"
        self._connections = connections

    def prepare(self, state: State) -> State:
        return {"bytes": torch.cat([leaf.reshape(-1) for leaf in state.values()])}

    def _store(self) -> Any:
        from obstore.store import S3Store

        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region=REGION,
            access_key_id=KEY,
            secret_access_key=SECRET,
            unsigned_payload=True,
            client_options={"allow_http": True},
        )

    def save(self, prefix: str, state: State) -> None:
        import obstore

        data = state["bytes"].numpy().view(np.uint8).data
        obstore.put(
            self._store(), prefix, data, use_multipart=True, chunk_size=RANGE, max_concurrency=self._connections
        )

    def load(self, prefix: str, like: State) -> State:
        memory = aligned_buffer(like["bytes"].nbytes, huge=True)
        self._read(prefix, np.frombuffer(memory, np.uint8))
        return {"bytes": torch.frombuffer(memory, dtype=like["bytes"].dtype)}

    def load_into(self, prefix: str, state: State) -> None:
        self._read(prefix, state["bytes"].numpy().view(np.uint8))

    def _read(self, prefix: str, into: np.ndarray) -> None:
        import obstore

        store = self._store()

        def fetch(start: int) -> None:
            piece = into[start : start + RANGE]
            data = memoryview(obstore.get_range(store, prefix, start=start, length=len(piece)))
            np.copyto(piece, np.frombuffer(data, np.uint8))

        with ThreadPoolExecutor(self._connections) as pool:
            for _ in pool.map(fetch, range(0, len(into), RANGE)):
                pass


class RemoteTreeckpt(RemoteCheckpointer):
    """treeckpt with its defaults of HTTPS: checksums written and verified, no SHA-256 of the parts of an upload."""

    name = "treeckpt"
    kinds = ("save", "load", "fill", "restore")

    def _options(self) -> dict[str, Any]:
        signed = {"access_key_id": KEY, "secret_access_key": SECRET, "unsigned_payload": True}
        return {"endpoint": self.endpoint, "region": REGION, **signed}

    def _store(self, prefix: str) -> treeckpt.ObjectStore:
        return treeckpt.ObjectStore(f"s3://{BUCKET}/{prefix}/step_00000001", **self._options())

    def save(self, prefix: str, state: State) -> None:
        treeckpt.save(self._store(prefix), state)

    def load(self, prefix: str, like: State) -> State:
        return treeckpt.load(self._store(prefix))

    def load_into(self, prefix: str, state: State) -> None:
        treeckpt.load_into(self._store(prefix), state)

    def restore(self, prefix: str) -> State:
        with treeckpt.Manager(treeckpt.ObjectRun(f"s3://{BUCKET}/{prefix}", **self._options())) as manager:
            return manager.restore()


class _RemoteDcp(RemoteCheckpointer):
    """torch.distributed.checkpoint with a writer and a reader of others."""

    def _writer(self, url: str) -> Any:
        raise NotImplementedError

    def _reader(self, url: str) -> Any:
        raise NotImplementedError

    def save(self, prefix: str, state: State) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_save(state, storage_writer=self._writer(f"s3://{BUCKET}/{prefix}"), no_dist=True)

    def load_into(self, prefix: str, state: State) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(state, storage_reader=self._reader(f"s3://{BUCKET}/{prefix}"), no_dist=True)


class S3ConnectorDcp(_RemoteDcp):
    """s3torchconnector's writer and reader for DCP; they have no option for an endpoint, but their client has."""

    name = "s3torchconnector DCP"
    modules = ("s3torchconnector", "tenacity")

    def _file_system(self, *reader_constructor: Any) -> Any:
        from s3torchconnector.dcp import S3FileSystem

        return S3FileSystem(REGION, _s3_client(self.endpoint), None, *reader_constructor)

    def _writer(self, url: str) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(REGION, url)
        writer.fs = self._file_system()
        return writer

    def _reader(self, url: str) -> Any:
        from s3torchconnector import S3ReaderConstructor
        from s3torchconnector.dcp import S3StorageReader

        ranges = S3ReaderConstructor.dcp_optimized()
        reader = S3StorageReader(REGION, url, reader_constructor=ranges)
        reader.fs = self._file_system(ranges)
        return reader


def _s3_config() -> Any:
    from s3torchconnector import S3ClientConfig

    return S3ClientConfig(force_path_style=True, unsigned=True)


def _s3_client(endpoint: str) -> Any:
    from s3torchconnector._s3client import S3Client

    return S3Client(REGION, endpoint=endpoint, s3client_config=_s3_config())


class S3ConnectorCheckpoint(RemoteCheckpointer):
    """s3torchconnector's streams for torch.save and torch.load."""

    name = "s3torchconnector torch.save"
    modules = ("s3torchconnector",)

    def _checkpoint(self) -> Any:
        from s3torchconnector import S3Checkpoint

        return S3Checkpoint(REGION, self.endpoint, _s3_config())

    def save(self, prefix: str, state: State) -> None:
        with self._checkpoint().writer(f"s3://{BUCKET}/{prefix}") as stream:
            torch.save(state, stream)

    def load(self, prefix: str, like: State) -> State:
        with self._checkpoint().reader(f"s3://{BUCKET}/{prefix}") as stream:
            return torch.load(stream)


def _fsspec_options(endpoint: str) -> dict[str, Any]:
    return {"endpoint_url": endpoint, "key": KEY, "secret": SECRET, "client_kwargs": {"region_name": REGION}}


def _file_system(endpoint: str) -> Any:
    import fsspec

    return fsspec.filesystem("s3", **_fsspec_options(endpoint))


class FsspecDcp(_RemoteDcp):
    """DCP's own writer and reader for fsspec, on s3fs; told not to sync, which would sync this machine's disks."""

    name = "fsspec DCP"
    modules = ("s3fs",)

    def _writer(self, url: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(url, sync_files=False, **_fsspec_options(self.endpoint))

    def _reader(self, url: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(url, **_fsspec_options(self.endpoint))


class FsspecTorchSave(RemoteCheckpointer):
    """torch.save and torch.load with a file of s3fs."""

    name = "fsspec torch.save"
    modules = ("s3fs",)

    def save(self, prefix: str, state: State) -> None:
        with _file_system(self.endpoint).open(f"{BUCKET}/{prefix}", "wb") as file:
            torch.save(state, file)

    def load(self, prefix: str, like: State) -> State:
        with _file_system(self.endpoint).open(f"{BUCKET}/{prefix}", "rb") as file:
            return torch.load(file)


class FsspecSafetensors(RemoteCheckpointer):
    """safetensors' functions for bytes, put and fetched as one object by s3fs."""

    name = "fsspec safetensors"
    modules = ("s3fs", "safetensors")

    def save(self, prefix: str, state: State) -> None:
        from safetensors.torch import save

        _file_system(self.endpoint).pipe_file(f"{BUCKET}/{prefix}", save(state))

    def load(self, prefix: str, like: State) -> State:
        from safetensors.torch import load

        return load(_file_system(self.endpoint).cat_file(f"{BUCKET}/{prefix}"))


_PEERS = (S3ConnectorDcp, S3ConnectorCheckpoint, FsspecDcp, FsspecTorchSave, FsspecSafetensors)


def remote_checkpointers(endpoint: str) -> list[RemoteCheckpointer]:
    """Returns the raw limits, treeckpt, and those of the others that are installed."""
    raw = [RawObstore(endpoint, connections) for connections in CONNECTIONS]
    return [*raw, RemoteTreeckpt(endpoint), *(peer(endpoint) for peer in _PEERS if not _missing(peer))]


def left_out() -> list[str]:
    """Returns a sentence for each that is not installed."""
    found = ((peer.name, _missing(peer)) for peer in _PEERS)
    return [f"{name} is left out, without {' and '.join(missing)}" for name, missing in found if missing]


def _missing(peer: type[RemoteCheckpointer]) -> list[str]:
    return [module for module in peer.modules if not is_installed(module)]
