"""Contenders that are measured only where installed: Orbax, which takes JAX arrays, and torch_checkpointing."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .meter import sync_files
from .states import State

__all__ = ["SyncOrbax", "SyncTorchCheckpointing"]


class SyncOrbax:
    """Orbax's checkpointer for trees, waited for. JAX's arrays cannot be filled in place."""

    name = "orbax"
    kinds: tuple[str, ...] = ("save", "load")

    def __init__(self) -> None:
        self._ocp: Any = importlib.import_module("orbax.checkpoint")
        self._jax: Any = importlib.import_module("jax")
        logging.getLogger("absl").setLevel(logging.ERROR)

    def prepare(self, state: State) -> Any:
        """JAX arrays."""
        return self._jax.block_until_ready({name: self._jax.numpy.asarray(t.numpy()) for name, t in state.items()})

    def save(self, directory: Path, prepared: Any) -> None:
        """Several of its metadata files it does not sync itself."""
        with self._ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory.absolute() / "step", prepared)
            checkpointer.wait_until_finished()
        sync_files(directory)

    def load(self, directory: Path, like: State) -> State:
        """Into arrays of the shapes of `like`."""
        device = self._jax.sharding.SingleDeviceSharding(self._jax.devices()[0])
        target = {
            name: self._jax.ShapeDtypeStruct(tuple(leaf.shape), np.float32, sharding=device)
            for name, leaf in like.items()
        }
        with self._ocp.StandardCheckpointer() as checkpointer:
            made = self._jax.block_until_ready(checkpointer.restore(directory.absolute() / "step", target))
        return {name: torch.from_dlpack(array) for name, array in made.items()}

    def load_into(self, directory: Path, state: State) -> None:
        """Never called: see `kinds`."""
        raise NotImplementedError("JAX's arrays cannot be filled")


class SyncTorchCheckpointing:
    """torch_checkpointing, saving in the foreground; direct I/O is off, as it fails on ext4, and it syncs nothing."""

    name = "torch_checkpointing"
    kinds: tuple[str, ...] = ("save", "load", "fill")

    def __init__(self) -> None:
        package: Any = importlib.import_module("torch_checkpointing")
        storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
        config = package.CheckpointManager.Config.with_sync_save()
        config.storage_config = storage.LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager: Any = config.build()

    def prepare(self, state: State) -> State:
        """As it is."""
        return state

    def save(self, directory: Path, prepared: State) -> None:
        """One item."""
        self._manager.save(str(directory / "step"), {"state": prepared})
        sync_files(directory)

    def load(self, directory: Path, like: State) -> State:
        """Into new tensors, as it has no other way for tensors."""
        state = {name: torch.empty_like(leaf) for name, leaf in like.items()}
        return self._load(directory, state)

    def _load(self, directory: Path, state: State) -> State:
        return dict(self._manager.load(str(directory / "step"), into={"state": state})["state"])

    def load_into(self, directory: Path, state: State) -> None:
        """Its own way; what comes back in other tensors is copied."""
        for name, made in self._load(directory, state).items():
            if made.data_ptr() != state[name].data_ptr():
                state[name].copy_(made)
