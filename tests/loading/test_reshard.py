"""Any tree under any layout, saved by any number of ranks, loads under any other layout, bit for bit.

Threads are the ranks. Mesh layouts become real DTensors (their meshes need no process group, as nothing is
communicated); explicit pieces and flat ranges become `Sharded`. The oracle is the whole array.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.distributed.tensor import DTensor

import treeckpt as tc
from tests.helpers import strategies
from tests.helpers.layout_cases import (
    Array,
    Boxes,
    Case,
    OnMesh,
    Placed,
    Plain,
    Ranges,
    bits,
    cases,
    on_ranks,
)
from treeckpt._core.sharding import placements as core
from treeckpt._core.sharding.placements import MeshLayout
from treeckpt._core.sharding.region import Region
from treeckpt._io.comm.comm import ThreadComm

# how an array lies on the ranks ---------------------------------------------------------------------------------------


# cases ----------------------------------------------------------------------------------------------------------------


def same_layers(found: dict[int, Any], expected: dict[int, Any], where: str) -> None:
    assert list(found) == list(expected), where
    for number, leaves in expected.items():
        for name, leaf in leaves.items():
            other = found[number][name]
            assert type(other) is type(leaf), f"{where}, array {number}"
            assert bits(other) == bits(leaf), f"{where}, array {number}"
        assert len({id(leaf) for leaf in found[number].values()}) == 1, f"{where}, ties of array {number}"


def check(case: Case) -> None:
    store = tc.MemoryStore()
    on_ranks(case.before, lambda comm: tc.save(store, case.tree(comm.rank, saved=True), comm=comm))
    nbytes = sum(map(len, store.files.values()))
    assert nbytes <= 1.01 * case.unique + (case.before << 16)
    arrays = sum(file.nbytes for file in tc.inspect(store).file_list)
    assert arrays == case.unique, "each byte once"

    def load(comm: ThreadComm) -> None:
        expected = case.tree(comm.rank, saved=False)
        like = case.tree(comm.rank, saved=False)
        _blank(like)
        found = tc.load(store, like, comm=comm, fallback=tc.Fallback(per_rank="take"), strict=False)
        same_layers(found["layers"], expected["layers"], f"load on rank {comm.rank}")
        assert found["values"] == list(case.values)
        assert found["none"] == (None, {}, [])
        assert found["own"].value["rank"] == comm.rank % case.before
        assert torch.equal(found["own"].value["state"], expected["own"].value["state"])
        tc.load_into(store, like, comm=comm, fallback=tc.Fallback(per_rank="take"), strict=False)
        same_layers(like["layers"], expected["layers"], f"load_into on rank {comm.rank}")

    on_ranks(case.after, load)
    whole = tc.load(store, fallback=tc.Fallback(per_rank="take"))
    for number, array in enumerate(case.arrays):
        for leaf in whole["layers"][number].values():
            assert bits(leaf) == bits(array.full()), f"whole array {number}"
    assert tc.verify(store).ok


def _blank(tree: Any) -> None:
    """Zeroes the arrays of a tree of targets, which must not show in what is loaded."""
    for leaves in tree["layers"].values():
        for leaf in leaves.values():
            leaf = (
                leaf.local if isinstance(leaf, tc.Sharded) else leaf.to_local() if isinstance(leaf, DTensor) else leaf
            )
            if isinstance(leaf, np.ndarray):
                leaf[...] = 0
            elif leaf.numel():
                leaf.contiguous().view(-1).view(torch.uint8).zero_() if leaf.is_contiguous() else leaf.copy_(leaf * 0)


@given(cases())
def test_any_layout_loads_into_any_other(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("seed", range(6))
def test_large_arrays_are_split_over_ranks_and_put_together(seed: int) -> None:
    """Past 1 MiB, what several ranks hold is written in parts."""
    mesh = core.Mesh((2, 2), strategies.encode_runs([0, 1, 2, 3]))
    shape = (700, 500)
    layouts: list[Placed] = [
        Plain(),
        OnMesh(MeshLayout(mesh, (core.Replicate(), core.Shard(1)))),
        OnMesh(MeshLayout(mesh, (core.StridedShard(0, 2), core.Shard(0)))),
        OnMesh(MeshLayout(mesh, (core.StridedShard(0, 3), core.Replicate()))),
        Boxes((Region((0, 0), (300, 500)),) * 2 + (Region((300, 0), (400, 500)),) * 2, as_numpy=False),
        Ranges((0, 100, 175_001, 175_001, 350_000), as_numpy=True),
    ]
    after = layouts[(seed * 5 + 1) % 6]
    array = Array(shape, torch.float64, seed, layouts[seed], after)
    check(Case(4, 4, (array, dataclasses.replace(array, after=layouts[(seed + 3) % 6])), (), (0, 1, 2, 3)))


def test_a_rank_may_hold_nothing() -> None:
    mesh = core.Mesh((2,), strategies.encode_runs([2, 1]))
    array = Array((3, 4), torch.float32, 0, OnMesh(MeshLayout(mesh, (core.Shard(0),))), Plain())
    check(Case(4, 2, (array,), (), (1, 0, 2, 0)))
