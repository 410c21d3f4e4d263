"""Tensors that say themselves where they lie, DTensors in another shard order, and permuted ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import treeckpt as tc
import treeckpt.dcp

from .registry import Rank, case

__all__: list[str] = []

WHOLE = torch.arange(40.0).reshape(10, 4)
Make = Callable[[DeviceMesh, torch.Tensor, int], Any]


class Placed(torch.Tensor):
    """A plain tensor that knows its first row."""

    start: int

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((self.start, 0)), self.shape)]

    def __create_write_items__(self, fqn: str, whole: torch.Tensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, whole.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _wrapped(mesh: DeviceMesh, whole: torch.Tensor, pieces: list[torch.Tensor], offsets: list[Any]) -> DTensor:
    local = LocalShardsWrapper([piece.clone() for piece in pieces], offsets)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def rows_from_the_end(mesh: DeviceMesh, whole: torch.Tensor, rank: int) -> DTensor:
    """Ranks in falling order, with uneven rows."""
    parts = whole.tensor_split(mesh.size())
    start = sum(len(part) for part in parts[: mesh.size() - 1 - rank])
    part = parts[mesh.size() - 1 - rank].clone()
    placed: Any = part.as_subclass(Placed)
    placed.start = start
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(whole.shape, whole.stride(), whole.dtype))
    return DTensor(placed, spec, requires_grad=False)  # pyright: ignore[reportCallIssue]


def uneven_rows(mesh: DeviceMesh, whole: torch.Tensor, rank: int) -> DTensor:
    """The last rank has most, from the first row on."""
    if rank == mesh.size() - 1:
        return _wrapped(mesh, whole, [whole[:7]], [(0, 0)])
    start, stop = 7 + rank, 8 + rank if rank < mesh.size() - 2 else 10
    return _wrapped(mesh, whole, [whole[start:stop]], [(start, 0)])


def several_by_columns(mesh: DeviceMesh, whole: torch.Tensor, rank: int) -> DTensor:
    """Rank 0 has no part, and does not know of what dtype the others' are; rank 1 has two parts."""
    if rank == 1:
        last = 4 if mesh.size() == 2 else 3
        return _wrapped(mesh, whole, [whole[:, :1], whole[:, 1:last]], [(0, 0), (0, 1)])
    return _wrapped(mesh, whole, [whole[:, 3:]] if rank == 2 else [], [(0, 3)])


def replicas(mesh: DeviceMesh, whole: torch.Tensor, rank: int) -> DTensor:
    half = rank % 2
    return _wrapped(mesh, whole, [whole[5 * half : 5 * half + 5]], [(5 * half, 0)])


MAKES: dict[str, Make] = {
    "from the end": rows_from_the_end,
    "uneven": uneven_rows,
    "several": several_by_columns,
    "replicas": replicas,
}


def chunks(leaf: Any) -> list[torch.Tensor]:
    local = leaf._local_tensor
    return local.local_shards() if isinstance(local, LocalShardsWrapper) else [local.as_subclass(torch.Tensor)]


def assert_chunks(found: Any, expected: Any) -> None:
    assert type(found._local_tensor) is type(expected._local_tensor)
    pairs = list(zip(chunks(found), chunks(expected), strict=True))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
    assert not {a.data_ptr() for a, _ in pairs if a.numel()} & {b.data_ptr() for _, b in pairs if b.numel()}


def _check(here: Rank) -> None:
    mesh = init_device_mesh("cpu", (here.world,))
    for name, make in MAKES.items():
        for dtype in (torch.float32, torch.bfloat16):
            whole = WHOLE.to(dtype)
            zeros = partial(make, mesh, torch.zeros_like(whole), here.rank)
            path = str(here.directory / f"described {here.world} {name} {dtype}")
            leaf = make(mesh, whole, here.rank)
            _check_forms(mesh, leaf, zeros, whole, path)
            _check_beside_dcp(leaf, zeros, whole, f"{path} dcp")
            dist.barrier()


