"""Groups of ranks that save alone, and what eight ranks say to each other in a save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import treeckpt as tc
from treeckpt._core.planning.save_plan import GlobalPlan
from treeckpt._io.comm.comm import Comm, comm_of, default_comm

from .layout_models import build_model, models_of
from .layouts import difference, distribute, mesh_of, seeded
from .registry import Rank, case

# groups ---------------------------------------------------------------------------------------------------------------


def sequence() -> int:
    """How many collectives the default group has issued."""
    return dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()


@case("eight")
def groups_without_rank_zero_save_side_by_side(here: Rank) -> None:
    """Three groups of three and two ranks, in an order of their own; DTensors on the ranks of each."""
    members = ([4, 2, 3], [7, 5], [0, 1, 6])
    groups = [dist.new_group(ranks, sort_ranks=False) for ranks in members]
    meshes = [dist.DeviceMesh("cpu", torch.tensor(ranks)) for ranks in members]
    number = next(n for n, ranks in enumerate(members) if here.rank in ranks)
    group, mesh = groups[number], meshes[number]
    full = torch.randn(11, 6, generator=seeded()) + number
    tree = {
        "rows": distribute(full, mesh, (Shard(0),)),
        "replica": full,
        "own": tc.PerRank(here.rank),
        "piece": tc.Sharded(
            [full[: here.rank % 2].clone(), full[here.rank % 2 :].clone()], full.shape, [(0, 0), (here.rank % 2, 0)]
        ),
    }
    path = here.directory / f"group {number}"
    before = sequence()
    report = tc.save(path, tree, comm=group)
    assert report.world == len(members[number])
    assert tc.verify(path).ok and tc.inspect(path).world == len(members[number])
    loaded = tc.load(path, tree, comm=group)
    assert not difference({"rows": loaded["rows"]}, {"rows": tree["rows"]})
    assert loaded["own"].value == here.rank
    tc.load_into(path, tree, comm=comm_of(group))
    assert torch.equal(tc.load(path, comm=group)["rows"], full)
    tc.save(path, tree, comm=group, overwrite=True)
    specs = tc.abstract(tree, comm=group)
    assert torch.equal(tc.load(path, specs, comm=group)["rows"], tree["rows"].to_local())
    assert sequence() == before, "no collective"
    with pytest.raises(tc.RankError, match=f"rank {here.rank}: not part of the group"):
        tc.save(path, tree, comm=groups[(number + 1) % 3])


@case("eight again")
def what_a_group_saved_loads_on_other_ranks(here: Rank) -> None:
    for number in range(3):
        full = torch.randn(11, 6, generator=seeded()) + number
        like = distribute(torch.empty(11, 6), mesh_of(8), (Shard(1),))
        found = tc.load(here.directory / f"group {number}", {"rows": like, "own": ...}, strict=False)["rows"]
        assert not difference({"w": found}, {"w": distribute(full, mesh_of(8), (Shard(1),))})


@case("eight")
def one_replica_of_a_larger_mesh_saves_alone(here: Rank) -> None:
    """Hybrid sharding: ranks 4 to 7 hold everything, so they can save without the others, and the half cannot."""
    full = torch.randn(10, 3, generator=seeded())
    leaf = distribute(full, mesh_of(2, 4), (Replicate(), Shard(0)))
    last, half = dist.new_group([4, 5, 6, 7]), dist.new_group([6, 7])
    if here.rank >= 4:
        tc.save(here.directory / "one replica", {"w": leaf}, comm=last)
        found = tc.load(here.directory / "one replica", {"w": leaf}, comm=last)["w"]
        assert torch.equal(found.to_local(), leaf.to_local())
        assert torch.equal(tc.load(here.directory / "one replica", comm=last)["w"], full)
    if here.rank >= 6:
        with pytest.raises(tc.LayoutError, match=r"no rank holds offset \(0, 0\)"):
            tc.save(here.directory / "half a replica", {"w": leaf}, comm=half)


@case("eight")
def the_groups_of_a_mesh_are_comms(here: Rank) -> None:
    mesh = mesh_of(2, 4)
    group, row = mesh["b"].get_group(), here.rank // 4
    full = torch.randn(9, 4, generator=seeded()) + row
    tree = {"w": distribute(full, mesh["b"], (Shard(0),))}
    tc.save(here.directory / f"row {row}", tree, comm=group)
    assert torch.equal(tc.load(here.directory / f"row {row}", comm=group)["w"], full)
    comm = comm_of(group)
    assert comm_of(group) is comm and comm_of(None) is default_comm() is comm_of(dist.group.WORLD)


# how eight ranks talk -------------------------------------------------------------------------------------------------
class Counting:
    """A comm that counts what this rank says."""

    def __init__(self, inner: Comm) -> None:
        self._inner = inner
        self.rank, self.size, self.timeout, self.state = inner.rank, inner.size, inner.timeout, inner.state
        self.messages: list[int] = []

    def post(self, key: str, data: bytes) -> None:
        self.messages.append(len(data))
        self._inner.post(key, data)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        return self._inner.wait(keys, timeout)

    def drop(self, keys: Sequence[str]) -> None:
        self._inner.drop(keys)


@case("eight")
def equal_trees_of_eight_ranks_exchange_digests_only(here: Rank) -> None:
    """Every layout that torch knows by mesh and placements: hello, report, and an empty mark that the end was read."""
    comm = Counting(default_comm())
    alike = ["model", "ddp", "fsdp", "fsdp columns", "fsdp hsdp", "tp", "sharded tensor"]
    assert set(alike) < set(models_of(8))
    for layout in alike:
        tree = {f"copy {n}": build_model(layout, here.rank, 8) for n in range(2)}
        comm.state.remove(GlobalPlan)
        comm.messages.clear()
        before = sequence()
        tc.save(here.directory / f"counted {layout}", tree, comm=comm)
        assert sequence() == before, f"{layout}: a collective"
        if here.rank:
            assert len(comm.messages) == 3 and comm.messages[-1] == 0, f"{layout}: {comm.messages}"
            assert comm.messages[0] < 400, f"{layout}: {comm.messages[0]} bytes of digests"
            assert sum(comm.messages) < 3000, f"{layout}: {comm.messages}"
        else:
            assert len(comm.messages) <= 5, f"{layout}: {comm.messages}"


@case("eight")
def no_layout_of_eight_ranks_needs_a_collective(here: Rank) -> None:
    """Also where ranks bring different trees: the first save agrees over the store, later ones remember."""
    comm = Counting(default_comm())
    for layout in ("stages model", "experts", "sharded experts", "zero", "blocks", "fsdp on tp"):
        tree = build_model(layout, here.rank, 8)
        before, spent = sequence(), []
        for overwrite in (False, True):
            comm.messages.clear()
            tc.save(here.directory / f"agreed {layout}", tree, comm=comm, overwrite=overwrite)
            spent.append(sum(comm.messages))
        assert sequence() == before, f"{layout}: a collective"
        assert spent[1] <= spent[0], f"{layout}: {spent} bytes"
        if (
            layout in ("stages model", "zero", "blocks") and here.rank
        ):  # every rank brings another tree, and says so once
            assert spent[1] < spent[0], f"{layout}: {spent} bytes"


# wrong use ------------------------------------------------------------------------------------------------------------
@case("eight")
def wrong_layouts_are_named_on_every_rank(here: Rank) -> None:
    mesh, odd = mesh_of(2, 4), here.rank == 5
    full = torch.randn(300, 80, generator=seeded())
    partial = DTensor.from_local(torch.ones(3), mesh, (Replicate(), Partial()), run_check=False)
    differ = distribute(full, mesh, (Replicate(), Shard(0)))
    if odd:
        differ.to_local()[3, 4] += 1
    replica = distribute(full, mesh, (Replicate(), Replicate()))
    if odd:
        replica.to_local()[299, 1] += 1
    box = tc.Sharded(full[: 200 + here.rank].clone(), (300, 80), (0, 0)) if here.rank < 7 else tc.Sharded(
        full[200:].clone(), (300, 80), (200, 0)
    )  # fmt: skip
    if odd:
        box.local[3, 4] += 1
    wrong: list[tuple[str, Any, dict[str, Any], type[Exception], str]] = [
        ("partial", partial, {}, tc.LayoutError, "partial sum"),
        ("sharded replica", differ, {"verify_replicas": True}, tc.MismatchError, "rank 5"),
        ("replica", replica, {"verify_replicas": True}, tc.MismatchError, "rank 5"),
        ("shape", torch.ones(3 + odd), {}, tc.MismatchError, "same shape"),
        ("global shape", tc.Sharded(full[:1], (1, 80 + odd), (0, 0)), {}, (tc.MismatchError, tc.RankError), ""),
        ("overlap", box, {}, tc.MismatchError, "rank 5"),
        ("outside", tc.Sharded(full, (300, 80), (here.rank, 0)), {}, tc.RankError, "w: expected a piece inside"),
    ]  # pyright: ignore[reportAssignmentType]
    for name, leaf, options, kind, text in wrong:
        path = here.directory / f"wrong {name}"
        with pytest.raises(kind, match=text) as caught:
            tc.save(path, {"a": [{"w": leaf}]}, **options)
        if kind is not tc.RankError and name != "global shape":
            assert caught.value.path.startswith("a/0/w"), f"{name}: {caught.value}"  # pyright: ignore
        assert not (path / "index.json").exists(), name
    tc.save(here.directory / "right", {"w": torch.ones(3)})
    for call in (tc.load, tc.load_into):
        with pytest.raises(tc.LayoutError, match="w: expected placements that hold values") as caught:
            call(here.directory / "right", {"w": partial})
        assert "Redistribute" in caught.value.hint
