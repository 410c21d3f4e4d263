"""State dicts between ranks, beside torch.distributed._state_dict_utils called in the same way."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _state_dict_utils as torch_utils
from torch.distributed.tensor import DTensor, Partial, Shard

import treeckpt as tc

from .layouts import bits, distribute, mesh_of, seeded
from .registry import Rank, case


class _Own:
    """A value of an unknown kind."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Messages(logging.Handler):
    """Keeps what the logger `treeckpt` is told."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []
        self._logger = logging.getLogger("treeckpt")
        self._level = self._logger.level

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        return self.texts

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


@case("four")
def values_that_differ_stay_those_of_each_rank_where_receivers_are_named(here: Rank) -> None:
    """pytorch-state_dict_utils, lines 563-633: `ranks_only`, with values that each rank has its own of."""
    full = torch.arange(12.0).view(6, 2)
    tree = {"w": distribute(full, mesh_of(4), (Shard(0),)), "lr": 0.1 * here.rank, "step": 7, "own": [here.rank]}
    theirs: Any = torch_utils._gather_state_dict(dict(tree), ranks_only=(1, 2))
    with _Messages() as texts:
        found = tc.trees.gather(tree, ranks=[1, 2])
    assert (found["lr"], found["step"], found["own"]) == (0.1 * here.rank, 7, [here.rank])
    assert sum("2 differing: lr, own/0" in text for text in texts) == 1
    if here.rank in (1, 2):
        assert torch.equal(found["w"], full) and torch.equal(theirs["w"], full)
        assert (theirs["lr"], theirs["own"]) == (found["lr"], found["own"])
    else:
        assert theirs == {} and found["w"] == tc.ArraySpec((6, 2), "float32")
    with pytest.raises(tc.MismatchError, match=r"lr: .*rank 0"):
        tc.trees.gather(tree)
    with pytest.raises(tc.MismatchError, match=r"w: .*rank 0"):
        tc.trees.gather({"w": torch.full((3,), float(here.rank)), "lr": here.rank}, ranks=[0])


@case("four")
def partial_sums_are_reduced_when_they_are_gathered(here: Rank) -> None:
    """pytorch-state_dict_utils, lines 794-846: every placement becomes Replicate, which reduces partial sums."""
    mesh = mesh_of(2, 2)
    local = torch.randn(3, 2, generator=seeded()) * (here.rank + 1)
    summed = DTensor.from_local(local, mesh, (Partial(), Shard(0)), run_check=False)
    largest = DTensor.from_local(local.clone(), mesh, (Partial("max"), Partial("max")), run_check=False)
    tree = {"w": torch.nn.Parameter(summed), "tied": largest, "again": largest, "step": 1}
    theirs: Any = torch_utils._gather_state_dict(dict(tree))
    with _Messages() as texts:
        found = tc.trees.gather(tree)
    assert bits(found["w"]) == bits(theirs["w"]) and found["w"].shape == (6, 2)
    assert bits(found["tied"]) == bits(theirs["tied"]) and found["again"] is found["tied"]
    assert type(found["w"]) is torch.nn.Parameter and torch.equal(summed.to_local(), local), "the input is as it was"
    assert [text for text in texts if "partial sums, 3 reduced: w, tied, again" in text]
    only = tc.trees.gather(tree, ranks=[3])
    assert bits(only["w"]) == bits(found["w"]) if here.rank == 3 else only["w"].shape == (6, 2)
    lacking = {"w": summed} if here.rank < 3 else {"v": 1}
    with pytest.raises(tc.LayoutError, match=r"w: .* none on rank 3"):
        tc.trees.gather(lacking)
    assert torch.equal(tc.trees.gather({"v": torch.ones(2)})["v"], torch.ones(2)), "the next one works"


@case("four")
def what_the_source_lacks_stays_as_it_is_without_strict(here: Rank) -> None:
    """pytorch-state_dict_utils, lines 1929-2014: keys that only the local state dict has stay, but for `strict`."""
    full = {"w": torch.arange(8.0).view(4, 2), "n": 5, "beyond": torch.ones(1)}
    kept = torch.full((2,), float(here.rank))

    def local() -> dict[str, Any]:
        return {"w": distribute(torch.zeros(4, 2), mesh_of(4), (Shard(0),)), "n": 0, "kept": kept}

    theirs = local()
    torch_utils._broadcast_state_dict(full if here.rank == 0 else {}, theirs, torch.device("cpu"))
    like = local()
    with _Messages() as texts:
        found = tc.trees.distribute(full if here.rank == 0 else None, like, src=0, strict=False)
    assert list(found) == list(theirs) and found["n"] == theirs["n"] == 5
    assert bits(found["w"].to_local()) == bits(theirs["w"].to_local()) and not like["w"].to_local().any()
    assert found["kept"] is kept is theirs["kept"]
    assert ["keeps leaves of like, 1 not in the tree: kept" in text for text in texts] == [True]
    if here.rank == 2:
        del like["kept"]
    found = tc.trees.distribute(full if here.rank == 0 else None, like, src=0, strict=False)
    assert list(found) == list(like), "each rank wants its own"
    with pytest.raises(tc.RankError, match="kept: expected every leaf of like in the tree, found 1 not in the tree"):
        tc.trees.distribute(full if here.rank == 0 else None, like, src=0, strict=here.rank != 1)
    with pytest.raises(tc.RankError, match="one leaf at least"):
        tc.trees.distribute(full if here.rank == 0 else None, {"else": 1}, src=0, strict=False)


@case("four")
def objects_of_unknown_kinds_are_each_ranks_own_or_sent_without_type_check(here: Rank) -> None:
    """pytorch-state_dict_utils, lines 549-558: `type_check=False` takes a deep copy of any other value."""
    own = _Own(here.rank)
    tree = {"w": distribute(torch.arange(4.0), mesh_of(4), (Shard(0),)), "own": own, "same": own, "n": 1}
    theirs: Any = torch_utils._gather_state_dict(tree, type_check=False)
    found = tc.trees.gather(tree, type_check=False)
    for one in (theirs, found):
        assert torch.equal(one["w"], torch.arange(4.0)) and one["own"].number == here.rank and one["own"] is not own
    assert found["same"] is found["own"]
    assert tc.trees.gather(tree, ranks=[0], type_check=False)["own"].number == here.rank
    with pytest.raises(ValueError, match="Unexpected value type"):
        torch_utils._gather_state_dict(tree)
    with pytest.raises(tc.TreeError, match="type_check=False") as caught:
        tc.trees.gather(tree)
    assert "allow_pickle" not in str(caught.value)
    with pytest.raises(tc.TreeError, match=r"own: .*which rank 2 lacks"):
        tc.trees.gather({"own": own} if here.rank != 2 else {}, type_check=False)
    for found in (
        tc.trees.broadcast({"own": own, "n": 3}, src=3, type_check=False),
        tc.trees.distribute({"own": own, "n": 3}, {"own": 0, "n": 0}, src=3, type_check=False),
    ):
        assert found["n"] == 3 and found["own"].number == 3
    dist.barrier()


@case("four")
def offloaded_partial_sums_stay_partial_sums(here: Rank) -> None:
    """pytorch-state_dict_utils, lines 893-1005: `_offload_state_dict_to_cpu` keeps the placements of any DTensor."""
    mesh = mesh_of(4)
    local = torch.full((3,), float(here.rank))
    leaf = torch.nn.Parameter(DTensor.from_local(local, mesh, (Partial(),), run_check=False))
    tree = {"w": leaf, "tied": leaf, "rows": distribute(torch.arange(8.0), mesh, (Shard(0),)), "n": here.rank}
    theirs: Any = torch_utils._offload_state_dict_to_cpu(tree)
    found = tc.trees.offload(tree)
    assert found["w"].placements == theirs["w"].placements == (Partial(),) and found["tied"] is found["w"]
    assert isinstance(found["w"], torch.nn.Parameter) and found["w"].to_local().tolist() == [here.rank] * 3
    local.fill_(9)
    assert found["w"].to_local().tolist() == [here.rank] * 3, "torch's is the tensor itself on the host"
    assert torch.equal(tc.trees.gather({"w": found["w"]})["w"], torch.full((3,), 6.0))


@case("four")
def only_chosen_ranks_offload(here: Rank) -> None:
    """pytorch-state_dict_utils, lines 563-633 and 893-1005: `ranks_only`, where the others get an empty dict."""
    rows = distribute(torch.arange(8.0), mesh_of(4), (Shard(0),))
    tree = {"rows": rows, "sums": DTensor.from_local(torch.ones(2), mesh_of(4), (Partial(),), run_check=False), "n": 1}
    theirs: Any = torch_utils._offload_state_dict_to_cpu(tree, ranks_only=(1, 3))
    found = tc.trees.offload(tree, ranks=[1, 3], pin=True, share=True)
    assert found["n"] == 1 and bool(theirs) == (here.rank in (1, 3))
    if here.rank in (1, 3):
        assert found["rows"].to_local().is_shared() and bits(found["rows"].to_local()) == bits(rows.to_local())
        assert found["sums"].placements == (Partial(),)
    else:
        assert found["rows"] == tc.ArraySpec((8,), "float32") and found["sums"] == tc.ArraySpec((2,), "float32")
    with pytest.raises(tc.RankError, match="ranks of 0 to 3"):
        tc.trees.offload(tree, ranks=[4])
    assert torch.equal(tc.trees.gather({"rows": rows}, ranks=[0, 1, 2, 3])["rows"], torch.arange(8.0))


@case("four")
def whole_state_dicts_are_cut_as_torch_cuts_them(here: Rank) -> None:
    """pytorch-state_dict_utils, lines 1553-1856 and 2029-2115: onto meta, uneven, and without a broadcast."""
    mesh = mesh_of(4)
    full = {"w": torch.randn(7, 3, generator=seeded()), "scalar": torch.tensor(2.5), "n": 5, "plain": torch.ones(2)}

    def local() -> dict[str, Any]:
        part = torch.empty(2 if here.rank < 3 else 1, 3, device="meta")
        cut = DTensor.from_local(part, mesh, (Shard(0),), run_check=False, shape=full["w"].shape, stride=(3, 1))
        return {"w": cut, "scalar": torch.tensor(0.0), "n": 0, "plain": torch.zeros(2)}

    theirs, host = local(), torch.device("cpu")
    torch_utils._broadcast_state_dict(full if here.rank == 0 else {}, theirs, host, strict=True)
    found = tc.trees.distribute(full if here.rank == 0 else None, local(), src=0)
    again = local()
    torch_utils._distribute_state_dict(full, again, host)
    for one in (found, tc.trees.distribute(full, local())):
        for other in (theirs, again):
            assert bits(one["w"].to_local()) == bits(other["w"].to_local()) and one["w"].placements == (Shard(0),)
            assert one["scalar"] == other["scalar"] == 2.5 and one["n"] == other["n"] == 5
            assert torch.equal(one["plain"], other["plain"])
    beyond = local() | {"more": 1}
    torch_utils._broadcast_state_dict(full if here.rank == 0 else {}, beyond, host, strict=True)
    assert "more" not in beyond, "torch takes away what the source lacks"
    with pytest.raises(tc.RankError, match="more: expected every leaf of like in the tree"):
        tc.trees.distribute(full if here.rank == 0 else None, local() | {"more": 1}, src=0)
