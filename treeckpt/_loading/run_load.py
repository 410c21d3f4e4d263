"""Carries out one load on one rank: from one version of each checkpoint, with objects that have a state."""

from __future__ import annotations

from typing import Any

import msgspec

from .._arrays.expanded_tree import expand_states, in_parts_if_needed, state_tree
from .._io.comm.comm import Comm
from .._io.public_calls import gc_paused
from .._io.storage.checkpoint import Checkpoint
from ..reports import LoadReport
from .consistent_reads import on_versions
from .match import LoadOptions
from .overlay import Bank, CheckpointOverlay


def run_load(path: Any, like: Any, comm: Comm, options: LoadOptions) -> tuple[Any, LoadReport]:
    """Loads a new tree; see `treeckpt.load`."""

    def load_version(version: Checkpoint | Bank) -> tuple[Any, LoadReport]:
        overlay = CheckpointOverlay(version)
        own = overlay.salvaging(comm, options)

        def run(layouts: bool) -> tuple[Any, LoadReport]:
            wanted = like
            if like is not None:
                wanted = state_tree(
                    like,
                    rank=comm.rank,
                    namespace=options.namespace,
                    mappings=not options.allow_pickle,
                    layouts=layouts,
                )
            return overlay.load(wanted, comm, own)

        with gc_paused():
            return in_parts_if_needed(run, always=bool(options.read.once))

    return on_versions(path, load_version, together=bool(options.read.once), is_suspect=lambda found: found[1].damaged)


_BYTES = "nbytes", "read_nbytes", "unverified_nbytes"
"""What a report counts of each read."""


def run_load_into(path: Any, tree: Any, comm: Comm, options: LoadOptions) -> LoadReport:
    """Fills a tree in place; see `treeckpt.load_into`."""
    return on_versions(
        path,
        lambda version: fill_tree(CheckpointOverlay(version), tree, comm, options),
        together=bool(options.read.once),
        is_suspect=lambda report: report.damaged,
    )


def fill_tree(overlay: CheckpointOverlay, tree: Any, comm: Comm, options: LoadOptions) -> LoadReport:
    """Fills a tree in place from an open checkpoint, or several; objects and tensors in parts as `load_into` does."""
    options = overlay.salvaging(comm, options)

    def fill(layouts: bool) -> Any:
        mappings = not options.allow_pickle
        found = expand_states(tree, rank=comm.rank, namespace=options.namespace, mappings=mappings, layouts=layouts)
        if found is None:
            return overlay.load_into(tree, comm, options)
        before: list[LoadReport] = []

        def as_saved(path: str, *, arrays: bool) -> Any:
            read = msgspec.structs.replace(options.read, copy=False, once=False)
            own = msgspec.structs.replace(options, below=path, strict=False, read=read, specs_only=not arrays)
            saved, report = overlay.load(None, comm, own)
            before.append(report)
            return saved

        report, more = found.restore(as_saved, lambda target: overlay.load_into(target, comm, options))
        read = {name: sum(getattr(one, name) for one in (report, *before)) for name in _BYTES}
        return msgspec.structs.replace(report, loaded=report.loaded + more, **read)

    with gc_paused():
        return in_parts_if_needed(fill, always=bool(options.read.once))
