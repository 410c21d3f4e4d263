"""treeckpt.dcp on four ranks, beside torch.distributed.checkpoint where the two differ."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import treeckpt as tc
import treeckpt.dcp
from treeckpt.dcp.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from treeckpt.dcp.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict

from .registry import Rank, case

__all__: list[str] = []


def state_on(mesh: Any, placements: Any, factor: int) -> dict[str, Any]:
    whole = torch.arange(7.0 * 6).reshape(7, 6) * factor
    return {
        "model": {"w": distribute_tensor(whole, mesh, placements), "b": torch.full((3,), float(factor))},
        "optimizer": {"param_groups": [{"lr": factor, "names": ["w"]}, {"lr": 2 * factor, "names": ["b"]}]},
        "listed": [distribute_tensor(whole[:1], mesh, placements), torch.full((2,), float(factor)), factor],
    }


@case("four")
def dcp_forms_save_and_load_each_other_in_other_layouts(here: Rank) -> None:
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(42.0).reshape(7, 6) * 3
    for form in ("treeckpt", "storage"):
        path = here.directory / f"dcp {form}"
        state = state_on(flat, [Shard(0)], 3)
        if form == "treeckpt":
            treeckpt.dcp.save(state, checkpoint_id=path)
        else:
            dcp.save(state, storage_writer=treeckpt.dcp.Writer(path))
        found = tc.load(path)
        assert torch.equal(found["model"]["w"], whole) and found["optimizer"] == state["optimizer"]
        assert torch.equal(found["listed"][0], whole[:1]) and found["listed"][2] == 3
        for load in ("treeckpt", "storage"):
            target = state_on(square, [Shard(1), Replicate()], 0)
            if load == "treeckpt":
                treeckpt.dcp.load(target, checkpoint_id=path)
            else:
                dcp.load(target, storage_reader=treeckpt.dcp.Reader(path))
            assert torch.equal(target["model"]["w"].full_tensor(), whole)
            assert torch.equal(target["listed"][0].full_tensor(), whole[:1])
            assert target["optimizer"] == state["optimizer"] and target["model"]["b"].tolist() == [3.0] * 3
            dist.barrier()


@case("four")
def dcp_values_that_differ_are_refused_or_the_first_ranks(here: Rank) -> None:
    state = {"n": here.rank, "same": 5, "t": torch.full((2,), float(here.rank)), "only": {f"r{here.rank}": here.rank}}
    path = here.directory / "dcp conflict"
    with pytest.raises(CheckpointException, match=r"(?s)n: .*rank.*With on_conflict=\"rank0\" "):
        treeckpt.dcp.save(state, checkpoint_id=path)
    with pytest.raises(CheckpointException, match="on_conflict"):
        treeckpt.dcp.async_save(state, checkpoint_id=path).result()
    assert not (path / "index.json").exists()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        treeckpt.dcp.save(state, checkpoint_id=path, on_conflict="rank0")
    told = [str(one.message) for one in caught if "differ between ranks" in str(one.message)]
    assert len(told) == (here.rank == 0) and all("2 entries" in one and ": n, t" in one for one in told)
    found = tc.load(path)
    assert (found["n"], found["same"], found["t"].tolist()) == (0, 5, [0, 0])
    assert found["only"] == {f"r{rank}": rank for rank in range(4)}
    dcp.save(state, storage_writer=treeckpt.dcp.Writer(here.directory / "dcp silent"))
    assert tc.load(here.directory / "dcp silent", select="n")["n"] in range(4)  # DCP's planner lets one win silently


@case("four")
def dcp_loads_end_together(here: Rank) -> None:
    path = here.directory / "dcp together"
    treeckpt.dcp.save({"a": torch.ones(3), "b": 2}, checkpoint_id=path)
    target = {"a": torch.zeros(3 if here.rank != 2 else 4), "b": 0}
    with pytest.raises(CheckpointException, match="Size mismatch") as caught:
        treeckpt.dcp.load(target, checkpoint_id=path)
    assert list(caught.value.failures) == [2]

    class Broken:
        def state_dict(self) -> dict[str, int]:
            if here.rank == 1:
                raise ValueError("broken state")
            return {}

        def load_state_dict(self, state: Any) -> None:
            raise NotImplementedError

    with pytest.raises(CheckpointException, match="broken state"):
        treeckpt.dcp.save({"broken": Broken()}, checkpoint_id=here.directory / "dcp broken")
    with pytest.raises(CheckpointException, match="broken state"):
        treeckpt.dcp.load({"broken": Broken()}, checkpoint_id=path)


@case("four")
def dcp_allocates_meta_tensors_in_the_callers_dict(here: Rank) -> None:
    path = here.directory / "dcp meta"
    treeckpt.dcp.save({"a": {"b": torch.ones(3)}}, checkpoint_id=path)
    for load in (
        treeckpt.dcp.load,
        lambda state, checkpoint_id: dcp.load(state, storage_reader=treeckpt.dcp.Reader(path)),
    ):
        target = {"a": {"b": torch.empty(3, device="meta")}}
        load(target, checkpoint_id=path)
        assert target["a"]["b"].tolist() == [1, 1, 1]


@case("four")
def dcp_saves_alone_and_in_groups(here: Rank) -> None:
    half = [0, 1] if here.rank < 2 else [2, 3]
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[here.rank // 2]
    for form in ("treeckpt", "storage"):
        alone, ours = here.directory / f"dcp alone {form} {here.rank}", here.directory / f"dcp half {form} {half[0]}"
        for path, options in ((alone, {"no_dist": True}), (ours, {"process_group": group})):
            state = {"n": half[0], "rank": {str(here.rank): torch.ones(2)}}
            if form == "treeckpt":
                treeckpt.dcp.save(state, checkpoint_id=path, **options)
            else:
                dcp.save(state, storage_writer=treeckpt.dcp.Writer(path), **options)
            found = tc.load(path, comm="alone")
            assert found["n"] == half[0] and list(found["rank"]) == [
                str(r) for r in ([here.rank] if path == alone else half)
            ]
    for one in groups:
        if one is group:
            dist.destroy_process_group(one)


@case("four")
def dcp_plan_caching_serves_the_storage_also_where_one_rank_alone_has_changed(here: Rank) -> None:
    mesh = init_device_mesh("cpu", (4,))
    for step, changed in enumerate((False, False, True, True, False)):
        state = state_on(mesh, [Shard(0)], step)
        if changed and here.rank == 1:
            state["listed"] += [torch.full((2,), 7.0), {"step": step}]
        path = here.directory / f"dcp cached {step}"
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=treeckpt.dcp.Writer(path), planner=planner)
        found = tc.load(path)
        assert torch.equal(found["model"]["w"], torch.arange(42.0).reshape(7, 6) * step)
        assert found["model"]["b"].tolist() == [step] * 3 and found["optimizer"] == state["optimizer"]
        assert found["listed"][1].tolist() == [step] * 2 and found["listed"][2] == step
        assert len(found["listed"]) == (5 if changed else 3)
        assert not changed or (found["listed"][3].tolist() == [7.0, 7.0] and found["listed"][4] == {"step": step})


@case("four")
def dcp_plan_caching_in_a_group_is_refused_where_one_rank_alone_has_changed(here: Rank) -> None:
    class Planner(dcp.DefaultSavePlanner):
        """With a cache of its own, which DCP keeps by the name of the class."""

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, path = groups[here.rank // 2], here.directory / f"dcp cached half {here.rank // 2}"

    def save(state: dict[str, Any]) -> None:
        planner = Planner(enable_plan_caching=True)
        dcp.save(state, storage_writer=treeckpt.dcp.Writer(path), planner=planner, process_group=group)

    own = str(here.rank)
    for factor in (1, 2):
        save({own: torch.full((3,), float(factor))})
        assert sum(tensor.sum() for tensor in tc.load(path, comm="alone").values()) == 6 * factor
        dist.barrier()
    with pytest.raises(CheckpointException, match="enable_plan_caching=False"):
        save({own: torch.full((3 + here.rank % 2,), 1.0)})
    dist.destroy_process_group(group)


@case("four")
def dcp_loads_a_file_of_torch_save_that_one_rank_reads(here: Rank) -> None:
    """pytorch-dcp-docs, lines 375-383: `BroadcastingTorchSaveReader` with `DynamicMetaLoadPlanner`."""
    path, whole = here.directory / "broadcast.pt", torch.arange(42.0).reshape(7, 6)
    if here.rank == 0:
        torch.save({"w": whole}, path)
    dist.barrier()
    target = {"w": torch.zeros(7, 6)}
    reader, planner = BroadcastingTorchSaveReader(), DynamicMetaLoadPlanner()
    treeckpt.dcp.load(target, storage_reader=reader, planner=planner, checkpoint_id=path)
    assert torch.equal(target["w"], whole)


@case("four")
def the_way_that_the_error_of_fsdp1_names_resumes_it_and_restores_a_plain_model(here: Rank) -> None:
    """pytorch-dcp-docs, lines 329-334: FSDP of the first kind, by its sharded state dict."""

    def new_job(*, sharded: bool = True) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(5, 300), torch.nn.Linear(300, 7))
        if sharded:
            model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        return model, torch.optim.AdamW(model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        data = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
        model(data).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = new_job()
    train(model, optimizer, 1)
    with pytest.raises(tc.TreeError, match=r"treeckpt\.dcp\.state_dict with tc\.save"):
        tc.training.state(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: ShardedTensor and FSDP of the first kind are deprecated
        model_state, optimizer_state = get_state_dict(model, optimizer)
        tc.save(here.directory / "fsdp1", {"model": model_state, "optimizer": optimizer_state})
        again, again_optimizer = new_job()
        model_state, optimizer_state = get_state_dict(again, again_optimizer)
        tc.load_into(here.directory / "fsdp1", {"model": model_state, "optimizer": optimizer_state})
        set_state_dict(again, again_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        plain, plain_optimizer = new_job(sharded=False)
        tc.training.restore(here.directory / "fsdp1", plain, plain_optimizer, strict="missing")
        for job in ((model, optimizer), (again, again_optimizer), (plain, plain_optimizer)):
            train(*job, 2)
        wanted, resumed = (
            get_model_state_dict(one, options=StateDictOptions(full_state_dict=True)) for one in (model, again)
        )
    for name, tensor in plain.state_dict().items():
        assert torch.equal(wanted[name], resumed[name]) and torch.allclose(wanted[name], tensor)


@case("four")
def flat_parts_of_fsdp1_are_no_replicas_and_the_error_names_what_saves_them(here: Rank) -> None:
    for width, has_names in ((30, False), (30, True), (20_000, False)):  # of the last each rank has 120 KB
        model = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 1))
        wrapped = FullyShardedDataParallel(model, use_orig_params=has_names, device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(wrapped.parameters())
        wrapped(torch.rand(3, 5)).sum().backward()
        optimizer.step()
        for tree in (dict(wrapped.named_parameters()), optimizer.state_dict()):
            with pytest.raises(
                tc.MismatchError, match=r"FSDP1, ZeRO.*tc\.training\.state\(model, optimizer\) saves it"
            ):
                tc.save(here.directory / "flat", tree)
