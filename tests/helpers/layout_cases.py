"""Random trees of arrays under random layouts, saved by some ranks and loaded by others. Threads are the ranks."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import treeckpt as tc
from tests.helpers import strategies
from tests.helpers.world import LONG
from treeckpt._core.sharding import placements as core
from treeckpt._core.sharding.placements import MeshLayout, held_by, local_shape, mesh_ranks
from treeckpt._core.sharding.region import Region
from treeckpt._io.comm.comm import ThreadComm, thread_comms

T = TypeVar("T")


DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex128, torch.float8_e5m2, torch.int16)


@dataclasses.dataclass(frozen=True)
class Plain:
    """Every rank has all of it; some see it through a view of other memory order."""

    transposed: bool = False

    def cut(self, full: torch.Tensor, rank: int) -> Any:
        return full.t().contiguous().t() if self.transposed and full.ndim == 2 else full.clone()


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """A DTensor."""

    layout: MeshLayout

    def cut(self, full: torch.Tensor, rank: int) -> Any:
        shape = local_shape(self.layout, full.shape, rank)
        local = torch.zeros(shape if shape is not None else (0,), dtype=full.dtype)
        for held in held_by(self.layout, tuple(full.shape), rank):
            box = tuple(slice(a, a + n) for a, n in zip(held.local, held.region.shape, strict=True))
            local[box] = full[held.region.slices()]
        meta = TensorMeta(full.shape, full.stride(), full.dtype)
        placements = tuple(torch_placement(p) for p in self.layout.placements)
        return DTensor(
            local, DTensorSpec(device_mesh(self.layout.mesh), placements, tensor_meta=meta), requires_grad=False
        )


def device_mesh(mesh: core.Mesh) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(mesh_ranks(mesh)).view(mesh.shape), _init_backend=False, _rank=0)


def torch_placement(placement: core.Placement) -> Any:
    if isinstance(placement, core.Replicate):
        return Replicate()
    if isinstance(placement, core.Shard):
        return Shard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.factor)


@dataclasses.dataclass(frozen=True)
class Boxes:
    """One box per rank, as `Sharded`; ranks with equal boxes are replicas."""

    boxes: tuple[Region, ...]
    as_numpy: bool

    def cut(self, full: torch.Tensor, rank: int) -> Any:
        box = self.boxes[rank]
        return tc.Sharded(as_leaf(full[box.slices()].clone(), self.as_numpy), full.shape, box.offset)


@dataclasses.dataclass(frozen=True)
class Ranges:
    """One flat range per rank, as `Sharded`."""

    cuts: tuple[int, ...]
    as_numpy: bool

    def cut(self, full: torch.Tensor, rank: int) -> Any:
        low, high = self.cuts[rank], self.cuts[rank + 1]
        return tc.Sharded(as_leaf(full.reshape(-1)[low:high].clone(), self.as_numpy), full.shape, low)


def as_leaf(tensor: torch.Tensor, as_numpy: bool) -> Any:
    return tensor.numpy() if as_numpy else tensor


@dataclasses.dataclass(frozen=True)
class OnOne:
    """One rank has it; the others lack the key."""

    owner: int

    def cut(self, full: torch.Tensor, rank: int) -> Any:
        return full.clone() if rank == self.owner else None


Placed = Plain | OnMesh | Boxes | Ranges | OnOne


@st.composite
def boxes(draw: DrawFn, shape: tuple[int, ...], world: int, as_numpy: bool) -> Boxes:
    """As many boxes as ranks, at most; cut at random, together the whole array."""
    found = [Region.whole(shape)]
    for _ in range(draw(st.integers(0, world - 1))):
        at = draw(st.integers(0, len(found) - 1))
        box = found[at]
        if not box.shape:
            break
        dim = draw(st.integers(0, len(box.shape) - 1))
        cut = draw(st.integers(0, box.shape[dim]))
        low, high, offset = list(box.shape), list(box.shape), list(box.offset)
        low[dim], high[dim] = cut, box.shape[dim] - cut
        offset[dim] += cut
        found[at : at + 1] = [Region(box.offset, tuple(low)), Region(tuple(offset), tuple(high))]
    found += [draw(st.sampled_from(found)) for _ in range(world - len(found))]
    return Boxes(tuple(draw(st.permutations(found))), as_numpy)


@st.composite
def ranges(draw: DrawFn, shape: tuple[int, ...], world: int, as_numpy: bool) -> Ranges:
    size = math.prod(shape)
    return Ranges((0, *sorted(draw(st.tuples(*[st.integers(0, size)] * (world - 1)))), size), as_numpy)


def placed(shape: tuple[int, ...], world: int, dtype: torch.dtype, *, saved: bool) -> SearchStrategy[Placed]:
    """Any layout of one array."""
    as_numpy = st.booleans() if dtype not in (torch.bfloat16, torch.float8_e5m2) else st.just(False)
    kinds: list[SearchStrategy[Placed]] = [
        st.builds(Plain, st.booleans()),
        strategies.mesh_layouts(len(shape), world=world).map(OnMesh),
        as_numpy.flatmap(lambda n: boxes(shape, world, n)),
        as_numpy.flatmap(lambda n: ranges(shape, world, n)),
    ]
    if saved:
        kinds.append(st.builds(OnOne, st.integers(0, world - 1)))
    return st.one_of(kinds)


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a case, and where it lies before and after."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    before: Placed
    after: Placed
    tied: bool = False

    def full(self) -> torch.Tensor:
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        data = np.random.default_rng(self.seed).integers(0, 2 if self.dtype is torch.bool else 256, nbytes, np.uint8)
        if not nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(data).view(self.dtype).view(self.shape)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is saved by one world and loaded by another."""

    before: int
    after: int
    arrays: tuple[Array, ...]
    values: tuple[Any, ...]
    own: tuple[int, ...]
    """The length of each rank's own array; they differ."""

    def tree(self, rank: int, *, saved: bool) -> dict[str, Any]:
        """The tree of one rank: as it is saved, or as the loaded one is to be."""
        layers: dict[Any, Any] = {}
        for number, array in enumerate(self.arrays):
            full = array.full()
            leaf = (array.before if saved else array.after).cut(full, rank)
            if leaf is not None:
                layers[number] = {"w": leaf, "tied": leaf} if array.tied else {"w": leaf}
        own = tc.PerRank({"state": torch.arange(self.own[rank % self.before]), "rank": rank % self.before})
        return {"layers": layers, "values": list(self.values), "own": own, "none": (None, {}, [])}

    @property
    def unique(self) -> int:
        """Bytes of array data that must be kept."""
        return sum(array.full().nbytes for array in self.arrays) + 8 * sum(self.own)