def _check_forms(mesh: DeviceMesh, leaf: Any, zeros: Callable[[], Any], whole: torch.Tensor, path: str) -> None:
    """Saves and loads, in place too, into other layouts and from them, and the operations on trees."""
    tc.save(path, {"w": leaf})
    found = tc.load(path)["w"]
    assert torch.equal(found, whole) and found.dtype == whole.dtype
    assert_chunks(tc.load(path, {"w": zeros()})["w"], leaf)
    target = zeros()
    tc.load_into(path, {"w": target})
    assert_chunks(target, leaf)
    cut = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)])
    assert torch.equal(tc.load(path, {"w": cut})["w"].full_tensor(), whole)
    tc.save(f"{path} cut", {"w": distribute_tensor(whole, mesh, [Shard(0)])})
    assert_chunks(tc.load(f"{path} cut", {"w": zeros()})["w"], leaf)
    assert_chunks(tc.trees.offload({"w": leaf})["w"], leaf)
    assert torch.equal(tc.trees.gather({"w": leaf})["w"], whole)


def _check_beside_dcp(leaf: Any, zeros: Callable[[], Any], whole: torch.Tensor, path: str) -> None:
    """What DCP writes and loads of the same tensors, and treeckpt.dcp, each from the other."""
    treeckpt.dcp.save({"w": leaf}, checkpoint_id=path)
    dcp.save({"w": leaf}, checkpoint_id=f"{path} torch")
    dcp.save({"w": leaf}, storage_writer=treeckpt.dcp.Writer(f"{path} writer"))
    for one in (path, f"{path} torch", f"{path} writer"):
        assert torch.equal(tc.load(one)["w"], whole), one
        target = zeros()
        treeckpt.dcp.load({"w": target}, checkpoint_id=one)
        assert_chunks(target, leaf)
    for reader in (treeckpt.dcp.Reader(path), dcp.FileSystemReader(f"{path} torch")):
        target = zeros()
        dcp.load({"w": target}, storage_reader=reader)
        assert_chunks(target, leaf)


@case("two")
def tensors_that_describe_their_chunks_lie_where_they_say_on_two_ranks(here: Rank) -> None:
    _check(here)


@case("four")
def tensors_that_describe_their_chunks_lie_where_they_say(here: Rank) -> None:
    _check(here)


class Own(DTensor):
    """A DTensor of a class of its own."""


class OwnRows(DTensor):
    """One that knows its first row."""

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((vars(self)["start"], 0)), self._local_tensor.shape)]


@case("two")
def subclasses_of_dtensor_lie_as_it_does_or_where_they_say(here: Rank) -> None:
    mesh = init_device_mesh("cpu", (here.world,))
    for kind, place in ((Own, here.rank), (OwnRows, here.world - 1 - here.rank)):
        part = WHOLE.chunk(here.world)[place]

        def made(local: torch.Tensor, kind: Any = kind, place: int = place) -> Any:
            plain: Any = distribute_tensor(WHOLE, mesh, [Shard(0)])
            leaf = kind(local, plain._spec, requires_grad=False)
            leaf.start = place * len(local)
            return leaf

        path = str(here.directory / kind.__name__)
        tc.save(path, {"w": made(part.clone())})
        assert torch.equal(tc.load(path)["w"], WHOLE)
        target = made(torch.zeros_like(part))
        tc.load_into(path, {"w": target})
        found = tc.load(path, {"w": made(torch.zeros_like(part))})["w"]
        assert torch.equal(target._local_tensor, part) and torch.equal(found._local_tensor, part)
        assert type(found) is kind and found.start == target.start
        treeckpt.dcp.save({"w": target}, checkpoint_id=f"{path} dcp")
        assert torch.equal(tc.load(f"{path} dcp")["w"], WHOLE)


@case("four")
def a_module_of_described_parameters_is_restored(here: Rank) -> None:
    mesh = init_device_mesh("cpu", (here.world,))

    def made(whole: torch.Tensor) -> torch.nn.Module:
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(replicas(mesh, whole, here.rank))
        return model

    tc.save(here.directory / "described module", tc.training.state(made(WHOLE), rng=False))
    model = made(torch.zeros_like(WHOLE))
    tc.training.restore(here.directory / "described module", model, rng=False)
    assert_chunks(model.w, replicas(mesh, WHOLE, here.rank))


@case("four")
def chunks_that_are_none_are_refused(here: Rank) -> None:
    mesh = init_device_mesh("cpu", (here.world,))
    outside = _wrapped(mesh, WHOLE, [WHOLE[:5]], [(6, 0)])
    with pytest.raises(tc.LayoutError, match="chunks inside shape"):
        tc.save(here.directory / "outside", {"w": outside})
    with pytest.raises(tc.LayoutError, match="no rank holds"):
        tc.save(here.directory / "gap", {"w": _wrapped(mesh, WHOLE, [WHOLE[:5]], [(0, 0)])})
    with pytest.raises(tc.TreeError, match="whose memory can be chosen"):
        tc.trees.offload({"w": replicas(mesh, WHOLE, here.rank)}, share=True)


