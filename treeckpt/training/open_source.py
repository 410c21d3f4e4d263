"""The source of a restore: a checkpoint, several checkpoints, or a tree in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..core.tree.structure import keys_of
from ..errors import MismatchError
from ..io.comm.comm import Comm
from ..io.storage.checkpoint import Checkpoint
from ..loading.match import LoadOptions
from ..loading.overlay import as_bank
from .overlay_source import OverlaySource
from .sources import CheckpointSource, RestoreSource, TreeSource, children_of

__all__ = ["is_stored", "open_source"]


def is_stored(given: Any) -> bool:
    """Whether a source is a path, a store, or several of them, and no tree in memory."""
    return isinstance(given, (str, os.PathLike, Checkpoint)) or hasattr(given, "sizes") or as_bank(given) is not None


def open_source(given: Any, comm: Comm, options: LoadOptions) -> RestoreSource:
    """Opens a path or store, several of them, or a tree.

    Raises:
        MismatchError: the root is no training state.
    """
    bank = as_bank(given)
    source: Any
    if isinstance(given, Mapping):
        source = TreeSource(given, comm, options)
    elif bank is not None:
        source = OverlaySource(bank, comm, options)
    elif isinstance(given, Checkpoint):
        source = CheckpointSource(given, comm, options)
    else:
        raise MismatchError(
            "",
            expected="a path, a store, a bank of them, or a tree as training.state gives it",
            found=f"{type(given).__name__}",
        )
    root = source.structure
    if "model" not in children_of(root) and not any(name.startswith("model/") for name in source.names):
        keys = ", ".join(map(str, keys_of(root, ""))) if root is not None else "a single leaf"
        raise MismatchError(
            source.url,
            expected="a training state, with `model` at its root",
            found=keys[:200],
            hint="Save treeckpt.training.state(model, optimizer), or load this with treeckpt.load",
        )
    return source