@st.composite
def cases(draw: DrawFn) -> Case:
    before, after = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    arrays: list[Array] = []
    for seed in range(draw(st.integers(1, 4))):
        shape = draw(strategies.shapes(max_ndim=3, max_size=9))
        dtype = draw(st.sampled_from(DTYPES))
        start = draw(placed(shape, before, dtype, saved=True))
        end = draw(placed(shape, after, dtype, saved=False))
        arrays.append(Array(shape, dtype, seed, start, end, draw(st.booleans())))
    values = draw(st.lists(st.one_of(st.integers(), st.floats(allow_nan=False), st.text()), max_size=2))
    own = draw(st.lists(st.integers(0, 5), min_size=before, max_size=before))
    return Case(before, after, tuple(arrays), tuple(values), tuple(own))


def on_ranks(world: int, act: Callable[[ThreadComm], T]) -> list[T]:
    """What each rank's call returns."""
    with concurrent.futures.ThreadPoolExecutor(world) as pool:
        return list(pool.map(act, thread_comms(world, timeout=LONG)))


def bits(leaf: Any) -> tuple[Any, ...]:
    """What makes two arrays the same to the last bit, wherever they lie."""
    leaf = leaf.local if isinstance(leaf, tc.Sharded) else leaf.to_local() if isinstance(leaf, DTensor) else leaf
    tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape) if tensor.numel() else (), data