@case("four")
def dtensors_lie_in_their_shard_order(here: Rank) -> None:
    if not hasattr(DTensorSpec, "compute_default_shard_order"):
        return
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    first, second = mesh.get_coordinate()  # pyright: ignore[reportGeneralTypeIssues]
    for size in (8, 10, 7, 1):
        whole = torch.arange(3.0 * size).reshape(size, 3)
        local = whole
        for count, at in ((2, second), (2, first)):  # the second dimension of the mesh cuts first
            parts = local.chunk(count)
            local = parts[at] if at < len(parts) else local[:0]
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=(ShardOrderEntry(0, (1, 0)),))
        leaf: Any = DTensor(local.clone(), spec, requires_grad=False)  # pyright: ignore[reportCallIssue]
        assert torch.equal(leaf.full_tensor(), whole)
        path = here.directory / f"shard order {size}"
        tc.save(path, {"w": leaf})
        assert torch.equal(tc.load(path)["w"], whole)
        found = tc.load(path, {"w": leaf})["w"]
        assert torch.equal(found._local_tensor, local) and found._spec.shard_order == spec.shard_order
        plain = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0), Shard(0)])
        assert torch.equal(tc.load(path, {"w": plain})["w"].full_tensor(), whole)
        treeckpt.dcp.save({"w": leaf}, checkpoint_id=f"{path} dcp")
        target: Any = DTensor(torch.zeros_like(local), spec, requires_grad=False)  # pyright: ignore[reportCallIssue]
        treeckpt.dcp.load({"w": target}, checkpoint_id=f"{path} dcp")
        assert torch.equal(target._local_tensor, local)


@case("four")
def local_parts_keep_the_order_of_their_dimensions(here: Rank) -> None:
    square = init_device_mesh("cpu", (2, 2))
    for number, placements in enumerate(([Shard(0), Replicate()], [Shard(1), Shard(0)], [Shard(0), Shard(0)])):
        whole = torch.arange(42.0).reshape(6, 7)
        leaf: Any = distribute_tensor(whole, square, placements)
        leaf = DTensor(leaf._local_tensor.t().contiguous().t(), leaf._spec, requires_grad=False)  # pyright: ignore
        path = here.directory / f"columns {number}"
        tc.save(path, {"w": leaf})
        found = tc.load(path)["w"]
        assert torch.equal(found, whole) and found.stride() == (1, 6)
        for like in (tc.load(path, {"w": leaf})["w"], tc.trees.empty_like({"w": leaf})["w"]):
            assert like._local_tensor.stride() == leaf._local_tensor.stride()
        part = tc.load(path, tc.abstract({"w": leaf}))["w"]
        assert part.stride() == leaf._local_tensor.stride() and torch.equal(part, leaf._local_tensor)
        plain = tc.load(path, {"w": distribute_tensor(whole, square, placements)})["w"]
        assert plain._local_tensor.is_contiguous() and torch.equal(plain.full_tensor(), whole)


@case("four")
def moments_of_sharded_parameters_keep_the_order_of_their_dimensions(here: Rank) -> None:
    mesh = init_device_mesh("cpu", (here.world,))

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(distribute_tensor(WHOLE, mesh, [Shard(0)]))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = made()
    moment: Any = distribute_tensor(WHOLE * 2, mesh, [Shard(0)])
    moment = DTensor(moment._local_tensor.t().contiguous().t(), moment._spec, requires_grad=False)  # pyright: ignore
    optimizer.state[model.w]["momentum_buffer"] = moment
    tc.save(here.directory / "sharded columns", tc.training.state(model, optimizer, rng=False))
    fresh, other = made()
    tc.training.restore(here.directory / "sharded columns", fresh, other, rng=False)
    found: Any = other.state[fresh.w]["momentum_buffer"]
    assert torch.equal(found._local_tensor, moment._local_tensor)
    assert len(found._local_tensor) == 1 or found._local_tensor.stride() == moment._local_tensor.stride()
    fresh.w.grad = torch.zeros_like(fresh.w)
    other.step()
