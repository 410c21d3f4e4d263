"""Replicas, contradictions, ranks with different trees, and state of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import treeckpt as tc

from .layouts import difference, distribute, mesh_of, seeded
from .registry import Rank, case


# replicas -------------------------------------------------------------------------------------------------------------
@case("four")
def replicas_share_the_writing_by_bytes(here: Rank) -> None:
    tree = {f"layer{n}": torch.randn(200 + n, 1000, generator=seeded()) for n in range(8)}
    tree |= {f"bias{n}": torch.randn(1000, generator=seeded()) for n in range(8)}
    report = tc.save(here.directory / "replicas", tree)
    nbytes: list[Any] = [None] * 4
    dist.all_gather_object(nbytes, report.nbytes)
    unique = sum(tensor.nbytes for tensor in tree.values())
    assert sum(nbytes) == unique, "each byte once"
    assert max(nbytes) <= 1.05 * unique / 4, f"{nbytes} of {unique}"
    files = [file.nbytes for file in tc.inspect(here.directory / "replicas").file_list]
    assert sum(files) == unique


@case("two")
def files_of_rank_0_are_saved_with_the_checkpoint(here: Rank) -> None:
    path = here.directory / "sidecars"
    tc.save(path, {"w": torch.ones(10)}, files={"config.json": b"{}"} if here.rank == 0 else None)
    assert tc.read_file(path, "config.json") == b"{}"
    tc.save_async(path, {"w": torch.ones(10)}, files={"config.json": b"new"}, overwrite=True).result()
    assert tc.read_file(path, "config.json") == b"new"
    with pytest.raises(tc.TreeckptError, match="nowhere"):
        tc.save(here.directory / "no sidecars", {"w": torch.ones(10)}, files={"config.json": "/nowhere/config.json"})
    assert not (here.directory / "no sidecars").exists()


@case("four")
def replicated_meshes_share_the_writing_too(here: Rank) -> None:
    full = torch.randn(2048, 1024, generator=seeded())
    for name, placements in {"hsdp": (Replicate(), Shard(0)), "both": (Replicate(), Replicate())}.items():
        report = tc.save(here.directory / f"shared {name}", {"w": distribute(full, mesh_of(2, 2), placements)})
        nbytes: list[Any] = [None] * 4
        dist.all_gather_object(nbytes, report.nbytes)
        assert sum(nbytes) == full.nbytes, name
        assert max(nbytes) <= 1.1 * full.nbytes / 4, f"{name}: {nbytes}"


@case("four")
def small_replicas_that_differ_are_named(here: Rank) -> None:
    odd = here.rank == 3
    leaves = {
        "value": 5 if odd else 4,
        "kind": 1.0 if odd else 1,
        "nan": float("nan") if odd else 0.0,
        "tensor": torch.full((10,), float(odd)),
        "scalar": torch.tensor(-0.0 if odd else 0.0),
        "numpy": np.full(3, odd),
        "dtensor": distribute(torch.full((10,), float(odd)), mesh_of(4), (Replicate(),)),
    }
    for name, leaf in leaves.items():
        with pytest.raises(tc.MismatchError) as caught:
            tc.save(here.directory / f"differ {name}", {"deep": [{"same": 1, name: leaf}]})
        assert caught.value.path == f"deep/0/{name}", caught.value
        assert "rank 3" in str(caught.value)
        assert "PerRank" in caught.value.hint
        assert not (here.directory / f"differ {name}" / "index.json").exists()


@case("four")
def large_replicas_are_compared_by_samples_or_as_they_are_told_to(here: Rank) -> None:
    large = torch.zeros(300, 300)
    sharded = distribute(large.clone(), mesh_of(2, 2), (Replicate(), Shard(0)))
    if here.rank == 2:
        large[250, 7] = 1
        sharded.to_local()[100, 3] = 1
    for compare in (False, "sample"):  # one element: samples need not have it
        tc.save(here.directory / f"unseen {compare}", {"w": large, "s": sharded}, verify_replicas=compare)
    for name, leaf in {"w": large, "s": sharded}.items():
        with pytest.raises(tc.MismatchError) as caught:
            tc.save(here.directory / "seen", {"a": {name: leaf}}, verify_replicas=True)
        assert caught.value.path.startswith(f"a/{name}"), caught.value
    other = torch.randn(300, 300, generator=torch.Generator().manual_seed(int(here.rank == 2)))
    drifted = distribute(other.clone(), mesh_of(2, 2), (Replicate(), Shard(0)))
    for name, leaf in {
        "w": other,
        "s": drifted,
        "t": other.t(),
        "pieces": tc.Sharded(other, (300, 300), (0, 0)),
    }.items():
        with pytest.raises(tc.MismatchError, match=rf"a/{name}.* rank 2") as caught:
            tc.save(here.directory / f"other {name}", {"a": {name: leaf}})
        assert not (here.directory / f"other {name}" / "index.json").exists()
        with pytest.raises(tc.MismatchError, match=rf"a/{name}.* rank 2"):
            tc.trees.gather({"a": {name: leaf}})
    full = torch.randn(300, 300, generator=seeded())
    fine = {"w": full, "s": distribute(full, mesh_of(2, 2), (Replicate(), Shard(0)))}
    tc.save(here.directory / "fine", fine, verify_replicas=True)
    assert not difference(tc.load(here.directory / "fine", fine), fine)


@case("four")
def small_pieces_of_replicas_are_compared_on_every_save(here: Rank) -> None:
    meshes = [mesh_of(2, first=first) for first in (0, 2)]
    leaves: dict[str, Any] = {
        "hsdp": (mesh_of(2, 2), (Replicate(), Shard(0))),
        "replicated inside": (mesh_of(2, 2), (Shard(1), Replicate())),
        "a mesh for each replica": (meshes[here.rank // 2], (Shard(0),)),
    }
    fine = {name: distribute(torch.ones(8, 6), *layout) for name, layout in leaves.items()}
    fine["rows"] = distribute(torch.arange(8.0), mesh_of(4), (Shard(0),))
    tc.save(here.directory / "small fine", {"n": 1, **fine})
    for name, layout in leaves.items():
        odd = distribute(torch.ones(8, 6), *layout)
        if here.rank == 3:
            odd.to_local()[0, 0] = 7
        for options in ({}, {"verify_replicas": True}):
            with pytest.raises(tc.MismatchError) as caught:
                tc.save(here.directory / f"small {name}", {"n": 1, **fine, "a": {name: odd}}, **options)
            assert caught.value.path.startswith(f"a/{name}@"), caught.value
            assert "rank 3" in str(caught.value), caught.value
        assert not (here.directory / f"small {name}" / "index.json").exists()
        with pytest.raises(tc.MismatchError, match=f"a/{name}@.* rank 3"):
            tc.trees.gather({"a": {name: odd}})


@case("four")
def arrays_that_contradict_each_other_are_named(here: Rank) -> None:
    odd = here.rank == 1
    pairs: dict[str, Any] = {
        "shape": torch.zeros(3 if odd else 4),
        "dtype": torch.zeros(3, dtype=torch.float64 if odd else torch.float32),
        "kind": 5 if odd else torch.zeros(3),
        "node": {"x": 1} if odd else [1],
        "layout": distribute(torch.zeros(8, 8), mesh_of(4), (Shard(int(odd)),)),
        "half": distribute(torch.zeros(8), mesh_of(4), (Shard(0),)) if odd else torch.zeros(8),
    }
    for name, leaf in pairs.items():
        with pytest.raises(tc.MismatchError) as caught:
            tc.save(here.directory / f"contradict {name}", {"a": {name: leaf}})
        assert caught.value.path == f"a/{name}", caught.value


@case("four")
def ranks_may_tie_what_others_hold_apart(here: Rank) -> None:
    weight, other = torch.arange(6.0), torch.arange(6.0)
    trees: list[dict[str, Any]] = [
        {"a": weight, "b": weight},
        {"b": weight, "a": weight},
        {"a": weight, "b": other},
        {"b": weight, "c": weight, "part": weight[:3]},
    ]
    tc.save(here.directory / "tied apart", trees[here.rank])
    loaded = tc.load(here.directory / "tied apart")
    for name in ("a", "b", "c"):
        assert torch.equal(loaded[name], weight), name
    assert torch.equal(loaded["part"], weight[:3])
    views = {"base": weight, "v": weight[:3] if here.rank else weight[3:]}
    with pytest.raises(tc.MismatchError) as caught:
        tc.save(here.directory / "views", views)
    assert caught.value.path == "v"


# trees that differ ----------------------------------------------------------------------------------------------------
@case("four")
def pipeline_stages_join_into_one_tree(here: Rank) -> None:
    stage = here.rank
    layers = {f"layers.{stage}.{name}": torch.full((4, 4), float(stage)) for name in ("wq", "wk")}
    head = {"wte": torch.ones(8, 4)} if stage == 0 else {"head": torch.ones(8, 4)} if stage == 3 else {}
    tree = {
        "model": {**layers, **head},
        "optimizer": {"state": {stage: {"step": torch.tensor(3.0)}}, "lr": 0.1},
        "loader": tc.PerRank({"position": stage, "seen": torch.arange(stage + 1)}),
    }
    path = here.directory / "pipeline"
    tc.save(path, tree)
    loaded = tc.load(path)
    assert len(loaded["model"]) == 10
    assert all(loaded["model"][f"layers.{n}.wq"].eq(n).all() for n in range(4))
    assert set(loaded["optimizer"]["state"]) == {0, 1, 2, 3}
    assert loaded["loader"].value["position"] == stage
    assert torch.equal(loaded["loader"].value["seen"], torch.arange(stage + 1))
    mine = tc.load(path, tree, strict=False)
    assert not difference(mine["model"], tree["model"])
    with pytest.raises(tc.MismatchError, match="not asked for"):
        tc.load(path, tree)


# per rank -------------------------------------------------------------------------------------------------------------
def _own(rank: int) -> dict[str, Any]:
    return {
        "rng": tc.PerRank({"state": torch.full((5,), rank, dtype=torch.uint8), "numpy": np.arange(rank, rank + 3)}),
        "loader": tc.PerRank([rank, {"epoch": 1.5 * rank}, None, f"file{rank}"]),
        "alike": tc.PerRank(torch.ones(2)),
        "step": 7,
    }


def _same_own(found: dict[str, Any], rank: int) -> None:
    expected = _own(rank)
    assert torch.equal(found["rng"].value["state"], expected["rng"].value["state"])
    assert found["rng"].value["numpy"].tolist() == expected["rng"].value["numpy"].tolist()
    assert found["loader"].value == expected["loader"].value
    assert torch.equal(found["alike"].value, torch.ones(2))
    assert found["step"] == 7


@case("four")
def each_rank_gets_its_own_state_back(here: Rank) -> None:
    path = here.directory / "own"
    tc.save(path, _own(here.rank))
    _same_own(tc.load(path), here.rank)
    _same_own(tc.load(path, _own(99)), here.rank)
    into = _own(99)
    tc.load_into(path, into)
    _same_own(into, here.rank)


@case("two")
def a_smaller_world_finds_the_state_of_its_ranks(here: Rank) -> None:
    path = here.directory / "own"
    for load in (lambda **o: tc.load(path, **o), lambda **o: tc.load(path, _own(99), **o)):
        with pytest.raises(tc.MismatchError, match=r"world of 4") as caught:
            load()
        assert "per_rank='take'" in caught.value.hint
        _same_own(load(fallback=tc.Fallback(per_rank="take")), here.rank)
    assert tc.load(path, {**_own(0), "rng": ..., "loader": ..., "alike": ...})["step"] == 7
    assert tc.load(path, select="step")["step"] == 7


@case("two")
def own_state_of_two_ranks_is_saved(here: Rank) -> None:
    tc.save(here.directory / "own of two", _own(here.rank))


@case("four again")
def a_larger_world_has_no_state_for_its_new_ranks(here: Rank) -> None:
    path = here.directory / "own of two"
    for load in (lambda **o: tc.load(path, **o), lambda **o: tc.load(path, _own(99), **o)):
        with pytest.raises(tc.MismatchError) as caught:
            load()
        assert "per_rank='take'" in caught.value.hint
        _same_own(load(fallback=tc.Fallback(per_rank="take")), here.rank % 2)
