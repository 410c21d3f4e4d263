"""Directories of hfai.checkpoint.save: `PART_000.pt` ..., one file of torch.save for each rank.

Each part has some of the tensors whole, and its share of every large one: `view(-1).chunk(n)[rank]`, with the shape
beside it. What comes out is what hfai.checkpoint.load gives, but for `__version__` and `__nshards__`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from .._arrays.base import LazyArray
from .._core.sharding.dtypes import dtype_of
from .._core.tree.dict_attributes import copy_attributes
from .._core.tree.spec import ArraySpec
from .._io.storage.foreign_formats import HFAI_PART
from .._io.storage.store import Store
from ..errors import CheckpointNotFound, CorruptError, FormatError
from .checksums import ArchiveStorages
from .dcp_read import sizes_of
from .files import from_ranges, store_window
from .pickle_reader import brief
from .pickle_values import RefusedLeaf
from .torch_read import read_torch

PART = HFAI_PART
VERSION = "2.0.0"
_OWN_KEYS = ("model", "optimizer", "__version__", "__nshards__")


class HfaiParts:
    """The parts of one checkpoint, in order."""

    def __init__(self, store: Store, storages: ArchiveStorages, refused: list[RefusedLeaf]) -> None:
        self.store = store
        files = store.sizes()
        names = sorted((int(match[1]), name) for name in files if (match := PART.fullmatch(name)))
        if not names:
            raise CheckpointNotFound(store.url, expected="PART_000.pt", found="none", hint="Check the path")
        if [number for number, _ in names] != list(range(len(names))):
            raise self._wrong(f"PART_000.pt to PART_{len(names) - 1:03d}.pt", f"{[name for _, name in names][:8]}")
        self.states: list[Any] = []
        for _, name in names:
            self.states.append(read_torch(store_window(store, name, files), storages, refused))
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
        spec = ArraySpec(shapes.pop(), kinds.pop())
        dtype_of(spec.dtype)
        return from_ranges(spec, arrays, f"{brief(name)}: {self.store.url}")

    def _united(self, whole: dict[Any, Any], large: dict[Any, Any]) -> dict[Any, Any]:
        if twice := sorted(map(str, whole.keys() & large.keys())):
            raise CorruptError(self.store.url, expected="each tensor once", found=f"{twice[:3]} twice")
        return whole | large

    def model(self, number: int) -> dict[Any, Any]:
        """Returns the state dict of model number `number`."""
        pairs = [state["model"][number] for state in self.states]
        found: dict[Any, Any] = {}
        for params, _ in pairs:
            if not isinstance(params, dict):
                raise FormatError(self.store.url, expected="state dicts of models", found=brief(params))
            found |= params
        united, first = self._united(found, self._large(pairs)), pairs[0][0]
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


def read_hfai(store: Store, storages: ArchiveStorages, refused: list[RefusedLeaf]) -> dict[str, Any]:
    """Returns the state in a directory of hfai.checkpoint.save, with its tensors left in the files.

    Raises:
        CheckpointNotFound, FormatError, CorruptError: there is none, or its parts do not fit together.
    """
    parts = HfaiParts(store, storages, refused)
    first = parts.states[0]
    found: dict[str, Any] = {}
    for key, make in (("model", parts.model), ("optimizer", parts.optimizer)):
        made = [make(number) for number in range(len(first[key]))]
        if made or key == "model":
            found[key] = made[0] if len(made) == 1 else made
    return found | {key: value for key, value in first.items() if key not in _OWN_KEYS}
